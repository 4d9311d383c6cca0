"""Reading status.json: with nothing but msgspec, no lock and no port, on any host."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcsched.contract.progress import Batching
from hpcsched.core.nouns import noun
from hpcsched.core.states import JobState
from hpcsched.decoding import decode, decode_file
from hpcsched.errors import BadInput, HpcschedError, NoSuchRun, StoreError
from hpcsched.patience import patiently
from hpcsched.printing import said_bytes
from hpcsched.store.rows import Ended, Row, rows_of
from hpcsched.store.rundir import MAX_SNAPSHOT_BYTES, SNAPSHOT_PERIOD_S, STALE_AFTER_S, RunDir, agent_alive

ANOTHER_FILE_S = 2.0
"""Time in which status.json names the file that has taken the place of the one it has named (chosen)."""

FOLLOWED_WITHIN_S = 90.0
"""Age of the last sign of an agent after which none follows it by itself any more (chosen)."""


class AgentStatus(msgspec.Struct, kw_only=True):
    """The agent that wrote the snapshot: its host and pid."""

    host: str
    pid: int


class LeftOver(msgspec.Struct, kw_only=True, frozen=True):
    """Free GPUs of a host that no job can use any more, since `since_s` of the run's clock."""

    host: str
    gpus: list[int]
    since_s: float


class JoinedHost(msgspec.Struct, kw_only=True, frozen=True):
    """A host of another allocation that joined the run (`hpcsched join`) at `since_s` of the run's clock.

    `end`: when its allocation ends (ISO time; None: not known). `closing`: that is so near that its jobs
    leave it. `left_s`: when it left the run, by the run's clock.
    """

    host: str
    gpus: list[int]
    since_s: float
    end: str | None = None
    closing: bool = False
    left_s: float | None = None


class Idle(msgspec.Struct, kw_only=True, frozen=True):
    """An agent that stays with nothing to do: since when, and until when if nothing comes (ISO times).

    `until` None: until it is drained, or its allocation ends.
    """

    since: str
    until: str | None


class ShortDisk(msgspec.Struct, kw_only=True, frozen=True):
    """A file system with less room than the next saves of the `jobs` (ids) that run may need there; `place`
    is a folder in it."""

    place: str
    free_bytes: int
    needed_bytes: int
    jobs: list[int]

    @property
    def words(self) -> str:
        """What is short, and what can be done."""
        jobs = "job" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs"
        jobs += " that runs" if len(self.jobs) == 1 else " that run"
        return (
            f"{self.place} has {said_bytes(self.free_bytes)} free, and the next saves of the {jobs} "
            f"take up to {said_bytes(self.needed_bytes)} there: make room (`hpcsched clean`), keep fewer "
            "checkpoints (keep_checkpoints), or have the next run save elsewhere (--checkpoints)"
        )


class RunStatus(msgspec.Struct, kw_only=True):
    """The run. `state` is RUNNING, DRAINING, STOPPED (work left) or FINISHED; PENDING, without an `agent`,
    where none has begun and jobs wait for one.

    `allocation` has kind, id and deadline (ISO time, or None), and also `life`, the job's state in the batch
    system, where that had to be asked for.
    """

    dir: str
    state: str
    stale: bool
    seq: int
    written_at: str
    policy: str
    agent: AgentStatus | None
    allocation: dict[str, str | None]
    clock_s: float = 0.0
    """The run's clock when this was written; job times refer to it."""
    speed: float = 1.0
    lost_gpus: dict[str, str] = {}
    left_over: list[LeftOver] = []
    given_back: dict[str, float] = {}
    """By host that the batch system has back: since when, by the run's clock."""
    joined: list[JoinedHost] = []
    idle: Idle | None = None
    short_disks: list[ShortDisk] = []

    @property
    def alive(self) -> bool:
        """Whether its agent lives."""
        return self.state in ("RUNNING", "DRAINING") and not self.stale


class GpuStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A lane of a GPU, `foreground` or `background`: a GPU with a background job is listed twice.

    `loan`: it is a CPU slot whose cores are lent to jobs that need no GPU; no other job can have it
    meanwhile. `sample_age_s`: how old its newest sample is, where that is too old to be shown (the driver
    does not answer); `health` is "ok", or "unknown" once it is much too old. `kind`: "gpu", or "cpu" for a
    CPU slot.
    """

    index: int
    host: str
    job: int | None
    lane: str
    utilisation: float | None
    memory_mib: float | None
    loan: bool = False
    sample_age_s: float | None = None
    health: str = "ok"
    kind: str = "gpu"


class MeasuredGpu(msgspec.Struct, kw_only=True, frozen=True):
    """What samples say of a GPU: the fields of its `GpuStatus`."""

    utilisation: float | None = None
    memory_mib: float | None = None
    sample_age_s: float | None = None
    health: str = "ok"


class CoresStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The cores of a job on CPU cores, of its `budget`: the share of each server and each worker, in cores.

    `rate` (steps per second), `cpu` (cores used) and `net` (the fraction of time for which its link was full,
    0 to 1; 0 for workers) are the newest measurements of its present configuration, servers first, then
    workers; None before the first. `host` is None while it has no cores.
    """

    budget: float
    host: str | None
    servers: list[float]
    workers: list[float]
    rate: float | None
    cpu: list[float] | None
    net: list[float] | None

    @property
    def held(self) -> float:
        """The number of cores that it has."""
        return sum(self.servers) + sum(self.workers)


