"""What no schedule can beat: provable lower bounds of the makespan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from hpcsched.core.profile import Profile, cost_at


@dataclass(frozen=True, kw_only=True)
class BoundJob:
    """What a bound needs to know of a job.

    GPUs are counted on each of its `nodes` hosts. `steps` is its whole work, `submit_s` when it comes,
    `after` the indices of the jobs that must have ended before it starts. `gpus_max` None means "as many
    as there are". `in_place` says that its GPU count may change without a restart.
    """

    profile: Profile | None
    steps: int | None
    submit_s: float = 0.0
    gpus_min: int = 1
    gpus_max: int | None = None
    nodes: int = 1
    after: tuple[int, ...] = ()
    in_place: bool = False


def lower_bound_s(jobs: Sequence[BoundJob], gpus: int, hosts: int = 1) -> float | None:
    """Seconds that no schedule of the jobs on `hosts` hosts of `gpus` GPUs can be done before.

    None if a job's steps or profile are not known.

    It is the larger of two bounds. Critical path: a chain of dependent jobs, each in its best
    time. Area: the GPU-seconds, each job on its most economical count, of all jobs that cannot start
    before some time, spread over all GPUs from that time on. Both hold for schedules that suspend
    jobs and change their GPU counts as well: see `_times`.

    Raises ValueError if `after` has a cycle, or if a job needs more GPUs than there are.
    """
    tables = []
    for job in jobs:
        if job.profile is None or job.steps is None:
            return None
        tables.append(_times(job, job.profile, job.steps, gpus))

    starts = [0.0] * len(jobs)
    ends = [0.0] * len(jobs)
    for i in TopologicalSorter({i: job.after for i, job in enumerate(jobs)}).static_order():
        starts[i] = max([jobs[i].submit_s, *(ends[before] for before in jobs[i].after)])
        ends[i] = starts[i] + min(tables[i].values())

    areas = [
        job.nodes * min(count * seconds for count, seconds in table.items())
        for job, table in zip(jobs, tables, strict=True)
    ]
    return max([0.0, *ends, *_area_bounds(starts, areas, gpus * hosts)])


def _area_bounds(starts: Sequence[float], areas: Sequence[float], gpus: int) -> Iterable[float]:
    """For every earliest start: the area of the jobs that start then or later needs this long."""
    area = 0.0
    for start_s, gpu_s in sorted(zip(starts, areas, strict=True), reverse=True):
        area += gpu_s
        yield start_s + area / gpus


def _times(job: BoundJob, profile: Profile, steps: int, gpus: int) -> dict[int, float]:
    """By GPU count g, the seconds t(g) of the whole job there: launch(g) + steps / rate(g).

    Why the least t(g), or g t(g), also bounds a job that changes counts: a stretch on g GPUs that
    takes L seconds to launch and computes for p does the share p / (t - L) of all steps. The shares
    add up to 1, and as p <= t - L none is larger than (L + p) / t. So the stretches' times, each
    measured in its own t, add up to at least 1: to at least the least t in seconds. A stretch is a
    start or a resume, so launch(g) is the cheaper of the two. A cost that is not known counts as
    nothing, and so does every launch where counts change without one.
    """
    most = gpus if job.gpus_max is None else min(job.gpus_max, gpus)
    if job.gpus_min > most:
        raise ValueError(f"a job needs {job.gpus_min} GPUs, there are {most} for it")
    times = {}
    for count in range(job.gpus_min, most + 1):
        start_s, resume_s = (cost_at(cost, count) or 0.0 for cost in (profile.start_s, profile.resume_s))
        launch_s = 0.0 if job.in_place else min(start_s, resume_s)
        times[count] = launch_s + steps / profile.rate(count)
    return times
