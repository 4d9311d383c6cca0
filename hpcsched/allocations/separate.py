"""The other way: a batch job for each training, without hpcsched in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.allocations.candidates import best_count, profile_of
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training in a batch job of its own: GPUs that it holds in all, seconds that it takes, and those (by
    position) that have to end before it starts."""

    name: str
    gpus: int
    nodes: int
    seconds: float
    after: tuple[int, ...] = ()


def trainings(
    jobs: Sequence[JobSpec], profiles: Sequence[Profile], *, best: bool, most: int, speed: float = 1.0
) -> list[Training]:
    """The jobs as batch jobs of their own, on the fewest GPUs that each may have, or on its best count, at
    most `most` on a node. Jobs on CPU cores are left out."""
    known = [
        (job, profile)
        for job in jobs
        if job.cpus is None and job.steps is not None and (profile := profile_of(job, profiles)) is not None
    ]
    index = {job.name: i for i, (job, _) in enumerate(known)}
    made = []
    for job, profile in known:
        assert job.steps is not None
        gpus = max(1, job.gpus_min)
        if best:
            gpus = max(gpus, min(best_count(job, profile), most))
        seconds = (profile.launch_s(gpus, first=True) or 0.0) + job.steps / profile.rate(gpus)
        made.append(
            Training(
                name=job.name,
                gpus=gpus * job.nodes,
                nodes=job.nodes,
                seconds=seconds / speed,
                after=tuple(index[name] for name in job.after if name in index),
            )
        )
    return made


def gpu_hours(made: Sequence[Training]) -> float:
    """GPU-hours charged for all of them."""
    return math.fsum(one.gpus * one.seconds for one in made) / 3600


def together_s(made: Sequence[Training], gpus: float) -> float:
    """Seconds until all have ended if they start in this order as soon as of `gpus` GPUs enough are free and
    what they wait for has ended: nobody else takes one."""
    ends: dict[int, float] = {}
    running: list[tuple[float, int]] = []
    waiting, free, now = list(range(len(made))), gpus, 0.0
    while waiting or running:
        for i in list(waiting):
            one = made[i]
            if (one.gpus <= free or not running) and all(ends.get(j, math.inf) <= now for j in one.after):
                free -= one.gpus
                ends[i] = now + one.seconds
                heapq.heappush(running, (ends[i], i))
                waiting.remove(i)
        if not running:
            break  # they wait for each other, which a job file does not allow
        now, i = heapq.heappop(running)
        free += made[i].gpus
    return max(ends.values(), default=0.0)
