"""Many schedules, one after the other: what is violated, and by which shortest schedule."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from .checks import violations
from .lives import play
from .schedule import Schedule
from .world import World

MOST_TRIES = 400
"""How many smaller schedules are tried."""


def played(schedule: Schedule) -> tuple[list[str], World]:
    """What a schedule violates, and the world after it."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory_folder()) as folder:
        world = World(schedule, Path(folder))
        try:
            return violations(world, play(world)), world
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).partition("\n")[0]
            return [f"{type(error).__name__}: {said} ({Path(where.filename).name}:{where.lineno})"], world


def memory_folder() -> str | None:
    """A file system in memory: its fsync takes no time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest schedule found that still fails."""
    tries = 0
    while True:
        for smaller in schedule.smaller():
            tries += 1
            if tries > MOST_TRIES:
                return schedule
            if fails(smaller):
                schedule = smaller
                break
        else:
            return schedule


def told(schedule: Schedule) -> str:
    """A schedule that violates something, made as small as can be, with all that was said in it."""

    def kinds(found: list[str]) -> set[str]:
        return {" ".join(word for word in line.split() if word.isalpha()) for line in found}

    first = kinds(played(schedule)[0])
    small = shrunk(schedule, lambda smaller: bool(kinds(played(smaller)[0]) & first))
    found, world = played(small)
    return "\n".join([*found, str(small), *(f"    {line}" for line in world.said)])
