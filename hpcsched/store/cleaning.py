"""What runs that are over have left on disk: whose it is, how much it is, and its removal.

Only what hpcsched knows as its own, by name, is removed; what else lies in a run directory stays. No symbolic
link is followed below the run directory, and what is another user's is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, HpcschedError, StoreError
from hpcsched.store import registry
from hpcsched.store.files import write_atomically
from hpcsched.store.run_folders import waits
from hpcsched.store.rundir import RunDir, RunDirError, RunLock, agent_works, snapshot_age_s
from hpcsched.store.status import Status, read_status

MARK = "cleaned.json"
"""In a run directory: what is being removed of it, or was."""


class Kind(StrEnum):
    """What something in a run directory is."""

    RECORD = "record"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


_RUN_ID = re.compile(r"[0-9a-f]{32}")

_RECORD = re.compile(r"run\.json|status\.json|journal\.jsonl|search\.toml")
"""What a run is known by."""

_OF_RUN = re.compile(
    r"agent\.lock|agent\.log|nodes\.log|report\.html|join-[\w.-]+|cleaned\.json"
    r"|(?:run\.json|status\.json|journal\.jsonl)\.\d+\.bak"
    r"|\.status\.json\.spare\.[12]|\.[\w.-]+\.\d+\.tmp|\.probe\.\d+"
)
_FOLDERS = {"inbox": Kind.RECORD, "packs": Kind.OTHER}
"""Folders of a run directory in which all is hpcsched's, besides that of its jobs."""

_CHECKPOINT = re.compile(
    rf"STATE(?:\.before\.\d+)?\.json|{files.CHECKPOINT}(?:\.before\.\d+)?|{files.ADAPTER}"
)
_OF_JOB = re.compile(
    r"hpcsched-\d+\.out|(?:ready|refused|held|left|stop|unusable)\.\d+(?:\.rank\d+)?"
    r"|layers\.json|plan\.json|batches\.jsonl|checkpoints\.json|never-a-guest|\.[\w.-]+\.tmp"
)


class What(StrEnum):
    """What is to be removed of a run."""

    ALL = "all"
    CHECKPOINTS = "checkpoints"
    OTHERS = "others"
    """All but checkpoints and the run's record: `history`, `explain` and `retry` still know it."""


class Mark(msgspec.Struct, kw_only=True):
    """cleaned.json: what is removed, since when (Unix time), and whether all of that is done."""

    schema: int = 1
    what: What
    at: float
    done: bool


_REMOVED = {
    What.ALL: frozenset(Kind),
    What.CHECKPOINTS: frozenset({Kind.CHECKPOINT}),
    What.OTHERS: frozenset({Kind.OTHER}),
}


@dataclass(frozen=True)
class Item:
    """Something that hpcsched has made: its path, from `base` by real folders only, and its bytes on disk."""

    base: Path
    parts: tuple[str, ...]
    kind: Kind
    bytes: int


@dataclass(kw_only=True)
class LeftRun:
    """A run that is over, and what it has left. `foreign`: what is not hpcsched's, and stays.

    `age_s`: since its end. `left`: jobs that are not over. `state` is the run's, or CLEANED.
    """

    rundir: RunDir
    run_id: str
    state: str
    age_s: float
    jobs: int
    left: int
    items: list[Item] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    mark: Mark | None = None

    def bytes(self, *kinds: Kind) -> int:
        """Bytes on disk of what is of these kinds (none: of all)."""
        return sum(item.bytes for item in self.items if not kinds or item.kind in kinds)

    def removed_by(self, what: What) -> list[Item]:
        """What would be removed. The record stays beside files of the user's, as a sign of whose it is."""
        kinds = _REMOVED[what]
        keeps = bool(self.foreign)
        return [
            item for item in self.items if item.kind in kinds and not (keeps and item.kind is Kind.RECORD)
        ]

    @property
    def half(self) -> bool:
        """Whether a removal was begun and has not come to its end."""
        return self.mark is not None and not self.mark.done


