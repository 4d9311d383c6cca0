"""What runs that are over have left on disk: what of it hpcsched has made, by name, and how much that is.

No symbolic link is followed below the run directory, and what is another user's or on another file system is
left alone.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, HpcschedError
from hpcsched.store import registry
from hpcsched.store.run_folders import waits
from hpcsched.store.rundir import (
    CLEANED,
    STALE_AFTER_S,
    RunDir,
    agent_works,
    snapshot_age_s,
)
from hpcsched.store.status import Status, read_status

SILENT_S = 3600.0
"""Time without a sign of life after which an agent of another host, which has not said that it ended, counts
as gone (chosen): a file system that hangs for minutes is no reason to remove what it writes to."""

ASIDE = ".inbox.cleaned"
"""What the inbox is called while it is removed: nobody puts work there any more."""


class Kind(StrEnum):
    """What something in a run directory is."""

    RECORD = "record"
    CHECKPOINT = "checkpoint"
    RESULT = "result"
    OTHER = "other"


_RUN_ID = re.compile(r"[0-9a-f]{32}")

_RECORD = re.compile(
    r"run\.json|status\.json|ended\.\d+\.jsonl|journal\.jsonl|job-use\.jsonl|device-use\.jsonl|search\.toml"
)
"""What a run is known by."""

_OF_RUN = re.compile(
    r"agent\.lock|agent\.log|agent\.options|agent-\d+|nodes\.log|report\.html|join(?:ed)?-[\w.-]+|cleaned\.json"
    r"|pool\.(?:json|lock|log|order\.json)"
    r"|(?:run\.json|status\.json|ended\.\d+\.jsonl|journal\.jsonl)\.\d+\.bak"
    r"|\.status\.json\.spare\.[12]|\.[\w.-]+\.\d+\.tmp|\.probe\.\d+"
)
_FOLDERS = {
    "inbox": Kind.RECORD,
    "journal": Kind.RECORD,
    ASIDE: Kind.RECORD,
    files.CALLS: Kind.RECORD,
    files.TRIALS: Kind.RESULT,
    "packs": Kind.OTHER,
    "pool": Kind.OTHER,
}
"""Folders of a run directory in which all is hpcsched's, besides that of its jobs. Functions that were
submitted say what jobs are, as the journal does; of trials the best one's folder is left."""

_STATE = re.compile(r"STATE(?:\.before\.\d+)?\.json")
_BEFORE = re.compile(rf"{files.CHECKPOINT}\.before\.\d+")
_RESULT = re.compile(rf"{re.escape(files.OUTCOME)}|{re.escape(files.METRICS)}|metric\.\d+\.json")
_RESULT_FOLDERS = frozenset({files.ADAPTER})
_BEST = re.compile(r"best[\w.-]*\.pt")
"""Results among checkpoints: `files.BEST`, and others of the kind."""

_OF_JOB = re.compile(
    r"hpcsched-\d+\.out|(?:ready|refused|held|left|stop|unusable)\.\d+(?:\.rank\d+)?"
    r"|layers\.json|logged\.json|plan\.json|batches\.jsonl|checkpoints\.json|never-a-guest|\.[\w.-]+\.tmp"
)


class What(StrEnum):
    """What is to be removed of a run."""

    ALL = "all"
    CHECKPOINTS = "checkpoints"
    OTHERS = "others"
    """All but checkpoints, results and the run's record: `history`, `explain` and `retry` still know it."""


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

    @property
    def order(self) -> int:
        """What goes first: no STATE.json may tell of a checkpoint that is half gone. The run's record goes
        last, as it says whose all this is."""
        if self.kind is Kind.RECORD:
            return 3 if self.parts == ("run.json",) else 2
        return 0 if _STATE.fullmatch(self.parts[-1]) else 1


