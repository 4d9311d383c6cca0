"""A day of a run on the virtual clock: short jobs come all the time beside a long one, and agents crash."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsched.core.model import JobSpec, Kind

from .campaign import memory_folder
from .checks import violations
from .lives import play
from .schedule import Doing, Habits, Schedule
from .world import World

HOUR_S = 3600.0


@dataclass(frozen=True)
class Hour:
    """What a run needs at the end of an hour. `cpu_s`: of all that was played in it."""

    ended: int
    journal_bytes: int
    status_bytes: int
    cpu_s: float


def schedule(hours: int, every_s: float) -> Schedule:
    """A job each `every_s` seconds, of some seconds; a long one, suspended now and then; a crash an hour."""
    end_s = hours * HOUR_S
    names = [f"short{n}" for n in range(int(end_s / every_s))]
    short = {name: _job(name, Kind.COMMAND, 30) for name in names}
    doings = [Doing(5.0 + n * every_s, "submit", (name,)) for n, name in enumerate(names)]
    for at in range(900, int(end_s), 900):
        doings += [Doing(at, "suspend", ("long",)), Doing(at + 60.0, "resume", ("long",))]
    doings += [Doing(at * HOUR_S + 1234.5, "kill agent") for at in range(hours)]
    return Schedule(
        seed=0,
        gpus=2,
        policy="marble",
        options={},
        jobs=(_job("long", Kind.TRAINER, int(end_s * 8)),),
        later=short,
        habits={"long": Habits(rate=10.0, save_every_s=60.0)} | dict.fromkeys(["short", *names], Habits()),
        doings=tuple(sorted(doings, key=lambda doing: doing.at)),
        lasts_s=end_s,
    )


def _job(name: str, kind: Kind, steps: int) -> JobSpec:
    what = {"trainer": "some.module:Name"} if kind is Kind.TRAINER else {"command": ("train",)}
    return JobSpec(
        name=name,
        kind=kind,
        model=name.rstrip("0123456789"),
        steps=steps,
        gpus_min=1,
        gpus_max=1,
        retries=1,
        checkpoint_every_s=60.0,
        workdir="/",
        **what,  # type: ignore[arg-type]
    )


def played(hours: int, every_s: float) -> tuple[list[str], Sequence[Hour]]:
    """What is violated in so many hours, and what the run needed at the end of each."""
    seen: list[Hour] = []
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory_folder()) as folder:
        world = World(schedule(hours, every_s), Path(folder))
        began = [time.process_time()]

        def look() -> None:
            now, run = time.process_time(), world.rundir
            sizes = [path.stat().st_size for path in (run.journal, run.status)]
            seen.append(Hour(sum(world.ledger.finished.values()), sizes[0], sizes[1], now - began[0]))
            began[0] = now

        for hour in range(1, hours + 1):
            world.clock.after(hour * HOUR_S, look)
        return violations(world, play(world)), seen