class NotCleaned(HpcschedError):
    """A run that is not to be touched, and why."""


def left_by(rundir: RunDir, *, checkpoints: Path | None = None, with_work_left: bool = False) -> LeftRun:
    """What a run has left. `checkpoints`: the directory for checkpoints that is in force now.

    Raises NotCleaned for a run that lives, has work left, is somebody else's, or is none.
    """
    root = rundir.root
    try:
        about = root.lstat()
    except OSError as error:
        raise NotCleaned(f"{root}: {error.strerror}") from None
    if not stat.S_ISDIR(about.st_mode):
        raise NotCleaned(f"{root}: no folder")
    if about.st_uid != os.geteuid():
        raise NotCleaned(f"{root}: belongs to user {about.st_uid}")
    mark, record = _mark(rundir), rundir.read_record()
    if record is None and mark is None:
        raise NotCleaned(f"{root}: no run")
    if agent_works(rundir):
        raise NotCleaned(f"{root}: its agent works")
    status: Status | None = None
    try:
        status = read_status(rundir)
    except HpcschedError as error:
        if mark is None:
            raise NotCleaned(str(error)) from None
    left = sum(not job.state.final for job in status.jobs) if status else 0
    if (left or waits(rundir)) and not with_work_left:
        what = f"{left} job{'s' * (left != 1)} left" if left else "jobs wait for an agent"
        raise NotCleaned(f"{root}: {what} (--with-work-left)")
    found = LeftRun(
        rundir=rundir,
        run_id=record.id if record else "",
        state="CLEANED" if mark or status is None else "STALE" if status.run.stale else status.run.state,
        age_s=snapshot_age_s(rundir) if status else time.time() - mark.at if mark else 0.0,
        jobs=len(status.jobs) if status else 0,
        left=left,
        mark=mark,
    )
    outputs = {job.output for job in status.jobs if job.output} if status else set()
    _look(found, outputs)
    places = {Path(record.checkpoints)} if record and record.checkpoints else set()
    for place in places | ({checkpoints} if checkpoints else set()):
        _look_elsewhere(found, place)
    return found


def remove(run: LeftRun, what: What) -> int:
    """Remove this of a run; returns the bytes. What is interrupted is gone on with by the next call.

    Raises StoreError; RunDirError where an agent has come meanwhile.
    """
    root = run.rundir.root
    lock = RunLock(run.rundir)
    try:
        if waits(run.rundir) and not run.left:
            raise RunDirError(f"{root}: jobs wait there meanwhile")
        mark = Mark(what=what, at=time.time(), done=False)
        write_atomically(root / MARK, msgspec.json.encode(mark), durable=True)
        items = run.removed_by(what)
        freed = 0
        # The record last: with it goes what says whose all this is.
        for item in sorted(items, key=lambda item: (item.kind is Kind.RECORD, item.parts == (MARK,))):
            if item.parts != (MARK,):
                freed += _remove(item)
        _tidy(root, run)
        if what is What.ALL and not run.foreign:
            _forget(run)
        else:
            mark.done = True
            write_atomically(root / MARK, msgspec.json.encode(mark))
    finally:
        lock.release()
    return freed


def cleaned(directory: Path, run_id: str) -> What | None:
    """What is gone of a run that was in this directory; None: nothing that is known of."""
    rundir = RunDir(directory)
    mark, record = _mark(rundir), rundir.read_record()
    if record is not None and record.id == run_id:
        return mark.what if mark else None
    return What.ALL if directory.parent.is_dir() else None  # else it may not be mounted here


def _mark(rundir: RunDir) -> Mark | None:
    try:
        return decode_file(rundir.root / MARK, Mark, most_bytes=SMALL_BYTES)
    except (OSError, BadInput):
        return None


