"""The run directory on the shared filesystem: its paths, its record run.json and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

import hpcsched
from hpcsched import watchers
from hpcsched.accounts import name_of
from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.core.environments import PythonEnvironment
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, NoSuchRun, StoreError
from hpcsched.patience import but_for_lasting, kind_of, passes, patiently
from hpcsched.store.archive import folder_of
from hpcsched.store.files import write_atomically

STALE_AFTER_S = 15.0
"""Age of a snapshot (three periods) from which its agent counts as gone (chosen)."""

SNAPSHOT_PERIOD_S = STALE_AFTER_S / 3
"""The longest time between two snapshots of an agent that lives."""

MAX_SNAPSHOT_BYTES = 2**30
"""The longest snapshot that is read (chosen): it takes some 350 bytes a job."""


_WATCHED = ("run.json", "status.json", "journal.jsonl", "device-use.jsonl", "job-use.jsonl")

ENDED = "ended.*.jsonl"
"""Files with rows of jobs that are over: see `store.rows`."""

CLEANED = "cleaned.json"
"""In a run directory: what `clean` removes of it, or has removed. An agent that begins takes it away."""


class RunDirError(StoreError):
    """The run directory cannot be used: choose another, or look who uses it. A usage error."""

    exit_code = 2


class NewerRun(StoreError):
    """A newer hpcsched has written here. A usage error."""

    exit_code = 2


class RunRecord(msgspec.Struct, kw_only=True):
    """run.json: the run's id, and the process of its newest agent."""

    schema: int = 1
    id: str
    version: str
    host: str
    pid: int
    started: int
    """Start time of the agent's process, clock ticks since its host's boot."""
    began: float
    """Unix time of this agent's start."""
    devices: str
    policy: str
    allocation: dict[str, str | None] = {}
    environment: PythonEnvironment | None = None
    """That of jobs that name none."""
    checkpoints: str = ""
    """The directory for checkpoints; "": the run directory."""
    python: str = ""
    """The version of the agent's Python; "": not known, as of earlier versions."""
    joinable: bool = False
    """Whether hosts of other allocations may be in the run: what runs there goes on without this agent."""
    epoch: int = 0
    """The number of this agent (see `store.heads`)."""
    left: bool = False
    """Whether this agent has left the run to the next one, as its allocation was over."""


class _Version(msgspec.Struct):
    """What every version can read of run.json."""

    version: str


class _Writer(msgspec.Struct):
    host: str


class LastStatus(msgspec.Struct):
    """The part of status.json that is used here: the run's state, its number, and the agent that wrote it."""

    state: str
    seq: int
    agent: _Writer | None = None


class _Page(msgspec.Struct):
    run: LastStatus


@dataclass(frozen=True)
class RunDir:
    """Paths in a run directory."""

    root: Path

    @property
    def record(self) -> Path:
        """The RunRecord of the newest agent."""
        return self.root / "run.json"

    @property
    def journal(self) -> Path:
        """The journal of events."""
        return self.root / "journal.jsonl"

    @property
    def status(self) -> Path:
        """The snapshot for `status`."""
        return self.root / "status.json"

    @property
    def device_use(self) -> Path:
        """How much the devices were used over time."""
        return self.root / "device-use.jsonl"

    @property
    def job_use(self) -> Path:
        """What jobs have used, as it was measured."""
        return self.root / "job-use.jsonl"

    @property
    def inbox(self) -> Path:
        """The folder of commands to the agent."""
        return self.root / "inbox"

    @property
    def begun(self) -> bool:
        """Whether a run has begun here: the journal is not empty. Raises StoreError where its file system
        does not say: nothing may begin beside a run."""
        try:
            with but_for_lasting():
                return patiently(self.journal.stat).st_size > 0
        except OSError as error:
            raise StoreError(f"cannot read {self.journal}: {error.strerror}") from error
        return False

    def job(self, job_id: int) -> Path:
        """The folder of a job."""
        return self.root / f"{files.JOBS}/{job_id}"

    @property
    def owner(self) -> int | None:
        """The user whose run it is, by id; None: it is not there."""
        try:
            return self.root.stat().st_uid
        except OSError:
            return None

    def refuse_others(self) -> None:
        """Raise RunDirError where the run is somebody else's: it may be watched, and not changed."""
        if self.owner not in (None, os.geteuid()):
            raise RunDirError(
                f"{self.root} belongs to {name_of(self.owner)}, not to you: look at it"
                " (status, top, explain, report, metrics, logs), or choose another --dir"
            )

    def make(self, *, share: int | None = None) -> None:
        """Create the directory and its folders, for this user only.

        `share`: a group, by id, that may read them, but for the inbox; None: as it is. Raises RunDirError if
        it cannot be written or belongs to somebody else, StoreError where a run may have begun and it cannot.
        """
        self.refuse_others()
        try:
            patiently(partial(self._make, share))
        except OSError as error:
            what = f"cannot write the run directory {self.root}: {error.strerror}"
            if passes(error) or self.begun:  # in the first case nothing says whether it has
                raise StoreError(f"{what}; go on once that is mended") from error
            raise RunDirError(f"{what}; choose another --dir") from error

    def _make(self, share: int | None) -> None:
        inside = (self.inbox, *(self.inbox / n for n in ("tmp", "new", "ack")), self.root / files.JOBS)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, *inside):
            folder.mkdir(mode=0o700, exist_ok=True)
        if share is not None:
            watched = (*(self.root / name for name in _WATCHED), *self.root.glob(ENDED))
            watchers.share(self.root, share, *watched)
            if (archive := folder_of(self.journal)).is_dir():
                watchers.share(archive, share, *archive.iterdir())
            watchers.share(self.root / files.JOBS, share)
            for folder in (self.root / files.JOBS).iterdir():
                watchers.share(folder, share, *folder.glob("*.out*"), *folder.glob("*.json*"))
        elif not watchers.is_shared(mode := self.root.stat().st_mode) and stat.S_IMODE(mode) != 0o700:
            self.root.chmod(0o700)
        probe = self.root / f".probe.{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()

    def sweep(self) -> None:
        """Remove the half-written files of agents that were killed, and the mark of a removal, which this
        ends. The caller holds the lock."""
        with contextlib.suppress(OSError):
            for left in (*self.root.glob(".*.tmp"), *self.root.glob(".probe.*"), self.root / CLEANED):
                with contextlib.suppress(OSError):
                    left.unlink()

    def read_record(self) -> RunRecord | None:
        """The content of run.json; None if there is none, or it cannot be decoded."""
        try:
            return patiently(lambda: decode_file(self.record, RunRecord, most_bytes=SMALL_BYTES))
        except (OSError, BadInput):
            return None

    def refuse_newer(self) -> None:
        """Raise NewerRun where the hpcsched that wrote here last is newer, by its minor version."""
        try:
            version = patiently(lambda: decode_file(self.record, _Version, most_bytes=SMALL_BYTES)).version
        except (OSError, BadInput):
            return
        if _minor(version) > _minor(hpcsched.__version__):
            raise NewerRun(
                f"{self.root} holds a run of hpcsched {version[:40]}, this is {hpcsched.__version__}:"
                " use that version, or name another run with --dir"
            )

    def write_record(self, record: RunRecord) -> None:
        """Write run.json. Raises StoreError."""
        write_atomically(self.record, msgspec.json.encode(record), durable=True)

    def require(self) -> None:
        """Raise NoSuchRun unless a run (or its inbox) is here, NewerRun if a newer hpcsched wrote it."""
        if kind_of(self.journal) is None and kind_of(self.inbox) is None:
            raise NoSuchRun(f"no run in {self.root}; start one with `hpcsched run`, or name it with --dir")
        self.refuse_newer()


