"""The measures of single jobs, and their sums: what a result is made of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType

from hpcsched.core.mechanisms.cpu.layout import cores_of
from hpcsched.core.model import Attempt, Ended, JobSpec, JobState


class JobRecord(Protocol):
    """The facts of a job that `summarise` reads."""

    @property
    def id(self) -> int: ...
    @property
    def spec(self) -> JobSpec: ...
    @property
    def submit_s(self) -> float: ...
    @property
    def started_s(self) -> float | None: ...
    @property
    def ended_s(self) -> float | None: ...
    @property
    def state(self) -> JobState: ...
    @property
    def step(self) -> int | None: ...
    @property
    def steps_repeated(self) -> int | None: ...
    @property
    def attempts(self) -> Sequence[Attempt]: ...
    @property
    def metrics(self) -> Mapping[str, float | None]: ...


J = TypeVar("J", bound=JobRecord)


@dataclass(slots=True)
class Part:
    """A part of the time on devices: in seconds, GPU-seconds and core-seconds."""

    seconds: float = 0.0
    gpu_s: float = 0.0
    core_s: float = 0.0

    def add(self, seconds: float, gpus: float, cores: float) -> None:
        self.seconds += seconds
        self.gpu_s += seconds * gpus
        self.core_s += seconds * cores

    def __iadd__(self, other: Part) -> Part:
        self.seconds += other.seconds
        self.gpu_s += other.gpu_s
        self.core_s += other.core_s
        return self


@dataclass(slots=True)
class Measures:
    """Measures of one job: `leased_s` in GPU-seconds, `overheads` attempt by attempt."""

    leased_s: float
    core_hours: float | UnsetType
    overheads: list[float]
    overhead: Part
    lost: Part
    switches: int
    jct_s: float | None
    wait_s: float | None
    queued_s: float | None


@dataclass(slots=True)
class Tally:
    """The measures of the jobs so far."""

    gpu_hours: float = 0.0
    core_hours: float | UnsetType = UNSET
    overhead: Part = field(default_factory=Part)
    lost: Part = field(default_factory=Part)
    switches: int = 0
    jcts: array[float] = field(default_factory=lambda: array("d"))
    waits: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))

    def add(self, job: Measures) -> None:
        self.gpu_hours += job.leased_s / 3600
        if job.core_hours is not UNSET:
            self.core_hours = (self.core_hours or 0.0) + job.core_hours
        self.overhead += job.overhead
        self.lost += job.lost
        self.switches += job.switches
        if job.jct_s is not None:
            self.jcts.append(job.jct_s)
        if job.wait_s is not None:
            self.waits.append(job.wait_s)
        if job.queued_s is not None:
            self.queued.append(job.queued_s)


def measure(
    job: J,
    overheads: Callable[[J, Attempt], float],
    losses: Callable[[J, Attempt], float],
    held_from_s: Callable[[J, Attempt], float | None],
    now_s: float,
) -> Measures:
    leased_s = held_s = core_s = 0.0
    switches, before = 0, None
    by_attempt, overhead, lost = list[float](), Part(), Part()
    for attempt in job.attempts:
        end_s = now_s if attempt.end_s is None else attempt.end_s
        lasted_s, cores = end_s - attempt.start_s, cores_of(attempt.seats)
        from_s = held_from_s(job, attempt)
        gpus = 0 if from_s is None else len(attempt.gpus)
        leased_s += gpus * (end_s - (from_s or 0.0))
        held_s += lasted_s
        core_s += cores * lasted_s
        by_attempt.append(overheads(job, attempt))
        overhead.add(by_attempt[-1], gpus, cores)
        if lost_s := losses(job, attempt):
            lost.add(lost_s, gpus, cores)
        switches += before in (Ended.SUSPENDED, Ended.RESIZED)
        before = attempt.ended
    jct_s = completion_s(job.state, job.submit_s, job.ended_s)
    return Measures(
        leased_s=leased_s,
        core_hours=UNSET if job.spec.cpus is None else core_s / 3600,
        overheads=by_attempt,
        overhead=overhead,
        lost=lost,
        switches=switches,
        jct_s=jct_s,
        wait_s=None if job.started_s is None else job.started_s - job.submit_s,
        queued_s=None if jct_s is None else max(0.0, jct_s - held_s),
    )


def completion_s(state: JobState, submit_s: float, end_s: float | None) -> float | None:
    return None if end_s is None or state is not JobState.COMPLETED else end_s - submit_s
