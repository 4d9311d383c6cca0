"""A schedule: where, which jobs, and what goes wrong when; all drawn from one seed."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from .shim import AGENT, MAKE, OPEN, READ, RENAME, ROOM, SYNC, UNLINK, WORKER, WRITE, Rule

WRITING = OPEN | WRITE | SYNC | RENAME | MAKE
ALL = READ | WRITING | UNLINK

FLAVOURS = {
    "programs": 34,
    "workers": 8,
    "torch": 22,
    "memory": 4,
    "disks": 12,
    "walltime": 12,
    "hosts": 8,
    "net": 4,
    "join": 4,
    "pids": 5,
    "tune": 5,
}
"""How often which kind of schedule is drawn, of about a hundred."""


@dataclass(frozen=True)
class Job:
    """A job. `kind`: a word of `jobs.WRITERS`; `keys`: of its [[job]] table; `options`: of its program."""

    name: str
    kind: str
    steps: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.steps} steps, {dict(self.keys)} {dict(self.options)}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, or is done from outside, so many seconds after the first life began."""

    at: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:6.2f} {self.kind}{' ' if self.args else ''}{', '.join(map(str, self.args))}"


@dataclass(frozen=True)
class Schedule:
    """All that happens in a run; `faults` in order of time.

    `life_s`: how long each allocation has left when it is said that it ends; None: it does not.
    """

    seed: int
    flavour: str
    slots: int
    policy: str
    jobs: tuple[Job, ...]
    later: tuple[Job, ...] = ()
    """Jobs that a fault submits while it runs."""
    faults: tuple[Fault, ...] = ()
    hosts: tuple[str, ...] = ()
    life_s: float | None = None
    warm: bool = True

    @property
    def torch(self) -> bool:
        return any(job.kind in TORCH for job in (*self.jobs, *self.later))

    def smaller(self) -> Iterator[Schedule]:
        """Schedules with less in them: without half of the faults, without one, without a job."""
        for size in sorted({max(1, len(self.faults) // 2), 1}, reverse=True):
            for start in range(0, len(self.faults), size):
                yield replace(self, faults=self.faults[:start] + self.faults[start + size :])
        needed = {name for job in (*self.jobs, *self.later) for name in job.keys.get("after", ())}
        for i, job in enumerate(self.jobs):
            if len(self.jobs) > 1 and job.name not in needed:
                yield replace(self, jobs=self.jobs[:i] + self.jobs[i + 1 :])

    def __str__(self) -> str:
        about = f"{self.flavour}, {self.slots} slots, {self.policy}"
        about += f", hosts {','.join(self.hosts)}" if self.hosts else ""
        about += f", allocations of {self.life_s:.1f} s" if self.life_s else ""
        lines = [f"seed {self.seed}: {about}", *(f"  job {job}" for job in self.jobs)]
        lines += [f"  later {job}" for job in self.later]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


TORCH = ("ddp", "elastic", "packed", "vsw", "burst", "ps")
PROGRAMS = (
    "contract",
    "contract",
    "contract",
    "shell",
    "saves",
    "goes",
    "plain",
    "cpu",
    "share",
    "background",
)


def drawn(seed: int, flavour: str = "") -> Schedule:
    """The schedule of a seed (and a flavour, where one is wanted): always the same."""
    random = Random(f"{seed} {flavour}")
    flavour = flavour or random.choices(list(FLAVOURS), list(FLAVOURS.values()))[0]
    slots = random.choice((1, 2, 2, 3))
    policy = random.choice(("marble", "marble", "exclusive", "planner"))
    hosts = {"hosts": ("a", "b"), "net": ("a", "b"), "join": ("home", "far")}.get(flavour, ())
    if flavour == "tune":
        jobs: tuple[Job, ...] = ()
    elif flavour == "memory":  # a state that is suspended is in memory first, and a keeper makes it durable
        kind = random.choice(("ddp", "elastic"))
        one = _trainer("t0", kind, 60, random.randrange(3), checkpoint_every=600)
        jobs = (replace(one, options={**one.options, "pause": 0.1}),)
    elif flavour == "torch":
        jobs = _trainings(random, slots)
    elif hosts:
        jobs = _spread(random, wide=flavour != "join")
    else:
        jobs = tuple(_program(f"j{i}", random, slots) for i in range(1, random.randint(2, 4) + 1))
    jobs = _chained(random, jobs)
    later: tuple[Job, ...] = ()
    if flavour == "walltime":  # longer than an allocation
        jobs = tuple(replace(job, steps=3 * job.steps) for job in jobs)
    if flavour not in ("tune", "torch", "memory") and random.random() < 0.4:
        later = (_contract("late", random),)
    names = [job.name for job in jobs] or [f"trial-{number}" for number in range(9)]
    faults = [Fault(round(random.uniform(0.5, 5.0), 2), "submit", (job.name,)) for job in later]
    for _ in range(random.randint(1, 4)):
        faults.append(_fault(random, flavour, names, hosts, faults))
    return Schedule(
        seed=seed,
        flavour=flavour,
        slots=1 if hosts else slots,
        policy=policy,
        jobs=jobs,
        later=later,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        hosts=hosts,
        life_s=round(random.uniform(9.0, 16.0), 1) if flavour == "walltime" else None,
        warm=flavour in ("torch", "memory") or random.random() < 0.1,
    )


def _contract(name: str, random: Random, **keys: Any) -> Job:
    options: dict[str, Any] = {
        "pause": random.choice((0.03, 0.05)),
        "every": random.choice((5, 10, 25)),
    }
    match random.random():
        case x if x < 0.08:
            options |= {"fails_at": random.randint(1, 30), "times": random.choice((1, 2, 99))}
            keys |= {"retries": 3}  # who always fails at once waits longer each time
        case x if x < 0.13:
            options |= {"deaf": True}
        case x if x < 0.28:
            options |= {"helper": True}
        case x if x < 0.33:
            options |= {"takes_mib": 300}
            keys |= {"memory": "100M", "retries": 0}
        case x if x < 0.45:
            options |= {"strict": True}
    return Job(name, "contract", random.choice((40, 100, 200)), keys, options)


def _program(name: str, random: Random, slots: int) -> Job:
    kind, steps = random.choice(PROGRAMS), random.choice((40, 100, 200))
    pause = random.choice((0.03, 0.05))
    match kind:
        case "contract":
            keys = {"gpus": random.choice((1, 1, min(2, slots)))}
            return _contract(name, random, **keys)
        case "shell":
            return Job(name, kind, min(steps, 100), {"gpus": 1}, {"pause": 0.05, "every": 10})
        case "saves" | "goes":
            keys = {"gpus": 1, "restartable": True}
            return Job(name, kind, steps, keys, {"pause": pause, "every": random.choice((5, 15))})
        case "plain":
            if random.random() < 0.5:
                keys = {"gpus": 1, "matrix": {"x": [1, 2, 3]}, "at_once": random.choice((1, 2))}
                return Job(name, "array", 20, keys, {"pause": 0.02})
            return Job(name, kind, 30, {"gpus": 1}, {"pause": 0.02})
        case "cpu":
            return _contract(name, random, strategy={"kind": "cpu", "cpus": 1})
        case "share":
            return _contract(name, random, gpus=random.choice((0.25, 0.5)))
    behind = _contract(name, random)
    plain = {key: behind.options[key] for key in ("pause", "every")}
    return replace(
        behind, steps=40, keys={"background": True}, options=plain
    )  # where cores are busy it starves


def _trainings(random: Random, slots: int) -> tuple[Job, ...]:
    kind = random.choice(("ddp", "ddp", "elastic", "elastic", "packed", "vsw", "burst", "ps"))
    steps, more = 60, []
    keys: dict[str, Any] = {"checkpoint_every": random.choice((0.5, 1, 600))}
    seeds = random.sample(range(3), 3)
    match kind:
        case "packed":
            return tuple(
                _trainer(f"t{i}", "packed", steps, seeds[i], **keys) for i in range(random.choice((2, 3)))
            )
        case "ddp" | "elastic":
            more = [_trainer("t1", random.choice(("ddp", "elastic")), steps, seeds[1], **keys)]
            more = more if random.random() < 0.4 else []
    if random.random() < 0.4:
        more.append(_contract("c1", random, gpus=1))
    return (_trainer("t0", kind, steps, seeds[0], **keys), *more)


def _trainer(name: str, kind: str, steps: int, seed: int, **keys: Any) -> Job:
    return Job(name, kind, steps, keys, {"seed": seed, "pause": 0.05})  # long enough to be struck


def _spread(random: Random, *, wide: bool) -> tuple[Job, ...]:
    """Jobs for two hosts with one slot each."""
    one = _contract("wide", random, gpus=1, nodes=2, processes="per-gpu")
    jobs = [_contract(f"j{i}", random, gpus=1) for i in range(1, random.randint(2, 3) + 1)]
    if wide and random.random() < 0.5:
        jobs.insert(random.randrange(2), one)
    if random.random() < 0.3:
        jobs.append(
            _trainer("t0", random.choice(("ddp", "elastic")), 60, random.randrange(3), checkpoint_every=1)
        )
    return tuple(jobs)


def _chained(random: Random, jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Now and then the last job waits for the first."""
    if len(jobs) < 2 or random.random() < 0.7 or jobs[-1].kind in TORCH:
        return tuple(jobs)
    last = replace(jobs[-1], keys={**jobs[-1].keys, "after": [jobs[0].name]})
    return (*jobs[:-1], last)


_AGENT = (
    "kill agent",
    "kill agent",
    "kill agent and worker",
    "stop agent",
    "SIGTERM",
    "torn journal",
    "power loss",
)
_WORKERS = ("kill worker", "kill worker", "stop worker", "suspend, then kill")
_ELSE = (
    "second agent",
    "suspend and resume",
    "hold and release",
    "cancel",
    "no snapshot",
    "noise in the inbox",
)
_OF = {
    "programs": (*_AGENT, *_WORKERS, *_ELSE, "clock"),
    "memory": (*3 * ("suspend and resume",), "suspend, then kill", "kill keeper", "kill worker", "hiccup"),
    "workers": (*_WORKERS[:-1], "suspend and resume", "cancel", "no snapshot"),
    "torch": (
        *_AGENT,
        *_WORKERS,
        "kill zygote",
        "kill keeper",
        "suspend and resume",
        "suspend and resume",
        "hiccup",
        "hiccup",
        "hiccup",
        "disk",
    ),
    "disks": (
        "disk",
        "disk",
        "full for jobs",
        "full for jobs",
        "hiccup",
        "slow disk",
        "stale",
        "kill agent",
        "kill worker",
    ),
    "walltime": (
        "batch",
        "batch",
        "kill agent",
        "kill worker",
        "stop agent",
        "slow disk",
        "suspend and resume",
    ),
    "hosts": (
        "kill agent",
        "kill node agent",
        "stop node agent",
        "kill worker",
        "SIGTERM",
        "stop agent",
        "hiccup",
        "stale",
        "disk",
    ),
    "join": (
        "kill agent",
        "kill agent",
        "kill agent",
        "kill node agent",
        "kill worker",
        "stop agent",
        "hiccup",
        "hiccup",
        "stale",
        "disk",
    ),
    "net": ("cut", "cut", "thin", "kill agent", "kill worker", "kill node agent"),
    "pids": ("kill agent", "kill agent", "kill worker", "kill agent and worker", "many pids", "many pids"),
    "tune": (
        "kill agent",
        "kill agent",
        "kill worker",
        "SIGTERM",
        "stop agent",
        "torn journal",
        "second agent",
    ),
}


def _fault(
    random: Random, flavour: str, names: Sequence[str], hosts: Sequence[str], others: Sequence[Fault]
) -> Fault:
    """Something that goes wrong, at a time of its own or just as something else happens."""
    last = 10.0 if flavour in ("torch", "memory") else 6.0  # trainings load their libraries first
    at = round(random.uniform(0.2, last), 2)
    if others and random.random() < 0.25:
        at = round(random.choice(others).at + random.choice((0.0, 0.1, 0.3)), 2)
    kind = random.choice(_OF[flavour])
    if names and kind in ("kill worker", "kill agent and worker", "stop worker", "suspend, then kill"):
        args: tuple[Any, ...] = (random.choice(names),)
        if kind == "stop worker":
            args = (*args, random.choice((0.5, 2.0)))
        elif kind == "suspend, then kill":
            args = (*args, random.choice((0.0, 0.1, 0.5)))
        return Fault(at, kind, args)
    match kind:
        case "suspend and resume" | "hold and release":
            return Fault(at, kind, (random.choice(names), random.choice((0.2, 1.0, 2.0))))
        case "cancel":
            return Fault(at, kind, (random.choice(names),))
        case "stop agent":
            return Fault(at, kind, (random.choice((0.5, 2.0, 5.5)),))
        case "torn journal":
            return Fault(at, kind, (round(random.random(), 3), random.choice((True, False))))
        case "clock":
            return Fault(at, kind, (random.choice((-86400.0, -30.0, -2.0, 2.0, 30.0, 86400.0)),))
        case "disk":
            number = random.choice((errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO))
            who = random.choice((AGENT, WORKER, AGENT | WORKER, WORKER))
            more = {errno.ENOSPC: ROOM, errno.EIO: UNLINK}.get(number, 0)  # where it is full files can go
            rule = Rule(WRITING | more, who, number, chance=random.choice((0.1, 1.0)))
            return Fault(at, kind, (rule, random.choice((0.3, 1.0, 3.0))))
        case "full for jobs":
            rule = Rule(WRITING | ROOM, WORKER, errno.ENOSPC, chance=random.choice((0.3, 1.0)))
            return Fault(at, kind, (rule, random.choice((3.0, 6.0))))
        case "slow disk":
            rule = Rule(SYNC, delay_s=random.choice((0.1, 0.5)), chance=random.choice((0.3, 1.0)))
            return Fault(at, kind, (rule, random.choice((1.0, 3.0))))
        case "hiccup":
            who = random.choice((AGENT, AGENT | WORKER, WORKER))
            rule = Rule(ALL, who, random.choice((errno.EIO, errno.ESTALE)))
            return Fault(at, kind, (rule, random.choice((0.3, 1.0, 3.0))))
        case "stale":
            rule = Rule(ALL, random.choice((AGENT, WORKER)), errno.ESTALE, chance=0.2)
            return Fault(at, kind, (replace(rule, times=random.choice((1, 5))), 2.0))
        case "batch":
            return Fault(at, kind, (random.choice(("hang", "down", "garbage")), random.choice((1.0, 4.0))))
        case "kill node agent":
            return Fault(at, kind, (random.choice(hosts),))
        case "stop node agent":
            return Fault(at, kind, (random.choice(hosts), random.choice((1.0, 3.0, 3.0, 9.0))))
        case "cut":
            return Fault(at, kind, (random.choice(hosts), random.choice((1.0, 3.0, 3.0, 9.0))))
        case "thin":
            return Fault(at, kind, (random.choice(hosts), random.choice((1.0, 3.0))))
    return Fault(at, kind)
