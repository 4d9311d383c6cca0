"""The result of a run or a simulation: what `simulate --json` and `run --json` print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from hpcsched.core.model import NOTHING, Attempt, Ended, JobState
from hpcsched.core.nouns import noun
from hpcsched.report.idle import Idle
from hpcsched.report.measures import J, JobRecord, Measures, Tally, completion_s, measure


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a job on one set of GPUs; `end_s` and `ended` are None while it lasts.

    `overhead_s` are its seconds of starting or resuming and of suspending, or of standing still to be
    resized in place; `suspend_s` is the part of them at its end, where that is known.

    On CPU cores it has one configuration: the share of each of its `servers` and `workers` on `host`, in
    cores, `why` it has these, and the steps per second that were measured last of them, if any were; of
    others these are left out.
    """

    start_s: float
    end_s: float | None
    gpus: tuple[int, ...]
    role: str
    ended: Ended | None
    overhead_s: float = 0.0
    suspend_s: float = 0.0
    host: str | UnsetType = UNSET
    servers: tuple[float, ...] | UnsetType = UNSET
    workers: tuple[float, ...] | UnsetType = UNSET
    rate: float | UnsetType = UNSET
    why: str | UnsetType = UNSET

    @property
    def cores(self) -> float:
        """The CPU cores that it has."""
        return sum(self.servers or ()) + sum(self.workers or ())

    @property
    def launch_s(self) -> float:
        """Seconds of starting or resuming, at its beginning."""
        return self.overhead_s - self.suspend_s


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """A job and all its attempts; `start_s` and `end_s` are None if it never started, or is not over.

    `overhead_s` are the seconds of all its starts, suspends, resumes and changes; `switch_s` is the same
    without the first start, which no policy can avoid. `wait_s` is how long it waited for its first
    start (None: there was none), `queued_s` all its time without GPUs until it ended, the waits
    between attempts too (None unless COMPLETED). `switches` counts its moves: suspensions that
    resumed, and resizes. `core_hours` is left out for jobs on GPUs. `lost_s` are the seconds of training
    whose steps are lost.
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
    metrics: dict[str, float | None] = {}
    wait_s: float | None = None
    queued_s: float | None = None
    switches: int = 0
    core_hours: float | UnsetType = UNSET
    lost_s: float = 0.0

    @property
    def jct_s(self) -> float | None:
        """Job completion time: seconds from submission to completion; None unless COMPLETED."""
        return completion_s(self.state, self.submit_s, self.end_s)


class AllocationResult(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that came and went: `nodes` with `gpus_per_node` each (of `gpu_type`, if that was named),
    from `start_s` to `end_s` (None: it stays); `gpus` are their indices. `gpu_hours` are those for which its
    GPUs were in the run, `used_gpu_hours` those of them for which jobs had them."""

    start_s: float
    end_s: float | None
    nodes: int
    gpus_per_node: int
    gpu_type: str | UnsetType = UNSET
    gpus: tuple[int, ...]
    gpu_hours: float
    used_gpu_hours: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a set of jobs under one policy; `summarise` defines every number.

    `label` is what tables and charts call it where that is not the policy's name. `gap` is how far the
    makespan is above `lower_bound_s`, as a share of the bound, and `jct_gap` the same of the mean JCT and
    `mean_jct_bound_s`; None without a bound. `jobs` is empty where only the measures were asked for.
    `idle` is the GPU time that nobody used, left out where only the measures were asked for.
    What is about cores (by host `cores`, those for jobs on CPU cores) is left out where there were no such
    jobs. `devices` are the kinds of its devices, left out where they are all GPUs. `allocations` are those of
    a simulation in which hosts come or go.
    """

    schema: int = 1
    policy: str
    label: str = ""
    gpus: int
    makespan_s: float
    mean_jct_s: float | None
    gpu_hours: float
    utilisation: float
    overhead_share: float
    lower_bound_s: float | None
    gap: float | None = None
    mean_jct_bound_s: float | None = None
    jct_gap: float | None = None
    p95_jct_s: float | None = None
    mean_wait_s: float | None = None
    p95_wait_s: float | None = None
    mean_queued_s: float | None = None
    p95_queued_s: float | None = None
    switches: int = 0
    jobs_total: int = 0
    jobs_completed: int = 0
    downtime_s: float = 0.0
    background_total: int = 0
    background_completed: int = 0
    background_mean_jct_s: float | None = None
    background_end_s: float | None = None
    background_gpu_hours: float = 0.0
    overhead_gpu_hours: float = 0.0
    lost_gpu_hours: float = 0.0
    core_hours: float | UnsetType = UNSET
    overhead_core_hours: float | UnsetType = UNSET
    lost_core_hours: float | UnsetType = UNSET
    cores: dict[str, float] | UnsetType = UNSET
    idle: Idle | UnsetType = UNSET
    devices: list[str] | UnsetType = UNSET
    allocations: tuple[AllocationResult, ...] | UnsetType = UNSET
    jobs: tuple[JobResult, ...]

    @property
    def title(self) -> str:
        """Its name in tables."""
        return self.label or self.policy

    @property
    def noun(self) -> str:
        """What people call its devices."""
        return noun(self.devices or ())

    @property
    def on_gpus(self) -> bool:
        """Whether there is something to tell of GPUs: jobs on CPU cores alone have used none."""
        return self.core_hours is UNSET or self.gpu_hours + self.background_gpu_hours > 0

    @property
    def overhead_of_held(self) -> float:
        """The share of the time on GPUs (in a run without: on cores) that was overhead, 0 to 1."""
        return _share(self.overhead_gpu_hours, self.overhead_core_hours, self)

    @property
    def lost_of_held(self) -> float:
        """The share of that time whose steps are lost, 0 to 1."""
        return _share(self.lost_gpu_hours, self.lost_core_hours, self)


def _share(gpu_hours: float, core_hours: float | UnsetType, result: Result) -> float:
    part, all_of_it = (gpu_hours, result.gpu_hours) if result.on_gpus else (core_hours, result.core_hours)
    return (part or 0.0) / all_of_it if all_of_it else 0.0


def summarise(
    jobs: Iterable[J],
    *,
    policy: str,
    gpus: int,
    label: str = "",
    lower_bound_s: float | None = None,
    mean_jct_bound_s: float | None = None,
    overheads: Callable[[J, Attempt], float] = lambda job, attempt: 0.0,
    losses: Callable[[J, Attempt], float] = lambda job, attempt: 0.0,
    leaves_s: Callable[[J, Attempt], float | None] = lambda job, attempt: attempt.signalled_s,
    held_from_s: Callable[[J, Attempt], float | None] = lambda job, attempt: attempt.start_s,
    downtime_s: float = 0.0,
    now_s: float = 0.0,
    keep_jobs: bool = True,
    cores: Mapping[str, float] = NOTHING,
    away_gpu_s: Callable[[float], float] = lambda end_s: 0.0,
    idle: Idle | UnsetType = UNSET,
    devices: list[str] | UnsetType = UNSET,
    allocations: tuple[AllocationResult, ...] | UnsetType = UNSET,
) -> Result:
    """The measures of a set of jobs; times are seconds of the run's clock, which begins at 0.

    Those of jobs for background lanes have names of their own and count nowhere else, unless there are no
    others: `background_total` jobs, of which `background_completed` are COMPLETED, in a mean of
    `background_mean_jct_s` from their submission; the last of them, or of their attempts, ended at
    `background_end_s`, and they held background lanes for `background_gpu_hours`.

    makespan_s: when the last job or attempt ended (`now_s` if one still runs).
    mean_jct_s, p95_jct_s: of end - submit over the COMPLETED jobs; None if there is none. Here and
        below, p95 is the value that 95 % of them do not exceed (nearest rank).
    mean_wait_s, p95_wait_s: of first start - submit over the jobs that started.
    mean_queued_s, p95_queued_s: of the time without GPUs, JCT - time holding GPUs, over the COMPLETED
        jobs.
    switches: suspensions that resumed, and resizes, of all jobs together. Restarts after a failure or
        a lost host do not count.
    gpu_hours: leased GPUs x time, summed over the attempts.
    core_hours: CPU cores x time of the jobs on CPU cores, summed over the attempts.
    overhead_gpu_hours, overhead_core_hours: the parts of these in starts, resumes, suspends and changes.
    lost_gpu_hours, lost_core_hours: the parts of these in training whose steps are lost.
    utilisation: leased GPU-seconds as a share of gpus x makespan, less what GPUs of hosts that were given
        back were not in the run for; 0 without GPUs.
    overhead_share: seconds of all starts, resumes and suspends, and of standing still for changes in
        place, summed over the jobs (not weighted by GPUs), over the makespan. This is MARBLE's section
        VII-D.1, whose "total training time" is the makespan (VII-D.2 puts 5.22 s of monitoring at 1.05 %
        of it, which makes it 497 s). Jobs that run side by side add up, so with many of them the share
        can be above 1.
    jobs_total, jobs_completed: how many jobs there are, and how many of them COMPLETED; all of them.

    Args:
        gpus: how many there are.
        label: what to call it, where that is not the policy's name.
        lower_bound_s, mean_jct_bound_s: what no schedule's makespan and mean JCT can be below
            (`sim.bounds`), if known.
        leaves_s: since when an attempt that was asked to leave has done no work that is kept; None: it was
            not asked.
        overheads: seconds that a job spent on start or resume, and on suspend or change, in an attempt.
        losses: seconds that it trained in an attempt without that its steps were kept.
        held_from_s: since when an attempt counts as the one that uses its GPUs; None for one that is only
            trained together with another's.
        downtime_s: seconds without an agent; not part of the run's clock.
        now_s: until when attempts that have not ended are counted.
        keep_jobs: off leaves the jobs themselves out, which takes less time and memory for many.
        cores: the CPU cores by host that there are for jobs that need no GPU.
        away_gpu_s: the GPU-seconds until a time for which GPUs were not in the run any more.
        idle: what is known of the GPU time that nobody used.
        devices, allocations: see `Result`.
    """
    jobs = list(jobs)
    guests = [job for job in jobs if job.spec.background]
    foreground = [job for job in jobs if not job.spec.background] or jobs
    end_s, last_s = _end(foreground, now_s), _end(guests, now_s)
    tally, beside = Tally(), Tally()
    kept = []
    for job in jobs:
        measures = measure(job, overheads, losses, held_from_s, max(end_s, last_s))
        if job.spec.background:
            beside.add(measures)
        if not job.spec.background or len(guests) == len(jobs):
            tally.add(measures)
        if keep_jobs:
            kept.append(_job(job, measures, [leaves_s(job, attempt) for attempt in job.attempts]))
    mean_jct_s = _mean(tally.jcts)
    there_s = gpus * end_s - away_gpu_s(end_s)
    return Result(
        policy=policy,
        label=label,
        gpus=gpus,
        makespan_s=end_s,
        mean_jct_s=mean_jct_s,
        gpu_hours=tally.gpu_hours,
        utilisation=tally.gpu_hours * 3600 / there_s if there_s > 0 else 0.0,
        overhead_share=tally.overhead.seconds / end_s if end_s else 0.0,
        lower_bound_s=lower_bound_s,
        gap=_gap(end_s, lower_bound_s),
        mean_jct_bound_s=mean_jct_bound_s,
        jct_gap=_gap(mean_jct_s, mean_jct_bound_s),
        p95_jct_s=_p95(tally.jcts),
        mean_wait_s=_mean(tally.waits),
        p95_wait_s=_p95(tally.waits),
        mean_queued_s=_mean(tally.queued),
        p95_queued_s=_p95(tally.queued),
        switches=tally.switches,
        jobs_total=len(jobs),
        jobs_completed=sum(job.state is JobState.COMPLETED for job in jobs),
        downtime_s=downtime_s,
        background_total=len(guests),
        background_completed=len(beside.jcts),
        background_mean_jct_s=_mean(beside.jcts),
        background_end_s=last_s if guests else None,
        background_gpu_hours=beside.gpu_hours,
        overhead_gpu_hours=tally.overhead.gpu_s / 3600,
        lost_gpu_hours=tally.lost.gpu_s / 3600,
        core_hours=tally.core_hours,
        overhead_core_hours=UNSET if tally.core_hours is UNSET else tally.overhead.core_s / 3600,
        lost_core_hours=UNSET if tally.core_hours is UNSET else tally.lost.core_s / 3600,
        idle=idle,
        devices=devices,
        allocations=allocations,
        cores=dict(cores) if tally.core_hours is not UNSET else UNSET,
        jobs=tuple(kept),
    )


def to_json(results: Sequence[Result]) -> bytes:
    """One result as it is; several as {"schema": 1, "results": [...]}, in their order."""
    return msgspec.json.encode(results[0] if len(results) == 1 else {"schema": 1, "results": results})


def _end(jobs: Iterable[JobRecord], now_s: float) -> float:
    """The end of the last job or attempt, or now if one still runs."""
    end_s = 0.0
    for job in jobs:
        end_s = max(end_s, job.ended_s or 0.0)
        for attempt in job.attempts:
            end_s = max(end_s, now_s if attempt.end_s is None else attempt.end_s)
    return end_s


def _job(job: JobRecord, measures: Measures, leaves_s: list[float | None]) -> JobResult:
    attempts = tuple(map(_attempt, job.attempts, measures.overheads, leaves_s))
    overhead_s = sum(measures.overheads)
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
        gpu_hours=measures.leased_s / 3600,
        suspensions=sum(a.ended is Ended.SUSPENDED for a in attempts),
        overhead_s=overhead_s,
        switch_s=overhead_s - attempts[0].launch_s if attempts else 0.0,
        metrics=dict(job.metrics),
        wait_s=measures.wait_s,
        queued_s=measures.queued_s,
        switches=measures.switches,
        core_hours=measures.core_hours,
        lost_s=measures.lost.seconds,
    )


def _attempt(attempt: Attempt, overhead_s: float, leaves_s: float | None) -> AttemptResult:
    suspend_s = 0.0
    if attempt.ended is Ended.RESIZED:
        suspend_s = min(attempt.stopped_s or 0.0, overhead_s)
    elif attempt.ended is Ended.SUSPENDED and attempt.end_s is not None and leaves_s is not None:
        suspend_s = min(attempt.end_s - leaves_s, overhead_s)
    seats, usage = attempt.seats, attempt.usage
    return AttemptResult(
        start_s=attempt.start_s,
        end_s=attempt.end_s,
        gpus=attempt.gpus,
        role=attempt.role,
        ended=attempt.ended,
        overhead_s=overhead_s,
        suspend_s=suspend_s,
        host=seats[0].host if seats else UNSET,
        servers=tuple(seat.share for seat in seats if seat.server) if seats else UNSET,
        workers=tuple(seat.share for seat in seats if not seat.server) if seats else UNSET,
        rate=usage.rate if usage else UNSET,
        why=str(attempt.why) if attempt.why else UNSET,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _p95(values: Sequence[float]) -> float | None:
    return sorted(values)[-(-95 * len(values) // 100) - 1] if values else None


def _gap(value: float | None, bound: float | None) -> float | None:
    return None if value is None or not bound else value / bound - 1