def _look(run: LeftRun, outputs: set[str]) -> None:
    root = run.rundir.root
    for entry in _entries(root):
        name = entry.name
        if name == files.JOBS and entry.is_dir(follow_symlinks=False):
            for folder in _entries(root / name):
                if folder.name.isdecimal() and folder.is_dir(follow_symlinks=False):
                    _look_at_job(run, Path(folder.path), outputs)
                else:
                    run.foreign.append(Path(folder.path))
        elif name in _FOLDERS and entry.is_dir(follow_symlinks=False):
            run.items.append(Item(root, (name,), _FOLDERS[name], _size(entry)))
        elif _RECORD.fullmatch(name) and entry.is_file(follow_symlinks=False):
            run.items.append(Item(root, (name,), Kind.RECORD, _size(entry)))
        elif _OF_RUN.fullmatch(name) and not entry.is_symlink():
            run.items.append(Item(root, (name,), Kind.OTHER, _size(entry)))
        else:
            run.foreign.append(Path(entry.path))


def _look_at_job(run: LeftRun, folder: Path, outputs: set[str]) -> None:
    for entry in _entries(folder):
        parts = (files.JOBS, folder.name, entry.name)
        is_output = entry.path in outputs and entry.is_file(follow_symlinks=False)
        if entry.is_symlink():
            run.foreign.append(Path(entry.path))
        elif _CHECKPOINT.fullmatch(entry.name):
            run.items.append(Item(run.rundir.root, parts, Kind.CHECKPOINT, _size(entry)))
        elif is_output or (_OF_JOB.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
            run.items.append(Item(run.rundir.root, parts, Kind.OTHER, _size(entry)))
        else:
            run.foreign.append(Path(entry.path))


def _look_elsewhere(run: LeftRun, place: Path) -> None:
    """Add the checkpoints of a run that has a directory of its own for them."""
    if not _RUN_ID.fullmatch(run.run_id) or not place.is_absolute():
        return
    folder = place / run.run_id
    with contextlib.suppress(OSError):
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return
    for entry in _entries(folder):
        if re.fullmatch(r"\d+(?:\.before\.\d+)?", entry.name) and entry.is_dir(follow_symlinks=False):
            run.items.append(Item(place, (run.run_id, entry.name), Kind.CHECKPOINT, _size(entry)))
        else:
            run.foreign.append(Path(entry.path))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return


def _size(entry: os.DirEntry[str]) -> int:
    """Bytes on disk of a file or of a whole folder; links count for themselves."""
    try:
        total = entry.stat(follow_symlinks=False).st_blocks * 512
        if entry.is_dir(follow_symlinks=False):
            with os.scandir(entry.path) as below:
                total += sum(map(_size, below))
    except OSError:
        return 0
    return total


def _remove(item: Item) -> int:
    """Remove it, by real folders only; returns its bytes. Raises StoreError."""
    path = Path(item.base, *item.parts)
    try:
        with _opened(item.base, item.parts[:-1]) as folder:
            about = os.stat(item.parts[-1], dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                shutil.rmtree(item.parts[-1], dir_fd=folder)
            else:
                os.unlink(item.parts[-1], dir_fd=folder)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error.strerror}; `hpcsched clean` goes on") from error
    return item.bytes


@contextlib.contextmanager
def _opened(base: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """A descriptor of the folder below `base`; no step to it leads through a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(base, flags)
    try:
        for part in parts:
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _tidy(root: Path, run: LeftRun) -> None:
    """Remove the folders that are empty now, of jobs and of checkpoints elsewhere."""
    above = {Path(item.base, *item.parts[:-1]) for item in run.items if len(item.parts) > 1}
    for folder in sorted({*above, root / files.JOBS}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _forget(run: LeftRun) -> None:
    """Remove what is left of a run of which nothing is to be left."""
    root = run.rundir.root
    with contextlib.suppress(OSError):
        (root / MARK).unlink()
        (root / "agent.lock").unlink(missing_ok=True)
        root.rmdir()
    if _RUN_ID.fullmatch(run.run_id):
        with contextlib.suppress(OSError, RuntimeError):
            (registry.folder() / f"{run.run_id}.json").unlink(missing_ok=True)
