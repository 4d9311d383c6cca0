"""A day of a run on the virtual clock: short jobs come all the time beside a long one, and agents crash.

    python -m tests.chaos.virtual.day [--hours 24] [--every-s 20]

Says what each hour needed; exit code 1 where something is violated.
"""

from __future__ import annotations

import argparse
import sys
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
COMPACTED_BYTES = 2**18
"""Little, so that a day's journal is compacted several times."""
CHECK_EVERY = 5000
"""Events between two checks of the invariants: each looks at all jobs."""


@dataclass(frozen=True)
class Hour:
    """What a run has come to at the end of an hour. In that hour: `calls` of the agent to the file system,
    `cpu_s` of all that was played."""

    ended: int
    journal_bytes: int
    status_bytes: int
    calls: int
    cpu_s: float


def schedule(hours: int, every_s: float) -> Schedule:
    """A job each `every_s` seconds, of some seconds; a long one, suspended now and then, and cancelled at the
    end; a crash an hour."""
    end_s = hours * HOUR_S
    names = [f"short{n}" for n in range(int(end_s / every_s))]
    short = {name: _job(name, Kind.COMMAND, 30) for name in names}
    doings = [Doing(5.0 + n * every_s, "submit", (name,)) for n, name in enumerate(names)]
    for at in range(900, int(end_s), 900):
        doings += [Doing(at, "suspend", ("long",)), Doing(at + 60.0, "resume", ("long",))]
    doings += [Doing(at * HOUR_S + 1234.5, "kill agent") for at in range(hours)]
    doings.append(Doing(end_s + 1.0, "cancel", ("long",)))
    return Schedule(
        seed=0,
        gpus=2,
        policy="marble",
        options={},
        jobs=(_job("long", Kind.TRAINER, int(end_s * 20)),),
        later=short,
        habits={"long": Habits(rate=10.0, save_every_s=60.0)} | dict.fromkeys(["short", *names], Habits()),
        doings=tuple(sorted(doings, key=lambda doing: doing.at)),
        lasts_s=end_s,
        compacted_bytes=COMPACTED_BYTES,
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
        before = (0, time.process_time())

        def look() -> None:
            nonlocal before
            needed = (world.disk.calls, time.process_time())
            sizes = [path.stat().st_size for path in (world.rundir.journal, world.rundir.status)]
            ended = sum(map(len, world.ledger.finished.values()))
            seen.append(Hour(ended, *sizes, needed[0] - before[0], needed[1] - before[1]))
            before = needed

        for hour in range(1, hours + 1):
            world.clock.after(hour * HOUR_S, look)
        return violations(world, play(world, check_every=CHECK_EVERY)), seen


def main(words: Sequence[str]) -> int:
    """Play a day; the exit code."""
    parser = argparse.ArgumentParser(prog="day", description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--every-s", type=float, default=20.0, help="a job comes each so many seconds")
    args = parser.parse_args(words)
    violated, hours = played(args.hours, args.every_s)
    print("hour   jobs over   journal B   status B   calls   CPU s")
    for number, hour in enumerate(hours, 1):
        print(
            f"{number:4} {hour.ended:11} {hour.journal_bytes:11} {hour.status_bytes:10} {hour.calls:7} "
            f"{hour.cpu_s:7.2f}"
        )
    print(*violated, sep="\n")
    return bool(violated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
