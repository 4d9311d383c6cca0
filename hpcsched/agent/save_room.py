"""Room for the next saves: where the checkpoints lie, against what the jobs that run will write there.

Free space is what `statvfs` tells, so a quota is seen where the file system shows it there. Looking may have
to wait for a file system: a thread of its own looks, seldom, and only at the newest checkpoints.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hpcsched.agent.checkpoint_files import find_checkpoints
from hpcsched.core.jobs import Job
from hpcsched.store.status import ShortDisk
from hpcsched.threads import started

PERIOD_S = 60.0
"""How often it is looked at (chosen): a full disk takes longer to fill, and a file server is to be spared."""

AGAIN_WITH = 1.1
"""There is room again with so much more than what is needed (chosen): else the line would come and go."""

MOST_ENTRIES = 10_000
"""Entries of a folder of checkpoints that are looked at (chosen)."""

DISK = "disk"
"""The kind of message that this is worth."""

_STEP = re.compile(r"step-\d+\.(?:pt|dcp)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job saves. `bytes`: of its newest checkpoint, where that is known already. `keep`: how many
    stay."""

    job_id: int
    folder: Path
    keep: int = 1
    bytes: int | None = None


@dataclass(slots=True)
class _Disk:
    """A file system: a folder in it, its free bytes, and what each job will write before it removes
    anything."""

    folder: Path
    free: int
    needed: dict[int, int] = field(default_factory=dict)


class SaveRoom:
    """Says when the next saves may not find room, and when they do again.

    Args:
        places: those of the jobs that run.
        publish: takes the file systems without room, for the snapshot.
        tell: takes a line, and the kind of message that it is worth.
        statvfs: as `os.statvfs`.
        start: calls a function in a thread of its own.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        *,
        publish: Callable[[Sequence[ShortDisk]], object],
        tell: Callable[[str, str], object],
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
        start: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places, self._publish, self._tell = places, publish, tell
        self._statvfs, self._start, self._clock = statvfs, start or _in_a_thread, clock
        self._due = clock() + PERIOD_S
        self._looking = False
        self._found: Mapping[int, _Disk] | None = None
        self._short: dict[int, ShortDisk] = {}

    def look(self, _: float = 0.0) -> None:
        """Say what is new; never waits. One look at a time: a file system that hangs gets no second one."""
        if (found := self._found) is not None:
            self._found, self._looking = None, False
            self._judge(found)
        if self._looking or self._clock() < self._due:
            return
        self._due, self._looking = self._clock() + PERIOD_S, True
        places = self._places()

        def measure() -> None:
            try:
                self._found = self._measured(places)
            except OSError:
                self._found = {}

        try:
            self._start(measure)
        except OSError:  # no room for one more thread
            self._looking = False

    def _measured(self, places: Sequence[Place]) -> Mapping[int, _Disk]:
        disks: dict[int, _Disk] = {}
        for place in places:
            try:
                there = next((path for path in (place.folder, *place.folder.parents) if path.exists()), None)
                if there is None:
                    continue
                device, about = there.stat().st_dev, self._statvfs(there)
                needed = place.bytes if place.bytes is not None else _next_save(place)
            except OSError:
                continue
            if needed:
                disk = disks.setdefault(device, _Disk(there, about.f_bavail * about.f_frsize))
                disk.needed[place.job_id] = needed
        return disks

    def _judge(self, disks: Mapping[int, _Disk]) -> None:
        short: dict[int, ShortDisk] = {}
        for device, disk in disks.items():
            needed, before = sum(disk.needed.values()), self._short.get(device)
            if disk.free < needed * (AGAIN_WITH if before else 1.0):
                short[device] = ShortDisk(
                    place=before.place if before else str(disk.folder),
                    free_bytes=disk.free,
                    needed_bytes=needed,
                    jobs=sorted(disk.needed),
                )
        for device, one in short.items():
            if device not in self._short:
                self._tell(one.words, DISK)
        for device, one in self._short.items():
            if device not in short:
                self._tell(f"{one.place} has room for the next saves again", "")
        self._short = short
        self._publish([*short.values()])


def places_of(
    jobs: Sequence[Job], folder: Callable[[int], Path], saved: Callable[[int], tuple[Path, int] | None]
) -> list[Place]:
    """Where these jobs save. `folder`: of a job's checkpoints; `saved`: the newest that a program has saved
    by itself, and its bytes."""
    places = []
    for job in jobs:
        if (own := saved(job.id)) is not None:
            places.append(Place(job.id, own[0].parent, bytes=own[1]))
        elif not job.saves_by_itself:
            places.append(Place(job.id, folder(job.id), job.spec.keep_checkpoints))
    return places


def _next_save(place: Place) -> int:
    """The bytes that the job will write before it removes anything: nothing goes until the new one is whole,
    and until it has as many as it keeps."""
    try:
        with os.scandir(place.folder) as entries:
            found = islice(entries, MOST_ENTRIES)
            steps = [(entry.name, entry) for entry in found if _STEP.fullmatch(entry.name)]
    except OSError:
        return 0
    if not steps:  # it has other names than ours
        return max((one.mark[1] for one in find_checkpoints(place.folder, ("*",))), default=0)
    _, newest = max(steps, key=lambda step: step[0])
    return _bytes(newest) * max(1, place.keep + 1 - len(steps))


def _bytes(entry: os.DirEntry[str]) -> int:
    """Of a file, or of the files in a folder."""
    try:
        about = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(about.st_mode):
            return about.st_size
        with os.scandir(entry.path) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in islice(files, MOST_ENTRIES))
    except OSError:
        return 0


def _in_a_thread(measure: Callable[[], None]) -> None:
    started(measure, "room for saves")
