"""status.json as others read it: with nothing but msgspec, no lock and no port, on any host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hpcsched.contract.progress import Batching
from hpcsched.core.model import JobState
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, HpcschedError, NoSuchRun, StoreError
from hpcsched.store.rundir import MOST_SNAPSHOT_BYTES, SNAPSHOT_PERIOD_S, RunDir, agent_alive

if TYPE_CHECKING:
    from hpcsched.store.registry import Registered


class AgentStatus(msgspec.Struct, kw_only=True):
    host: str
    pid: int


class RunStatus(msgspec.Struct, kw_only=True):
    """`state` is RUNNING, DRAINING, STOPPED (work left) or FINISHED.

    `allocation` has kind, id and deadline (ISO time, or None); where the batch system had to be asked
    what became of the job, also `life`, its answer.
    """

    dir: str
    state: str
    stale: bool
    seq: int
    written_at: str
    policy: str
    agent: AgentStatus
    allocation: dict[str, str | None]
    clock_s: float = 0.0
    """The run's clock when this was written; job times refer to it."""
    speed: float = 1.0
    lost_gpus: dict[str, str] = {}


class GpuStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A lane of a GPU, `foreground` or `background`: a GPU whose background lane is taken is there twice.

    `loan`: it is a CPU slot whose cores are lent to jobs that need no GPU; nobody else can have it meanwhile.
    """

    index: int
    host: str
    job: int | None
    lane: str
    utilisation: float | None
    memory_mib: float | None
    loan: bool = False


class CoresStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What a job on CPU cores has of its `budget`: the share of each server and each worker, in cores.

    `rate` (steps per second), `cpu` (cores used) and `net` (the share of the time for which its link was
    full, 0 to 1; of workers 0) are what was measured last of its present configuration, the servers first,
    then the workers; None where nothing was yet. `host` is None while it has no cores.
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
        """The cores that it has."""
        return sum(self.servers) + sum(self.workers)


class JobStatus(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """`elapsed_s` counts the time on GPUs or CPU cores, not the time suspended; `eta_s` is what is left,
    seconds. `resizes` are those in place. `cores` is there for jobs on CPU cores alone. `kept` are the keys
    of which the job file last seen says otherwise than the run, `updated` those that were taken from it since
    the job ended."""

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
    kept: list[str] = []
    updated: list[str] = []


class Status(msgspec.Struct, kw_only=True):
    schema: int = 1
    run: RunStatus
    gpus: list[GpuStatus]
    jobs: list[JobStatus]


class Page(msgspec.Struct, kw_only=True):
    """A status with its jobs as JSON: to write, or to pass on, without touching each of them."""

    schema: int = 1
    run: RunStatus
    gpus: list[GpuStatus]
    jobs: list[msgspec.Raw]


class _State(msgspec.Struct):
    state: JobState


class _Brief(msgspec.Struct):
    """A status of which only the jobs' states matter."""

    run: RunStatus
    jobs: list[_State]


class RunLine(msgspec.Struct, kw_only=True):
    """One of the user's runs: a line of `status --all`. `state` None: it has written no snapshot yet."""

    id: str
    dir: str
    state: str | None
    stale: bool
    allocation: dict[str, str | None]
    age_s: float | None
    done: int
    left: int

    @property
    def alive(self) -> bool:
        return self.state in ("RUNNING", "DRAINING") and not self.stale


S = TypeVar("S", Status, Page, _Brief)


def read_status(rundir: RunDir) -> Status:
    """The newest snapshot, `stale` set if its agent should be alive and is not.

    Raises NoSuchRun if there is none, NewerRun where it is of a newer hpcsched, StoreError if it cannot be
    understood.
    """
    return _read(rundir, Status)


def read_page(rundir: RunDir) -> Page:
    """The same as `read_status`, with the jobs as they were written."""
    return _read(rundir, Page)


def _read(rundir: RunDir, kind: type[S]) -> S:
    rundir.refuse_newer()
    try:
        status = decode_file(rundir.status, kind, most_bytes=MOST_SNAPSHOT_BYTES)
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
    """Whether the run's agent is gone though jobs are left; False where there is no snapshot to read."""
    try:
        brief = _read(rundir, _Brief)
    except HpcschedError:
        return False
    return brief.run.stale and not all(job.state.final for job in brief.jobs)


def age_s(run: RunStatus) -> float:
    """Seconds since the snapshot was written."""
    return max(0.0, time.time() - datetime.fromisoformat(run.written_at).timestamp())


def is_old(run: RunStatus) -> bool:
    """Whether a living agent should have written again by now: it hangs, or the filesystem lags."""
    return run.state in ("RUNNING", "DRAINING") and age_s(run) > 1.5 * SNAPSHOT_PERIOD_S


def left_s(run: RunStatus) -> float | None:
    """Seconds until the allocation ends; None if it has no end, or that is not known."""
    deadline = run.allocation.get("deadline")
    if deadline is None:
        return None
    try:
        return datetime.fromisoformat(deadline).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None


def my_runs(environ: Mapping[str, str] | None = None) -> list[RunLine]:
    """The user's runs, newest first; those whose snapshot cannot be read are listed without a state."""
    from hpcsched.store import registry

    return [_line(entry) for entry in registry.runs(environ=environ)]


def _line(entry: Registered) -> RunLine:
    try:
        brief = _read(RunDir(Path(entry.dir)), _Brief)
    except HpcschedError:
        return RunLine(
            id=entry.id, dir=entry.dir, state=None, stale=True, allocation={}, age_s=None, done=0, left=0
        )
    done = sum(job.state.final for job in brief.jobs)
    return RunLine(
        id=entry.id,
        dir=entry.dir,
        state=brief.run.state,
        stale=brief.run.stale,
        allocation=brief.run.allocation,
        age_s=round(age_s(brief.run), 3),
        done=done,
        left=len(brief.jobs) - done,
    )
