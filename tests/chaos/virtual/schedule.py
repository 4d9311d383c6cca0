"""A schedule: jobs, what users do, and what goes wrong, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.needs import Needs
from hpcsched.patience import PATIENCE_S
from hpcsched.store.compaction import COMPACTED_BYTES

POLICIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("marble", {}),
    ("exclusive", {}),
    ("planner", {"budget": 20}),
)


@dataclass(frozen=True)
class Habits:
    """How a program behaves. Times in seconds of the run's clock.

    `rate`: steps a second on one GPU. `deaf`: it neither saves nor ends when it is asked to. `fails_at`: the
    step at which it fails, so many `times`. `in_place`: ranks can come and go. `saves`: whether it saves what
    it has when it is asked to leave. `keeps_s`: a quick suspend leaves its state in memory, and it is on disk
    so much later; None: it does not know quick ones. `back_s`: when it has trained for so long, what
    trains is killed, and it goes on from the newest checkpoint, once in an attempt, as jobs of a pack do.
    """

    rate: float = 10.0
    start_s: float = 0.5
    suspend_s: float = 0.3
    save_every_s: float = 5.0
    deaf: bool = False
    fails_at: int | None = None
    times: int = 0
    in_place: bool = False
    saves: bool = True
    keeps_s: float | None = None
    back_s: float | None = None


@dataclass(frozen=True)
class Doing:
    """Something that is done from outside, or goes wrong, at a time (seconds since the first life began)."""

    at: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:8.3f} {self.kind}{' ' if self.args else ''}{', '.join(map(str, self.args))}"


@dataclass(frozen=True)
class Schedule:
    """All that happens in a run; `doings` in order of time."""

    seed: int
    gpus: int
    policy: str
    options: Mapping[str, Any]
    jobs: tuple[JobSpec, ...]
    later: Mapping[str, JobSpec]
    """Jobs that are submitted while it runs, by name."""
    habits: Mapping[str, Habits]
    doings: tuple[Doing, ...]
    time_limit_s: float | None = None
    """Of each allocation; None: there is none."""
    grace_s: float = 4.0
    lasts_s: float = 100.0
    """After so long nothing goes wrong any more, and users let all go on that they have held or suspended."""
    compacted_bytes: int = COMPACTED_BYTES
    """Bytes of a journal from which on it is compacted."""

    @property
    def specs(self) -> dict[str, JobSpec]:
        """All jobs, by name."""
        return {spec.name: spec for spec in (*self.jobs, *self.later.values())}

    def smaller(self) -> Iterator[Schedule]:
        """Schedules with less in them: without half of the doings, without one, without a job."""
        for size in sorted({max(1, len(self.doings) // 2), max(1, len(self.doings) // 4), 1}, reverse=True):
            for start in range(0, len(self.doings), size):
                yield replace(self, doings=self.doings[:start] + self.doings[start + size :])
        needed = {name for spec in (*self.jobs, *self.later.values()) for name in spec.after}
        for i, spec in enumerate(self.jobs):
            if len(self.jobs) > 1 and spec.name not in needed:
                yield replace(self, jobs=self.jobs[:i] + self.jobs[i + 1 :])
        if self.time_limit_s is not None:
            yield replace(self, time_limit_s=None)
        if self.compacted_bytes != COMPACTED_BYTES:
            yield replace(self, compacted_bytes=COMPACTED_BYTES)
        for name, habits in self.habits.items():
            plain = Habits(rate=habits.rate)
            if habits != plain:
                yield replace(self, habits={**self.habits, name: plain})

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.gpus} GPUs, {self.policy} {dict(self.options)}, "
            f"time limit {self.time_limit_s}, compacted from {self.compacted_bytes:,} bytes"
        ]
        for spec in (*self.jobs, *self.later.values()):
            most = spec.gpus_max if spec.gpus_max is not None else "any"
            lines.append(
                f"  job {spec.name}: {spec.kind} {spec.steps} steps, {spec.gpus_min} to {most} GPUs, "
                f"retries {spec.retries}, {_special(spec)}{self.habits[spec.name]}"
            )
        return "\n".join([*lines, *(f"  {doing}" for doing in self.doings)])


def _special(spec: JobSpec) -> str:
    said = {
        "background": spec.background,
        "after": spec.after,
        "priority": spec.priority,
        "needs": spec.needs,
        "cpus": spec.cpus,
    }
    return "".join(f"{key} {value}, " for key, value in said.items() if value)


GARBAGE = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"command":"submit","jobs":[{"name":"x"}]}',
    b'{"command":"dance"}',
)
"""What no command is."""

COMMANDS = ("cancel", "hold", "release", "suspend", "resume", "retry")


def drawn(seed: int) -> Schedule:
    """The schedule of a seed: always the same."""
    random = Random(seed)
    gpus = random.choice((1, 2, 2, 3, 4))
    policy, options = random.choice(POLICIES)
    names = [f"j{i}" for i in range(1, random.randint(1, 6) + 1)]
    late = [f"late{i}" for i in range(1, random.randint(0, 3) + 1)]
    specs = dict[str, JobSpec]()
    for name in (*names, *late):
        specs[name] = _job(name, random, gpus, [other for other in specs if other in names])
    habits = {name: _habits(random, spec) for name, spec in specs.items()}
    doings = [Doing(random.uniform(0, 25), "submit", (name,)) for name in late]
    for _ in range(random.choice((0, 1, 2, 4, 8))):
        command = random.choice(COMMANDS)
        doings.append(Doing(random.uniform(0, 40), command, (random.choice(names),)))
    for _ in range(random.choice((0, 0, 1, 2))):
        kind = random.choice(("submit again", "no command"))
        args = (random.choice(names),) if kind == "submit again" else (random.choice(GARBAGE),)
        doings.append(Doing(random.uniform(0, 40), kind, args))
    for _ in range(random.randint(1, 8)):
        doings.append(_fault(random, names, gpus, [doing.at for doing in doings]))
    limit_s = random.uniform(25.0, 60.0) if random.random() < 0.4 else None
    return Schedule(
        seed=seed,
        gpus=gpus,
        policy=policy,
        options=options,
        jobs=tuple(specs[name] for name in names),
        later={name: specs[name] for name in late},
        habits=habits,
        doings=tuple(sorted(doings, key=lambda doing: doing.at)),
        time_limit_s=limit_s,
        compacted_bytes=random.choice((COMPACTED_BYTES, 3000, 9000)),
    )


def _job(name: str, random: Random, gpus: int, earlier: Sequence[str]) -> JobSpec:
    kind = random.choice((Kind.TRAINER, Kind.TRAINER, Kind.COMMAND))
    least = random.choice((1, 1, 1, min(2, gpus)))
    most = random.choice((least, None)) if kind is Kind.TRAINER else least
    what: dict[str, Any] = {"trainer": "some.module:Name"}
    if kind is Kind.COMMAND:
        what = {"command": ("train",)}
    match random.random():
        case x if x < 0.1 and kind is Kind.COMMAND:
            what |= {"needs": Needs(share=random.choice((0.3, 0.6)))}
            least = most = 1
        case x if x < 0.2 and kind is Kind.TRAINER:
            what |= {"background": True}
            least = most = 1
        case x if x < 0.3 and kind is Kind.COMMAND:
            what |= {"strategy": {"kind": "cpu", "cpus": random.choice((1, 2))}}
            least = most = 0
        case x if x < 0.4:
            what |= {"needs": Needs(time_s=random.choice((5.0, 20.0)))}
        case x if x < 0.5 and earlier:
            what |= {"after": (random.choice(earlier),)}
        case x if x < 0.6:
            what |= {"priority": random.choice((-1, 1))}
    return JobSpec(
        name=name,
        kind=kind,
        model=name,
        steps=random.choice((20, 60, 150, 300)),
        gpus_min=least,
        gpus_max=most,
        retries=random.choice((0, 1, 3)),
        checkpoint_every_s=5.0,
        workdir="/",
        **what,
    )


def _habits(random: Random, spec: JobSpec) -> Habits:
    fails, goes_back = random.random() < 0.2, random.random() < 0.15
    habits = Habits(
        rate=random.choice((5.0, 10.0)),
        start_s=random.choice((0.0, 0.2, 1.0)),
        suspend_s=random.choice((0.0, 0.1, 1.0, 3.0)),
        save_every_s=random.choice((2.0, 5.0)),
        deaf=random.random() < 0.07,
        fails_at=random.randrange(1, spec.steps or 2) if fails else None,
        times=random.choice((1, 2, 99)) if fails else 0,
        in_place=spec.kind is Kind.TRAINER and random.random() < 0.5,
        saves=random.random() < 0.9,
        keeps_s=random.choice((None, 0.5, 5.0)) if spec.kind is Kind.TRAINER else None,
    )
    back_s = random.choice((0.7, 3.0, 7.0)) if goes_back and not habits.in_place else None
    return replace(habits, back_s=back_s)


def _fault(random: Random, names: list[str], gpus: int, when: list[float]) -> Doing:
    """Something that goes wrong, at a time of its own or just as something else happens."""
    at = random.uniform(0.0, 40.0)
    if when and random.random() < 0.5:
        at = random.choice(when) + random.choice((0.0, 0.05, 0.3))
    kind = random.choice(
        (
            "kill agent",
            "kill agent",
            "kill agent in a call",
            "kill agent in a call",
            "kill agent in a call",
            "node dies",
            "kill worker",
            "no room",
            "broken disk",
            "no more files",
            "clock jumps",
            "all stopped",
            "batch silent",
            "SIGTERM",
            "ends sooner",
            "GPU lost",
        )
    )
    match kind:
        case "kill agent in a call":
            return Doing(at, kind, (random.randint(1, random.choice((6, 20, 60))),))
        case "kill worker":
            return Doing(at, kind, (random.choice(names),))
        case "no room" | "no more files":
            return Doing(at, kind, (round(random.uniform(0.5, 8.0), 3),))
        case "broken disk":  # for less time than an agent waits for
            return Doing(at, kind, (round(random.uniform(0.2, PATIENCE_S - 1.0), 3),))
        case "clock jumps":
            return Doing(at, kind, (random.choice((-86400.0, -30.0, -1.0, 1.0, 30.0, 86400.0)),))
        case "all stopped":
            return Doing(at, kind, (random.choice((6.0, 60.0, 3600.0)),))
        case "ends sooner":
            return Doing(at, kind, (random.uniform(20.0, 30.0),))
        case "batch silent":
            return Doing(at, kind, (random.uniform(5.0, 30.0),))
        case "GPU lost":
            return Doing(at, kind, (random.randrange(gpus), random.choice((6.0, 30.0))))
    return Doing(at, kind)