@dataclass(kw_only=True)
class LeftRun:
    """A run that is over, and what it has left. `foreign`: what is not hpcsched's, and stays.

    `age_s`: since its end. `left`: jobs that are not over. `state` is the run's, STALE or CLEANED. `sign`
    changes when an agent has been there.
    """

    rundir: RunDir
    run_id: str
    state: str
    age_s: float
    jobs: int
    left: int
    waited: bool
    """Whether jobs waited for an agent."""
    host: str
    sign: tuple[float, ...]
    items: list[Item] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    folders: list[tuple[Path, tuple[str, ...]]] = field(default_factory=list)
    """Folders that go when they are empty, by what is above them and their path from there."""
    mark: Mark | None = None

    def bytes(self, *kinds: Kind) -> int:
        """Bytes on disk of what is of these kinds (none: of all)."""
        return sum(item.bytes for item in self.items if not kinds or item.kind in kinds)

    def removed_by(self, what: What) -> list[Item]:
        """What would be removed, in this order. The record stays beside files of the user's, as a sign of
        whose it is."""
        kinds = _REMOVED[what] - ({Kind.RECORD} if self.foreign else set())
        return sorted((item for item in self.items if item.kind in kinds), key=lambda item: item.order)

    @property
    def half(self) -> bool:
        """Whether a removal was begun and has not come to its end."""
        return self.mark is not None and not self.mark.done


class NotCleaned(HpcschedError):
    """A run that is not to be touched, and why."""


def left_by(rundir: RunDir, *, checkpoints: Path | None = None, with_work_left: bool = False) -> LeftRun:
    """What a run has left. `checkpoints`: the directory for checkpoints that is in force now.

    Raises NotCleaned for a run that lives, has work left, is somebody else's, or is none; NewerRun for one of
    a newer version, whose files are not known here.
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
    rundir.refuse_newer()
    mark, record = read_mark(rundir), rundir.read_record()
    if record is None and mark is None:
        raise NotCleaned(f"{root}: no run")
    if agent_works(rundir):
        raise NotCleaned(f"{root}: its agent works")
    status: Status | None = None
    try:
        status = read_status(rundir)
    except HpcschedError as error:
        if mark is None or mark.done or mark.what is not What.ALL:
            raise NotCleaned(str(error)) from None
    age_s = snapshot_age_s(rundir) if status else time.time() - mark.at if mark else 0.0
    stale = status is not None and status.run.stale
    host = record.host if record else ""
    here = host == os.uname().nodename  # and then still in another container, maybe
    if stale and age_s < (STALE_AFTER_S if here else SILENT_S):
        wait = "a minute" if here else "an hour"
        raise NotCleaned(f"{root}: its agent on {host} has not said that it ended: wait {wait}")
    left = sum(not job.state.final for job in status.jobs) if status else 0
    waiting = waits(rundir)
    if not with_work_left and (left or stale or waiting):
        what = f"{left} job{'s' * (left != 1)} left" if left else "jobs wait for an agent"
        what = "its agent ended without a word" if stale and not left else what
        raise NotCleaned(f"{root}: {what} (--with-work-left)")
    found = LeftRun(
        rundir=rundir,
        run_id=record.id if record and _RUN_ID.fullmatch(record.id) else "",
        state="STALE" if stale else "CLEANED" if mark or status is None else status.run.state,
        age_s=age_s,
        jobs=len(status.jobs) if status else 0,
        left=left,
        waited=waiting,
        host=host,
        sign=sign_of(rundir),
        mark=mark,
    )
    _look(found, {job.output for job in status.jobs if job.output} if status else set())
    places = {Path(record.checkpoints)} if record and record.checkpoints else set()
    if not is_a_copy(found):
        for place in sorted(places | ({checkpoints} if checkpoints else set())):
            _look_elsewhere(found, place)
    return found


def read_mark(rundir: RunDir) -> Mark | None:
    """What is being removed of a run, or was; None: nothing."""
    try:
        return decode_file(rundir.root / CLEANED, Mark, most_bytes=SMALL_BYTES)
    except (OSError, BadInput):
        return None


def sign_of(rundir: RunDir) -> tuple[float, ...]:
    """What differs after an agent was there: its start, the newest snapshot, the journal's length."""
    record = rundir.read_record()
    seen = [record.began if record else 0.0]
    for path in (rundir.status, rundir.journal):
        try:
            about = path.stat()
            seen += [about.st_mtime_ns, about.st_size]
        except OSError:
            seen += [0, 0]
    return tuple(seen)