def _minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) for what is none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


class RunLock:
    """The lock that keeps a second agent out of a run directory as long as this process lives.

    `signs_of_life` False: the caller has found that an agent on another host shows none. Raises RunDirError
    where there is another agent, StoreError where the lock cannot be written.
    """

    def __init__(self, rundir: RunDir, *, signs_of_life: bool = True) -> None:
        path = rundir.root / "agent.lock"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = patiently(lambda: os.open(path, flags, 0o600))
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        try:
            patiently(lambda: fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except OSError as error:
            self.release()
            if isinstance(error, (BlockingIOError, PermissionError)):
                raise RunDirError(occupied(rundir)) from error
            raise StoreError(f"cannot lock {path}: {error.strerror}") from error
        if not self._is_at(path):  # `clean` has removed it between the two
            self.release()
            raise RunDirError(f"{rundir.root} is being removed by `hpcsched clean`")
        # Locks do not always reach across hosts of a shared filesystem: look for signs of life too.
        if signs_of_life and _works_elsewhere(rundir):
            self.release()
            raise RunDirError(occupied(rundir))

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), patiently(path.stat))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _works_elsewhere(rundir: RunDir) -> bool:
    """Whether an agent on another host shows signs of life; where run.json is lost, by its snapshot."""
    if record := rundir.read_record():
        return record.host != os.uname().nodename and agent_works(rundir)
    word = last_status(rundir)
    if word is None or word.agent is None or word.agent.host == os.uname().nodename:
        return False
    return word.state in ("RUNNING", "DRAINING") and snapshot_age_s(rundir) < STALE_AFTER_S


def snapshot_age_s(rundir: RunDir) -> float:
    """Seconds since the snapshot was last written; infinity if there is none."""
    try:
        return max(0.0, time.time() - patiently(rundir.status.stat).st_mtime)
    except OSError:
        return float("inf")


def occupied(rundir: RunDir) -> str:
    """Who has a run directory, and what can be done instead."""
    record = rundir.read_record()
    who = f" (host {record.host}, pid {record.pid})" if record else ""
    what = "give it more jobs with `hpcsched submit`, end it with `hpcsched drain`, or choose another --dir"
    return f"another agent{who} runs in {rundir.root}: {what}"


def agent_alive(rundir: RunDir, record: RunRecord | None) -> bool:
    """Whether the run's agent lives: by its process on this host, else by the age of its snapshot."""
    if record is None or record.left:
        return False
    # Others' processes may be hidden from us.
    if record.host == os.uname().nodename and rundir.owner in (None, os.geteuid()):
        return process_started(record.pid) == record.started
    return snapshot_age_s(rundir) < STALE_AFTER_S


def agent_works(rundir: RunDir) -> bool:
    """Whether the run's agent lives and has not reported its end."""
    word = last_status(rundir)
    ended = word is not None and word.state in ("STOPPED", "FINISHED")
    return not ended and agent_alive(rundir, rundir.read_record())


def last_status(rundir: RunDir) -> LastStatus | None:
    """The state in the newest snapshot; None if there is none to read."""
    try:
        page = partial(decode_file, rundir.status, _Page, most_bytes=MAX_SNAPSHOT_BYTES, most_depth=None)
        return patiently(page).run
    except (OSError, BadInput):
        return None


def process_started(pid: int) -> int | None:
    """Start time of a process on this host (clock ticks since boot), None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
