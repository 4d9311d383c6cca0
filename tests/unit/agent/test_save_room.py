"""A disk that is too small for the next saves is said before they fail, and once."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcsched.agent.save_room import PERIOD_S, Place, SaveRoom
from hpcsched.store.status import ShortDisk

KIB = 1024


class Room:
    """What is said of places in one file system, whose free bytes are `free`."""

    def __init__(self, *places: Place) -> None:
        self.places, self.free, self.now = list(places), 10**9, 0.0
        self.said: list[tuple[str, str]] = []
        self.short: list[ShortDisk] = []
        self.hung: list[Any] | None = None
        self.room = SaveRoom(
            lambda: self.places,
            publish=lambda disks: setattr(self, "short", list(disks)),
            tell=lambda text, about: self.said.append((text, about)),
            statvfs=lambda folder: self._statvfs(),
            start=self._start,
            clock=lambda: self.now,
        )

    def _statvfs(self) -> Any:
        return SimpleNamespace(f_bavail=self.free, f_frsize=1)

    def _start(self, measure: Any) -> None:
        if self.hung is None:
            measure()
        else:
            self.hung.append(measure)

    def later(self, free: int) -> list[tuple[str, str]]:
        """What is said once there are so many bytes free."""
        self.free, self.said = free, []
        self.now += PERIOD_S
        self.room.look()
        self.room.look()
        return self.said


def checkpoints(folder: Path, *sizes: int, name: str = "step-{:012d}.pt") -> Path:
    folder.mkdir(exist_ok=True)
    for step, size in enumerate(sizes):
        (folder / name.format(step)).write_bytes(b"x" * size)
    return folder


def test_it_is_said_before_a_save_fails_and_again_when_that_changes(tmp_path: Path) -> None:
    a, b = checkpoints(tmp_path / "a", KIB, 3 * KIB), checkpoints(tmp_path / "b", 2 * KIB, 2 * KIB)
    room = Room(Place(1, a, keep=2), Place(2, b, keep=2), Place(3, tmp_path / "none"))
    assert room.later(5 * KIB) == [] and room.short == []  # the newest of each, beside what is there
    ((text, about),) = room.later(5 * KIB - 1)
    assert about == "disk" and "of the 2 jobs that run take up to 5 KiB" in text
    assert "hpcsched clean" in text and "keep_checkpoints" in text
    assert [(disk.jobs, disk.needed_bytes) for disk in room.short] == [([1, 2], 5 * KIB)]
    assert room.later(5 * KIB + 1) == room.later(100) == []  # as before, and not again room enough
    assert room.short[0].free_bytes == 100
    ((text, about),) = room.later(6 * KIB)
    assert "room for the next saves again" in text and about == "" and room.short == []


def test_what_the_next_saves_take(tmp_path: Path) -> None:
    growing = Room(Place(1, checkpoints(tmp_path / "a", KIB), keep=3))  # two more before one goes, and one
    assert growing.later(3 * KIB) == [] and growing.later(3 * KIB - 1)
    sharded = tmp_path / "b"
    checkpoints(sharded)
    checkpoints(sharded / "step-000000000007.dcp", KIB, KIB)
    assert (room := Room(Place(1, sharded))).later(2 * KIB) == [] and room.later(2 * KIB - 1)
    others = checkpoints(tmp_path / "c", KIB, 4 * KIB, name="model-{}.ckpt")
    assert (room := Room(Place(1, others))).later(4 * KIB) == [] and room.later(4 * KIB - 1)
    known = Room(Place(1, tmp_path / "c", bytes=7 * KIB))  # of a program that saves by itself
    assert known.later(7 * KIB) == [] and known.later(7 * KIB - 1)


def test_a_file_system_that_hangs_is_asked_once(tmp_path: Path) -> None:
    room = Room(Place(1, checkpoints(tmp_path / "a", KIB)))
    room.hung = []
    assert room.later(1) == room.later(1) == [] and len(room.hung) == 1
    room.hung.pop()()
    room.hung = None
    assert len(room.later(1)) == 1


def test_places_of_real_file_systems(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    room = Room(Place(1, tmp_path / "not" / "there" / "yet", bytes=free.f_bavail * free.f_frsize * 2))
    room.room._statvfs = os.statvfs
    assert room.later(0) and room.short[0].place == str(tmp_path)
