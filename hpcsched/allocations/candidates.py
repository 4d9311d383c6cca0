"""Allocations that may be worth asking for: how many GPUs the jobs can use, which partitions have them, and
which time limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpcsched.batch.queue import Partition
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile, cost_at

ROUND_S = tuple(minutes * 60.0 for minutes in (30, 60, 120, 240, 480, 720, 1440))
"""Time limits, shorter than the whole run, that are tried: with coming back they may fit holes of the
queue."""

SAFETY = 0.1
"""The share by which a limit for the whole run is longer than the run was computed (chosen)."""

MOST_GPUS = 8
"""GPUs on a node where no batch system tells how many there are (chosen)."""


def profile_of(job: JobSpec, profiles: Iterable[Profile]) -> Profile | None:
    """The profile that a job goes by: that for its number of nodes, else that for one."""
    known = {profile.nodes: profile for profile in profiles if profile.model == job.model}
    return known.get(job.nodes) or known.get(1)


def best_count(job: JobSpec, profile: Profile) -> int:
    """The smallest number of GPUs on each of its nodes on which a job is as fast as it gets."""
    most = job.gpus_max or max(job.gpus_min, *profile.throughput)
    return profile.optimal(max(most, job.gpus_min), max(1, job.gpus_min))


def useful_gpus(jobs: Iterable[JobSpec], profiles: Sequence[Profile]) -> int:
    """GPUs in all beyond which no job gets any faster: each job on its best count, all at once."""
    total = 0
    for job in jobs:
        profile = profile_of(job, profiles)
        if job.cpus is None and profile is not None:
            total += best_count(job, profile) * job.nodes
    return total


def shapes_in(
    partition: Partition,
    *,
    useful: int,
    least: int = 1,
    least_nodes: int = 1,
    gpus: Sequence[int] = (),
    nodes: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """(nodes, GPUs on each) to try in a partition: each count on one node, then whole nodes.

    `gpus`, `nodes`: those that the user asks for; nothing else is tried then. `useful`: see `useful_gpus`;
    `least` GPUs on each of `least_nodes` nodes are what some job needs.
    """
    there = max(partition.hosts, default=0)
    counts = [count for count in gpus or range(1, there + 1) if least <= count <= there]
    found = []
    for count in counts:
        top = partition.nodes_for(count)
        if nodes:
            numbers = [number for number in nodes if least_nodes <= number <= top]
        elif gpus or count in partition.hosts or least_nodes > 1:
            numbers = _up_to(least_nodes, min(top, max(least_nodes, math.ceil(useful / max(1, count)))))
        else:
            numbers = [1] if top else []
        found += [(number, count) for number in numbers]
    # More than is useful is never offered, but the smallest that holds it is.
    enough = min((n * g for n, g in found if n * g >= useful), default=None)
    asked = bool(gpus or nodes)
    return [(n, g) for n, g in found if asked or enough is None or n * g <= enough]


def _up_to(least: int, most: int) -> list[int]:
    """Doubling from `least` on, and `most` itself; nothing if that is less."""
    numbers = []
    while least < most:
        numbers.append(least)
        least *= 2
    return [*numbers, most] if numbers or least == most else []


def whole_limit_s(held_s: float, margin_s: float, save_s: float, doubt: float = 0.0) -> float:
    """The time limit for a run that holds its allocation for `held_s` seconds, in whole minutes: that and a
    safety margin (twice the `doubt` of the profiles, where that is more), the margin before the end, and the
    time that saving takes."""
    seconds = held_s * (1 + max(SAFETY, 2 * doubt)) + margin_s + save_s
    step = 60.0 if seconds <= 1800 else 300.0 if seconds <= 4 * 3600 else 1800.0
    return math.ceil(seconds / step) * step


def saves_s(jobs: Iterable[JobSpec], profiles: Sequence[Profile], gpus: int) -> float:
    """The longest time that saving can take for jobs on so many GPUs in all: one after the other."""
    costs = []
    for job in jobs:
        profile = profile_of(job, profiles)
        costs.append((cost_at(profile.suspend_s, job.gpus_min or 1) if profile else None) or 5.0)
    return math.fsum(sorted(costs, reverse=True)[: max(1, gpus)])


def limits_in(partition: Partition, whole_s: float, given: Sequence[float] = ()) -> list[float]:
    """Time limits to try in a partition: `given` ones, or that of the whole run and shorter, round ones."""
    ceiling = math.inf if partition.limit_s is None else partition.limit_s
    if given:
        return sorted({limit for limit in given if limit <= ceiling})
    shorter = {limit for limit in ROUND_S if limit < min(whole_s, ceiling)}
    return sorted({*shorter, min(whole_s, ceiling)})
