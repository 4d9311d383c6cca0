"""Plays schedules: what each violates, a row about it, and the shortest that still does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from places import ROOT

from .checks import violations
from .lives import Player
from .places import can_make_namespaces
from .schedule import Schedule, drawn
from .shim import library
from .weights import needed, undisturbed
from .world import World

KEPT = Path(tempfile.gettempdir()) / "chaos-real-kept"
"""Folders of schedules that have violated something."""


class Row(msgspec.Struct, kw_only=True):
    """A schedule that was played. `walltimes`: ends of allocations, and those at which all had been saved."""

    seed: int
    flavour: str
    commit: str
    kinds: list[str]
    faults: dict[str, int]
    lives: int
    hosts: int
    torch: bool
    walltimes: list[int]
    seconds: float
    skipped: str = ""
    violations: list[str]
    said: list[str] = msgspec.field(default_factory=list)
    """What was done, where something is violated; not in the results."""

    def page(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        del found["said"]
        return found


@cache
def commit() -> str:
    """The commit under test."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def play(seed: int, flavour: str = "") -> list[str]:
    """What the schedule of a seed violates."""
    return played(drawn(seed, flavour)).violations


def played(schedule: Schedule) -> Row:
    """Play a schedule; the row about it."""
    began = time.monotonic()
    row = unplayed(schedule)
    row.skipped = _cannot(schedule)
    if row.skipped:
        return row
    weights = undisturbed() if needed(schedule) else {}
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{schedule.seed}-{os.getpid()}-"))
    world = World(schedule, folder)
    try:
        Player(world).play()
        row.violations = violations(world, weights)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        row.violations = [
            *world.wrong,
            f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        ]
    finally:
        world.end()
    row.faults, row.lives = dict(+world.struck), len(world.lives)
    row.walltimes = _walltimes(world)
    row.seconds = round(time.monotonic() - began, 1)
    row.said = world.said if row.violations else []
    if row.violations and "CHAOS_UNDER_TEST" not in os.environ:  # else a bug was put in on purpose
        KEPT.mkdir(exist_ok=True)
        shutil.rmtree(KEPT / folder.name, ignore_errors=True)
        shutil.move(folder, KEPT / folder.name)
        (KEPT / folder.name / "told").write_text(
            "\n".join([str(schedule), *row.violations, *row.said]) + "\n"
        )
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def unplayed(schedule: Schedule, *wrong: str) -> Row:
    """A row before anything was played."""
    return Row(
        seed=schedule.seed,
        flavour=schedule.flavour,
        commit=commit(),
        kinds=sorted({job.kind for job in (*schedule.jobs, *schedule.later)}) or ["tune"],
        faults={},
        lives=0,
        hosts=max(1, len(schedule.hosts)),
        torch=schedule.torch,
        walltimes=[0, 0],
        seconds=0.0,
        violations=list(wrong),
    )


def _cannot(schedule: Schedule) -> str:
    """Why it cannot be played here; empty if it can."""
    if schedule.flavour in ("net", "pids") and not can_make_namespaces():
        return "namespaces cannot be made here"
    if schedule.flavour == "disks" and library() is None:
        return "there is no C compiler"
    return ""


def _walltimes(world: World) -> list[int]:
    """Allocations that came to their end with work left, and those of them in which all had left before."""
    ended = [life for life in world.lives if life.walltime or life.late]
    left = [
        life
        for life in ended
        if life.late or (life.process.returncode == 75 and _by_itself(world, life.over))
    ]
    return [len(left), sum(not life.late for life in left)]


def _by_itself(world: World, over: float | None) -> bool:
    return over is not None and not any(
        what == "SIGTERM" and over - 4.0 < at < over for at, what in world.disturbed
    )


def shrunk(schedule: Schedule, tries: int = 3, most: int = 60) -> Schedule:
    """The smallest schedule found that still violates something in one of so many tries."""
    played_so_far = 0
    while True:
        for smaller in schedule.smaller():
            if played_so_far >= most:
                return schedule
            played_so_far += 1
            if any(played(smaller).violations for _ in range(tries)):
                schedule = smaller
                break
        else:
            return schedule