NO_REASON = "None"
"""The reason of a job that has ended and gives none, as Slurm has it."""


class JobStatus(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """A job.

    `reason`: of one that has ended and gives none "None". `hosts`: of one that has ended, where it ran last.
    `time_limit_s`: how long it may run over all its attempts, `nodes` the number of hosts that it asks for.
    `elapsed_s` counts the time on GPUs or CPU cores, not the time suspended; `eta_s` is the time left, in
    seconds. `resizes` are those in place. `cores` is for jobs on CPU cores only. `array`: the name of its
    array, `array_index` its number there. `kept`: the keys in which the job file last seen differs from the
    run, `updated`: those that were taken from it since the job ended. `saves`: how a job that saves by itself
    is suspended, and what that would cost it now, in words.
    """

    id: int
    name: str
    state: JobState
    reason: str | None
    role: str | None
    gpus: list[int]
    hosts: list[str]
    step: int | None
    steps: int | None
    elapsed_s: float
    eta_s: float | None
    attempt: int
    suspensions: int
    resizes: int = msgspec.field(default_factory=int)  # always written, and not there in older pages
    exit: int | None
    model: str = ""
    user: str = ""
    submit_s: float = 0.0
    start_s: float | None = None
    end_s: float | None = None
    rate: float | None = None
    ready: bool = False
    detail: str | None = None
    output: str = ""
    metrics: dict[str, float | None] = {}
    batching: Batching | None = None
    cores: CoresStatus | None = None
    array: str = ""
    array_index: int | None = None
    kept: list[str] = []
    updated: list[str] = []
    saves: str = ""
    priority: int = 0
    nodes: int = 1
    time_limit_s: float | None = None

    @property
    def why(self) -> str:
        """Its reason in words; empty without one."""
        return self.detail or ("" if self.reason in (None, NO_REASON) else str(self.reason))


class Status(msgspec.Struct, kw_only=True):
    """The content of status.json. `ended`: where the rest of its jobs is; unset where `jobs` are all."""

    schema: int = 1
    run: RunStatus
    gpus: list[GpuStatus]
    jobs: list[JobStatus]
    ended: Ended | msgspec.UnsetType = msgspec.UNSET

    @property
    def counts(self) -> Counter[JobState]:
        """How many jobs are in each state, those that `ended` tells of too."""
        return Counter(job.state for job in self.jobs) + Counter(self.ended.counts if self.ended else {})

    @property
    def noun(self) -> str:
        """What people call its devices."""
        return noun(gpu.kind for gpu in self.gpus)


class StatusPage(msgspec.Struct, kw_only=True):
    """A status with its jobs as JSON, to write or pass on without decoding each of them."""

    schema: int = 1
    run: RunStatus
    gpus: list[GpuStatus]
    jobs: list[msgspec.Raw]
    ended: Ended | msgspec.UnsetType = msgspec.UNSET


class _State(msgspec.Struct):
    state: JobState


class _RunAlone(msgspec.Struct):
    """The part of a status with the run."""

    run: RunStatus


class Brief(msgspec.Struct):
    """The part of a status with the run and the states of its jobs."""

    run: RunStatus
    jobs: list[_State]
    ended: Ended | msgspec.UnsetType = msgspec.UNSET

    @property
    def left(self) -> int:
        return sum(not job.state.final for job in self.jobs)

    @property
    def done(self) -> int:
        return len(self.jobs) - self.left + (self.ended.jobs if self.ended else 0)


S = TypeVar("S", Status, StatusPage, Brief, _RunAlone)
W = TypeVar("W", Status, StatusPage)
R = TypeVar("R", Row, JobStatus)


def read_status(rundir: RunDir, only: Sequence[str] | None = None) -> Status:
    """The newest snapshot; `stale` is set if its agent should live but does not.

    `only`: besides these jobs (ids, names) some that are over may be left out; where none is given all those
    whose rows would have to be read. Raises NoSuchRun if there is none, NewerRun for one of a newer hpcsched,
    StoreError if it cannot be decoded.
    """
    return _whole(rundir, Status, JobStatus, lambda job: job, lambda job, _: job, only)


def read_page(rundir: RunDir) -> StatusPage:
    """As `read_status`, with the jobs as JSON."""

    def head(job: msgspec.Raw) -> Row:
        return decode(bytes(job), Row, most_depth=None)

    return _whole(rundir, StatusPage, Row, head, lambda _, row: msgspec.Raw(row))


def read_file(rundir: RunDir) -> StatusPage:
    """What the file says alone; raises as `read_status`."""
    return _read(rundir, StatusPage)


def read_brief(rundir: RunDir) -> Brief:
    """What it says of the run, and of the number of its jobs; raises as `read_status`."""
    return _read(rundir, Brief)


def read_run(rundir: RunDir) -> RunStatus:
    """What the newest snapshot says of the run itself; raises as `read_status`."""
    return _read(rundir, _RunAlone).run


def _whole(
    rundir: RunDir,
    kind: type[W],
    row: type[R],
    head: Callable[[Any], Row | JobStatus],
    as_job: Callable[[R, bytes], Any],
    only: Sequence[str] | None = None,
) -> W:
    """A status with the jobs that are over from their rows; `head` tells a job's id and name."""
    until = time.monotonic() + ANOTHER_FILE_S
    while True:
        status = _read(rundir, kind)
        if not status.ended or (only is not None and not only):
            return status
        heads = [head(job) for job in status.jobs]
        jobs: dict[int, Any] = dict(zip((one.id for one in heads), status.jobs, strict=True))
        try:
            names = {one.id: one.name for one in heads}
            rows = patiently(partial(rows_of, rundir.root, status.ended, names, only, row))
        except (OSError, BadInput) as error:
            if isinstance(error, FileNotFoundError) and time.monotonic() < until:
                time.sleep(0.02)
                continue
            why = error.strerror if isinstance(error, OSError) else error
            again = "the next agent writes it anew (`hpcsched run --resume`)"
            raise StoreError(f"{rundir.root / status.ended.file} is damaged ({why}): {again}") from error
        jobs |= {job.id: as_job(job, line) for job, line in rows}
        status.jobs = [jobs[job_id] for job_id in sorted(jobs)]
        status.ended = msgspec.UNSET
        return status


def _read(rundir: RunDir, kind: type[S]) -> S:
    rundir.refuse_newer()
    try:
        read = partial(decode_file, rundir.status, kind, most_bytes=MAX_SNAPSHOT_BYTES, most_depth=None)
        status = patiently(read)
        age_s(status.run)
    except FileNotFoundError as error:
        rundir.require()
        raise NoSuchRun(f"the run in {rundir.root} has not started yet") from error
    except OSError as error:
        raise StoreError(f"cannot read {rundir.status}: {error.strerror}") from error
    except (BadInput, ValueError, OverflowError) as error:
        raise StoreError(f"{rundir.status} cannot be understood: {error}") from error
    if status.run.state in ("RUNNING", "DRAINING"):
        status.run.stale = not agent_alive(rundir, rundir.read_record())
    return status


def is_abandoned(rundir: RunDir) -> bool:
    """Whether the run's agent is gone and jobs are left; False without a readable snapshot."""
    try:
        brief = read_brief(rundir)
    except HpcschedError:
        return False
    return brief.run.stale and brief.left > 0


def iso(wall: float | None) -> str | None:
    """A Unix time as ISO-8601 UTC."""
    if wall is None:
        return None
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(run: RunStatus) -> float:
    """Seconds since the snapshot was written."""
    return max(0.0, time.time() - datetime.fromisoformat(run.written_at).timestamp())


def is_followed(run: RunStatus) -> bool:
    """Whether another agent, in an allocation that has joined the run, may be about to take it over."""
    if not run.stale or run.state != "RUNNING" or age_s(run) > FOLLOWED_WITHIN_S:
        return False
    record = RunDir(Path(run.dir)).read_record()
    return record is not None and record.joinable


def is_old(run: RunStatus) -> bool:
    """Whether the snapshot is older than a living agent's can be: it hangs, or the filesystem lags."""
    return run.state in ("RUNNING", "DRAINING") and age_s(run) > 1.5 * SNAPSHOT_PERIOD_S


def is_silent(run: RunStatus) -> bool:
    """Whether the snapshot is so old that an agent whose process lives must have been stopped, or hangs."""
    return is_old(run) and age_s(run) > STALE_AFTER_S


def left_s(run: RunStatus) -> float | None:
    """Seconds until the end of the allocation; None if it has none, or it is not known."""
    return seconds_until(run.allocation.get("deadline"))


def seconds_until(when: str | None) -> float | None:
    """Seconds until an ISO time, below 0 if it has been; None if it is none."""
    if when is None:
        return None
    try:
        return datetime.fromisoformat(when).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
