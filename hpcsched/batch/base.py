"""The seam to the batch system: the allocation that it granted, its end, and requeueing."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from hpcsched.errors import BatchError

COMMAND_TIMEOUT_S = 15.0
"""Time after which a command of a batch system counts as hanging (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedHost:
    """One host of the allocation.

    `gpus` are the GPUs granted there, as CUDA names them (indices, UUIDs, MIG names);
    None: only the host itself can say. `cpus` is the number of CPUs granted, None if not known.
    """

    name: str
    gpus: tuple[str, ...] | None = None
    cpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """The rules of a preemptible job: `grace_s` seconds pass from the decision to the first SIGTERM (None:
    not known). `requeues`: the batch system then requeues the job by itself."""

    grace_s: float | None
    requeues: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The allocation that this process runs in: its hosts and its end.

    `kind` is the batch system's name ("slurm", "none"), `id` its id of the job ("12_3" is never used: an
    array's task has an id of its own; LSF's array elements are "806290[3]", SGE's "11.3"). `deadline` is
    the Unix time by which we must be gone, None if there is none or it is not known. `restart_count` counts
    how often the batch system has put this job back into its queue. `here` is the name, among `hosts`, of the
    host this process is on; None on a launch node, which is not one of them. `cluster` is the name of the
    cluster whose id `id` is, where there may be several; None where it is not told, as `account` and
    `partition` (LSF: project and queue), which are for records alone. `preemption` is set where the batch
    system takes hosts away for more important jobs, and leaves a time of grace of which we hear only if we
    ask.

    `refused`: of "requeue" and "chain" those that cannot be, each with the reason in words; `notes` are
    sentences on what of this allocation cannot be used, or not as elsewhere.

    `ends_by` are the signals by which it ends the job. `signals_all` are those that it sends to every process
    of the job when it means the job: what we start must not take them for ours.
    """

    kind: str
    id: str | None
    hosts: tuple[AllocatedHost, ...]
    deadline: float | None = None
    restart_count: int = 0
    here: str | None = None
    cluster: str | None = None
    account: str | None = None
    partition: str | None = None
    preemption: Preemption | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ends_by: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    signals_all: frozenset[signal.Signals] = frozenset()


class BatchJobState(StrEnum):
    """The state of a job in the batch system; UNKNOWN: no answer, or one with unknown words.

    HELD: it waits, and does not start before somebody releases it.
    """

    PENDING = "PENDING"
    HELD = "HELD"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    ENDED = "ENDED"
    UNKNOWN = "UNKNOWN"


class EndReason(StrEnum):
    """The reason why a batch job is being ended, as far as its batch system says."""

    NONE = "NONE"
    """It is not being ended: a signal that came was only a signal."""
    LIMIT = "LIMIT"
    """Its time is up."""
    CANCELLED = "CANCELLED"
    """Its owner or an operator has cancelled it."""
    PREEMPTED = "PREEMPTED"
    """A job of higher priority gets its hosts: now, or at `end_time`."""
    REQUEUED = "REQUEUED"
    """It has been requeued: the batch system starts it again."""
    NODE_FAIL = "NODE_FAIL"
    """The batch system has found one of its hosts down."""
    UNKNOWN = "UNKNOWN"
    """No answer, or one without a reason."""


class BatchSystem(Protocol):
    """One kind of batch system, asked from inside a job of its, or from a login node.

    An adapter is a class that inherits this one, made by `Kind(environ, launcher=...)`: `environ` is the
    environment of this process, `launcher` one of its `launchers`. What has an answer here need not be
    overridden by a kind that can do no better; `kinds.REQUIRED` must be.

    Methods that ask or tell it something run one command, which takes at most COMMAND_TIMEOUT_S; `allocation`
    and `submit_next` run up to five, one after the other, and on LSF so does the first question to bjobs.
    What fails raises BatchError, with one clear line. `job_id` None means the job this process is in.
    """

    kind: str
    """Its name in options, settings and records."""
    launchers: ClassVar[Sequence[str]]
    """The words of --launcher that go with it; the first is what "auto" means."""
    says_none: bool = False
    """Whether `reason` is NONE for a job that runs on; UNKNOWN then means that there was no answer."""
    takes_back: bool = False
    """Whether it takes hosts of a running job back (`release`) where the site and the job allow it."""

    @classmethod
    def inside(cls, environ: Mapping[str, str]) -> bool:
        """Whether this is the environment of a process of a job of its. Asks nobody, and never raises."""
        return False

    @classmethod
    def restarted(cls, environ: Mapping[str, str]) -> bool:
        """Whether it runs this job's script again from its beginning. Asks nobody, and never raises."""
        return False

    def allocation(self) -> Allocation:
        """The allocation this process is in, from its environment and a few questions.

        A question for the deadline that fails leaves it None. Raises BatchError when there is no allocation,
        or its hosts cannot be understood.
        """
        ...

    def end_time(self) -> float | None:
        """The Unix time at which the job this process is in will be ended, as of now; None: no limit."""
        ...

    def reason(self) -> EndReason:
        """The reason why this process's job is being ended. Never raises: UNKNOWN is an answer."""
        ...

    def kill_wait(self) -> float | None:
        """Seconds from the first of `Allocation.ends_by` that ends this job to the SIGKILL; never raises.

        None where that is not known.
        """
        return None

    def job_state(self, job_id: str) -> BatchJobState:
        """The state of a job. Never raises: UNKNOWN is an answer."""
        ...

    def why_waiting(self, job_id: str) -> str:
        """The batch system's word for why a job waits or is held; "" where it has none. Never raises."""
        return ""

    def requeue(self) -> int:
        """Requeue this job; returns the exit code to leave with, at once, for that to happen.

        Raises BatchError when the batch system refuses, or cannot do it for this job.
        """
        ...

    def requeueable(self) -> str:
        """Whether `requeue` would work for this job, in words for `doctor`. Never raises."""
        return "not known"

    def submit_next(self, script: Path | None) -> str:
        """Submit a job that starts when this one has ended; its id.

        `script` None: this job's own batch script, where the batch system gives it out. Raises BatchError.
        """
        ...

    def release(self, names: Sequence[str]) -> None:
        """Give hosts of this job back, for good: the job goes on with the others.

        What runs there ends without being asked; the host of the batch script cannot go. Raises BatchError
        where the batch system refuses or cannot do it for this job, and when it is not known what it did.
        """
        raise BatchError(f"{self.kind} takes no hosts of a running job back")

    def comment(self, text: str) -> None:
        """Set the job's comment in the batch system, where it has one."""
        return

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        """The commands that together run `argv` once on each of these hosts, with all devices granted there.

        Each command lives as long as what it started (one command a host, or one for all), and ending it
        ends that. Pure: builds argument vectors, runs nothing.
        """
        ...

    def script_pid(self) -> int | None:
        """The process id of this job's batch script, on its host, where we are in no step of the job.

        None where that is not known. It gets the batch system's signals; never raises.
        """
        return None

    def version(self) -> str:
        """Name and version of the batch system, for `doctor`. Raises BatchError."""
        ...