def is_a_copy(run: LeftRun) -> bool:
    """Whether the run with this id is registered in another directory, and there: a copy has no claim to the
    checkpoints that lie elsewhere."""
    entry = registry.find(run.run_id) if run.run_id else None
    if entry is None or Path(entry.dir).resolve() == run.rundir.root.resolve():
        return False
    record = RunDir(Path(entry.dir)).read_record()
    return record is not None and record.id == run.run_id


def _look(run: LeftRun, outputs: set[str]) -> None:
    root = run.rundir.root
    for entry in _entries(root):
        name = entry.name
        folder, file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
        if name == files.JOBS and folder:
            run.folders.append((root, (name,)))
            for below in _entries(root / name):
                if below.name.isdecimal() and below.is_dir(follow_symlinks=False):
                    _look_at_job(run, below, outputs)
                else:
                    run.foreign.append(Path(below.path))
        elif name in _FOLDERS and folder:
            _found(run, root, (name,), entry, _FOLDERS[name])
        elif _RECORD.fullmatch(name) and file:
            _found(run, root, (name,), entry, Kind.RECORD)
        elif _OF_RUN.fullmatch(name) and file:
            _found(run, root, (name,), entry, Kind.OTHER)
        else:
            run.foreign.append(Path(entry.path))


def _look_at_job(run: LeftRun, job: os.DirEntry[str], outputs: set[str]) -> None:
    root, above = run.rundir.root, (files.JOBS, job.name)
    run.folders.append((root, above))
    for entry in _entries(Path(job.path)):
        parts = (*above, entry.name)
        folder, file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
        if folder and entry.name == files.CHECKPOINT:
            _look_at_checkpoints(run, root, parts, entry)
        elif (folder and _BEFORE.fullmatch(entry.name)) or (file and _STATE.fullmatch(entry.name)):
            _found(run, root, parts, entry, Kind.CHECKPOINT)
        elif (folder and entry.name in _RESULT_FOLDERS) or (file and _RESULT.fullmatch(entry.name)):
            _found(run, root, parts, entry, Kind.RESULT)
        elif file and (entry.path in outputs or _OF_JOB.fullmatch(entry.name)):
            _found(run, root, parts, entry, Kind.OTHER)
        else:
            run.foreign.append(Path(entry.path))


def _look_at_checkpoints(run: LeftRun, base: Path, parts: tuple[str, ...], folder: os.DirEntry[str]) -> None:
    """Add what is in the folder of a job's checkpoints: all of it is the job's."""
    run.folders.append((base, parts))
    for entry in _entries(Path(folder.path)):
        kind = Kind.RESULT if _BEST.fullmatch(entry.name) else Kind.CHECKPOINT
        _found(run, base, (*parts, entry.name), entry, kind)


def _look_elsewhere(run: LeftRun, place: Path) -> None:
    """Add the checkpoints of a run that has a directory of its own for them."""
    if not run.run_id or not place.is_absolute():
        return
    folder = place / run.run_id
    try:
        about = folder.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    run.folders.append((place, (run.run_id,)))
    for entry in _entries(folder):
        parts, is_folder = (run.run_id, entry.name), entry.is_dir(follow_symlinks=False)
        if is_folder and entry.name.isdecimal():
            _look_at_checkpoints(run, place, parts, entry)
        elif is_folder and re.fullmatch(r"\d+\.before\.\d+", entry.name):
            _found(run, place, parts, entry, Kind.CHECKPOINT)
        else:
            run.foreign.append(Path(entry.path))


def _found(run: LeftRun, base: Path, parts: tuple[str, ...], entry: os.DirEntry[str], kind: Kind) -> None:
    """Add something that hpcsched has made, unless it is another file system, or holds one."""
    size, whole = _size(entry, base.stat().st_dev)
    if whole:
        run.items.append(Item(base, parts, kind, size))
    else:
        run.foreign.append(Path(entry.path))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _size(entry: os.DirEntry[str], device: int) -> tuple[int, bool]:
    """Bytes on disk of a file or of a whole folder, links for themselves; and whether all of it is on this
    device."""
    total, left = 0, [entry]
    while left:
        one = left.pop()
        try:
            about = one.stat(follow_symlinks=False)
            if about.st_dev != device:
                return total, False
            total += about.st_blocks * 512
            if stat.S_ISDIR(about.st_mode):
                with os.scandir(one.path) as below:
                    left += below
        except OSError:
            continue
    return total, True
