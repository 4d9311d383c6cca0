"""The result of a run or a simulation: what `simulate --json` and `run --json` print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from hpcsched.core.model import Attempt, Ended, JobSpec, JobState, Role


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a job on one set of GPUs; `end_s` and `ended` are None while it lasts.

    `overhead_s` are its seconds of starting or resuming and of suspending, `suspend_s` the part of
    them at its end, where that is known.
    """

    start_s: float
    end_s: float | None
    gpus: tuple[int, ...]
    role: Role
    ended: Ended | None
    overhead_s: float = 0.0
    suspend_s: float = 0.0

    @property
    def launch_s(self) -> float:
        """Seconds of starting or resuming, at its beginning."""
        return self.overhead_s - self.suspend_s


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """A job and all its attempts; `start_s` and `end_s` are None if it never started, or is not over.

    `overhead_s` are the seconds of all its starts, suspends and resumes; `switch_s` is the same
    without the first start, which no policy can avoid.
    """

    id: int
    name: str
    model: str
    submit_s: float
    start_s: float | None
    end_s: float | None
    state: JobState
    steps: int | None
    step: int | None
    steps_repeated: int | None
    attempts: tuple[AttemptResult, ...]
    gpu_hours: float = 0.0
    suspensions: int = 0
    overhead_s: float = 0.0
    switch_s: float = 0.0
    metrics: dict[str, float] = {}

    @property
    def jct_s(self) -> float | None:
        """Job completion time: seconds from submission to completion; None unless COMPLETED."""
        if self.end_s is None or self.state is not JobState.COMPLETED:
            return None
        return self.end_s - self.submit_s


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a set of jobs went under one policy; `summarise` defines every number."""

    schema: int = 1
    policy: str
    gpus: int
    makespan_s: float
    mean_jct_s: float | None
    gpu_hours: float
    utilisation: float
    overhead_share: float
    lower_bound_s: float | None
    downtime_s: float = 0.0
    jobs: tuple[JobResult, ...]

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the lower bound, as a share of the bound; None without one."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else None

    @property
    def p95_jct_s(self) -> float | None:
        """The JCT that 95 % of the completed jobs do not exceed (nearest rank)."""
        times = sorted(job.jct_s for job in self.jobs if job.jct_s is not None)
        return times[-(-95 * len(times) // 100) - 1] if times else None


class JobRecord(Protocol):
    """What `summarise` reads of a job."""

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
    def metrics(self) -> Mapping[str, float]: ...


J = TypeVar("J", bound=JobRecord)


def summarise(
    jobs: Iterable[J],
    *,
    policy: str,
    gpus: int,
    lower_bound_s: float | None = None,
    overheads: Callable[[J, Attempt], float] = lambda job, attempt: 0.0,
    downtime_s: float = 0.0,
    now_s: float = 0.0,
) -> Result:
    """The measures of a set of jobs; times are seconds of the run's clock, which begins at 0.

    makespan_s: when the last job or attempt ended (`now_s` if one still runs).
    mean_jct_s: mean of end - submit over the COMPLETED jobs; None if there is none.
    gpu_hours: leased GPUs x time, summed over the attempts.
    utilisation: leased GPU-seconds as a share of gpus x makespan.
    overhead_share: seconds of all starts, resumes and suspends, summed over the jobs (not weighted
        by GPUs), over the makespan. This is MARBLE's section VII-D.1, whose "total training time" is
        the makespan (VII-D.2 puts 5.22 s of monitoring at 1.05 % of it, which makes it 497 s). Jobs
        that run side by side add up, so with many of them the share can be above 1.

    Args:
        gpus: how many there are.
        lower_bound_s: what no schedule's makespan can be below (`sim.bounds`), if known.
        overheads: seconds that a job spent on start or resume, and on suspend, in an attempt.
        downtime_s: seconds without an agent; not part of the run's clock.
        now_s: until when attempts that have not ended are counted.
    """
    jobs = list(jobs)
    times = [job.ended_s for job in jobs] + [attempt.end_s for job in jobs for attempt in job.attempts]
    open_ended = any(attempt.end_s is None for job in jobs for attempt in job.attempts)
    end_s = max([0.0, *(t for t in times if t is not None), *([now_s] if open_ended else [])])

    results = tuple(_job(job, overheads, end_s) for job in jobs)
    jcts = [job.jct_s for job in results if job.jct_s is not None]
    gpu_hours = sum(job.gpu_hours for job in results)
    return Result(
        policy=policy,
        gpus=gpus,
        makespan_s=end_s,
        mean_jct_s=sum(jcts) / len(jcts) if jcts else None,
        gpu_hours=gpu_hours,
        utilisation=gpu_hours * 3600 / (gpus * end_s) if end_s else 0.0,
        overhead_share=sum(job.overhead_s for job in results) / end_s if end_s else 0.0,
        lower_bound_s=lower_bound_s,
        downtime_s=downtime_s,
        jobs=results,
    )


def to_json(results: Sequence[Result]) -> bytes:
    """One result as it is; several as {"schema": 1, "results": [...]}, in their order."""
    return msgspec.json.encode(results[0] if len(results) == 1 else {"schema": 1, "results": results})


def _job(job: J, overheads: Callable[[J, Attempt], float], now_s: float) -> JobResult:
    attempts = tuple(_attempt(attempt, overheads(job, attempt)) for attempt in job.attempts)
    overhead_s = sum(a.overhead_s for a in attempts)
    leased_s = sum(len(a.gpus) * ((now_s if a.end_s is None else a.end_s) - a.start_s) for a in attempts)
    return JobResult(
        id=job.id,
        name=job.spec.name,
        model=job.spec.model,
        submit_s=job.submit_s,
        start_s=job.started_s,
        end_s=job.ended_s,
        state=job.state,
        steps=job.spec.steps,
        step=job.step,
        steps_repeated=job.steps_repeated,
        attempts=attempts,
        gpu_hours=leased_s / 3600,
        suspensions=sum(a.ended is Ended.SUSPENDED for a in attempts),
        overhead_s=overhead_s,
        switch_s=overhead_s - attempts[0].launch_s if attempts else 0.0,
        metrics=dict(job.metrics),
    )


def _attempt(attempt: Attempt, overhead_s: float) -> AttemptResult:
    suspend_s = 0.0
    if attempt.ended is Ended.SUSPENDED and attempt.end_s is not None and attempt.signalled_s is not None:
        suspend_s = min(attempt.end_s - attempt.signalled_s, overhead_s)
    return AttemptResult(
        start_s=attempt.start_s,
        end_s=attempt.end_s,
        gpus=attempt.gpus,
        role=attempt.role,
        ended=attempt.ended,
        overhead_s=overhead_s,
        suspend_s=suspend_s,
    )
