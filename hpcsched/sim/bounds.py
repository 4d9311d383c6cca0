"""Provable lower bounds of the makespan and of the mean completion time, which no schedule can beat.

They hold for any schedule, with suspends, restarts and changes of GPU counts, because of one lemma. Let
t(g) = launch(g) + steps / rate(g) be the seconds of the whole job on g GPUs, and let a stretch on g GPUs
take L seconds to launch and compute for p. It does the share p / (t - L) of all steps. The shares add up
to 1, and as p <= t - L none is larger than (L + p) / t. So the stretches' times, each measured in its own
t(g), add up to at least 1. A job thus gets done at a rate of 1 / t(g) at most while it holds g GPUs, and
all bounds here are about work that is done at these rates and can be moved and cut at will.

Hosts may come and go: then GPUs are there by time (`sim.capacity`), a job has a rate only on counts that fit
the hosts of that time, and areas are spread over the GPUs that there are. Nothing of a job has to be on one
side of such a change: it may be suspended and go on at no cost but that of its next launch.

GPUs may be of several types. The lemma holds for each of them, with t(k, g) for g GPUs of type k; where types
do not matter, t(g) is the least of these. If A(k) is the least g t(k, g) of a job, and A the least A(k), then
S GPU-seconds on type k do the share S / A(k) of it at most, and w S / A where w is A / A(k) or more. So a GPU
of type k is worth the largest A / A(k) of all jobs: with that weight, areas of A add up as on equal GPUs. The
GPUs of some jobs may be of several types at a time, which are all taken for the fastest then, and worth 1.

A stretch is a start or a resume, so launch(g) is the cheaper of the two. A cost that is not known counts
as nothing, and so does every launch of a job whose GPU count changes in place.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import accumulate, chain

from hpcsched.core.profile import Profile, cost_at
from hpcsched.planning.jobs.configuration_lp import BOUND_MARGIN, changing_bound_s, configuration_lp
from hpcsched.sim.blocks import Block
from hpcsched.sim.capacity import Capacity, GpuType

MAX_LP_JOBS = 40
MAX_LP_GPUS = 1024
"""The largest sets for which the LP is solved, in jobs and GPUs (chosen): it would take seconds. Larger ones
get the area bound alone."""

_MAX_LP_PATTERNS = 1000
"""Patterns that the LP may look for, at most (chosen); where that stops it early, it proves a little less."""

_MAX_LP_COUNTS = 4
"""Different counts of GPUs, where hosts come and go, that the LP is solved for, at most (chosen)."""

_MAX_SEARCHED_CUTS = 512
"""Large jobs whose best cuts are searched, at most (chosen)."""


@dataclass(frozen=True, kw_only=True)
class BoundJob:
    """A job as a bound knows it.

    GPUs are counted on each of its `nodes` hosts. `steps` is its whole work, `submit_s` when it comes,
    `after` the indices of the jobs that must have ended before it starts. `gpus_max` None means "as many
    as there are". `in_place` says that its GPU count may change without a restart. `share` is the least
    share of a GPU that it has while it runs there: with others it may be there in 1 / `share` times.
    `on_types` are its profiles on GPUs of types on which `profile` is not what it goes by, by their names;
    `mixes`: its GPUs may be of several types at a time, and unequally many on its hosts.
    """

    profile: Profile | None
    steps: int | None
    submit_s: float = 0.0
    gpus_min: int = 1
    gpus_max: int | None = None
    nodes: int = 1
    after: tuple[int, ...] = ()
    in_place: bool = False
    share: float = 1.0
    on_types: Mapping[str, Profile] = field(default_factory=dict)
    mixes: bool = False

    @property
    def uneven(self) -> bool:
        """See `JobSpec.uneven`."""
        return self.mixes and self.nodes > 1


@dataclass(frozen=True)
class _Times:
    """The seconds t(g) of a whole job by GPU count over all its hosts: on GPUs of each type that has so many
    (None: whatever they are), and of these the least."""

    by_type: Mapping[GpuType, Mapping[int, float]]
    best: Mapping[int, float]


def lower_bound_s(
    jobs: Sequence[BoundJob], gpus: int, hosts: int = 1, *, blocks: Sequence[Block] = ()
) -> float | None:
    """Seconds that no schedule of the jobs on `hosts` hosts of `gpus` GPUs can be done before, with `blocks`
    of hosts that come and go beside them; infinite if no schedule can do all of them.

    None if a job's steps or profile are not known.

    It is the largest of three bounds. Critical path: a chain of dependent jobs, each in its best time.
    Area: the GPU-seconds, each job on its most economical count, of all jobs that cannot start before
    some time, spread over all GPUs that there are from that time on. Configuration LP: see
    `planning.jobs.configuration_lp`, with GPUs counted over all hosts, and jobs released when they can start
    at the earliest. With scipy only, and for at most MAX_LP_JOBS jobs and MAX_LP_GPUS GPUs.

    Raises ValueError if `after` has a cycle, or if a job needs more GPUs or hosts than there are.
    """
    times, there = _known(jobs, [Block(gpus=gpus, nodes=hosts), *blocks])
    if times is None:
        return None
    starts, ends = _earliest(jobs, times, there)
    areas = [_area(one.best) * job.share for one, job in zip(times, jobs, strict=True)]
    shared = any(job.share < 1 for job in jobs)
    lp_s = 0.0 if shared else _lp_bound_s([one.best for one in times], there, starts)
    return max([0.0, *ends, *_area_bounds(starts, areas, there), lp_s])


def mean_jct_bound_s(
    jobs: Sequence[BoundJob], gpus: int, hosts: int = 1, *, blocks: Sequence[Block] = ()
) -> float | None:
    """Seconds that no schedule can bring the mean of end - submit over all jobs below (0 for no jobs); the
    arguments are those of `lower_bound_s`.

    None if a job's steps or profile are not known. Raises ValueError as `lower_bound_s` does.

    Let h be a job's best time, e its earliest start by submit and critical path, and w its least area over
    all GPUs. Then all jobs together are a machine of speed 1 with tasks of size w (the squashed area).
    Cut each job where the share a of it is done, for any a from 0 to 1. What comes after takes at least
    (1 - a) h, as no count does more than 1 / h in a second. For the end of what comes before there are two
    bounds, both from tasks of size a w, released at e, on that machine:

    - The sum of their ends is least under SRPT.
    - The mean time M at which a task is worked on. The sum of M is least if always the smallest task
      there is runs, by its whole size: exchanging pieces only helps then (mean busy time, Goemans
      et al. 2002). And as no count is faster than 1 / h, the end is at least M + a h / 2.

    Where hosts come and go the machine has the speed of that time. Both stay what they are: SRPT has, at each
    time, most tasks done, and of two tasks the smaller one is better first whatever the speeds are. GPUs of
    several types make it as fast as they are worth.

    The first is better where jobs come late, the second where they come together, as w <= h. Each choice of
    a gives a bound, and the largest of three counts: a = 0 (height), a = 1, and `_cuts`.
    """
    times, there = _known(jobs, [Block(gpus=gpus, nodes=hosts), *blocks])
    if not jobs or times is None:
        return None if times is None else 0.0
    heights = [min(one.best.values()) for one in times]
    starts, ends = _earliest(jobs, times, there)
    if math.isinf(max(ends)):
        return math.inf
    shares = [job.share / there.size for job in jobs]
    weights = [_area(one.best) * share for one, share in zip(times, shares, strict=True)]
    total = sum(starts) + sum(heights)
    if not there.constant:
        total = max(total, sum(ends))
    for sizes in (weights, _cuts(weights, heights)):
        shares = [size / weight if weight > 0 else 0.0 for size, weight in zip(sizes, weights, strict=True)]
        before = sum(share * height for share, height in zip(shares, heights, strict=True))
        after = sum(heights) - before
        busy = _busy(starts, sizes, there) + before / 2
        total = max(total, _srpt(starts, sizes, there) + after, busy + after)
    return max(0.0, total * (1 - BOUND_MARGIN) - sum(job.submit_s for job in jobs)) / len(jobs)


def _area_bounds(starts: Sequence[float], areas: Sequence[float], there: Capacity) -> Iterable[float]:
    """For every earliest start: the area of the jobs that start then or later needs this long."""
    area = 0.0
    for start_s, gpu_s in sorted(zip(starts, areas, strict=True), reverse=True):
        area += gpu_s
        yield there.area_end_s(start_s, area)


def _area(table: Mapping[int, float]) -> float:
    return min(count * seconds for count, seconds in table.items())


def _known(jobs: Sequence[BoundJob], blocks: Sequence[Block]) -> tuple[list[_Times] | None, Capacity]:
    """The times of each job (None if one is not known), and the GPUs that there are, by what they are worth.
    Raises ValueError for jobs that are too large."""
    there = Capacity(blocks)
    times = _times(jobs, there)
    if times is None or len(there.types) == 1 or any(job.mixes for job in jobs):
        return times, there
    worth = dict.fromkeys(there.types, 0.0)
    for one in times:
        least = _area(one.best)
        for gpu_type in worth.keys() & one.by_type.keys() if least > 0 else ():
            worth[gpu_type] = max(worth[gpu_type], least / _area(one.by_type[gpu_type]))
    return times, Capacity(blocks, worth)


def _times(jobs: Sequence[BoundJob], there: Capacity) -> list[_Times] | None:
    known: dict[tuple[int, ...], list[tuple[int, float, float]]] = {}
    largest = {
        (nodes, uneven, gpu_type): there.most(nodes, gpu_type, uneven=uneven)
        for nodes, uneven in {(1, False), *((job.nodes, job.uneven) for job in jobs)}
        for gpu_type in (None, *there.types)
    }
    one_type = len(there.types) == 1
    times = []
    for job in jobs:
        if job.profile is None or job.steps is None:
            return None
        if job.nodes > there.hosts():
            raise ValueError(f"a job needs {job.nodes} hosts, there are {there.hosts()}")
        profiles = {each: job.on_types.get(each, job.profile) for each in there.types}
        kinds: Sequence[GpuType] = (None,) if job.mixes or one_type else there.types
        by_type: dict[GpuType, Mapping[int, float]] = {}
        for kind in kinds:
            gpus = largest[job.nodes, job.uneven, kind]
            most = gpus if job.gpus_max is None else min(job.gpus_max, gpus)
            if job.gpus_min <= most:
                these = profiles.values() if kind is None else (profiles[kind],)
                by_type[kind] = reduce(_least, [_seconds(job, one, most, known) for one in these])
        if not by_type:
            most = max(largest[job.nodes, job.uneven, kind] for kind in kinds)
            raise ValueError(f"a job needs {job.gpus_min} GPUs, there are {most} for it")
        times.append(_Times(by_type, reduce(_least, by_type.values())))
    return times


def _seconds(
    job: BoundJob, profile: Profile, most: int, known: dict[tuple[int, ...], list[tuple[int, float, float]]]
) -> dict[int, float]:
    """By GPU count; `known` keeps the costs of launches and the rates."""
    key = (id(profile), job.gpus_min, most, job.nodes, job.in_place)
    if key not in known:
        known[key] = [
            (count * job.nodes, 0.0 if job.in_place else _launch_s(profile, count), profile.rate(count))
            for count in range(job.gpus_min, most + 1)
        ]
    return {count: launch_s + (job.steps or 0) / rate for count, launch_s, rate in known[key]}


def _least(one: Mapping[int, float], other: Mapping[int, float]) -> Mapping[int, float]:
    return {count: min(one.get(count, math.inf), other.get(count, math.inf)) for count in {**one, **other}}


def _launch_s(profile: Profile, gpus: int) -> float:
    return min(cost_at(cost, gpus) or 0.0 for cost in (profile.start_s, profile.resume_s))


def _earliest(
    jobs: Sequence[BoundJob], times: Sequence[_Times], there: Capacity
) -> tuple[list[float], list[float]]:
    """For each job its start and end at the earliest: after its submit and its chain of dependencies."""
    starts = [job.submit_s for job in jobs]
    ends = [
        there.job_end_s(start_s, one.by_type, job.nodes, uneven=job.uneven)
        for start_s, one, job in zip(starts, times, jobs, strict=True)
    ]
    if any(job.after for job in jobs):
        for i in TopologicalSorter({i: job.after for i, job in enumerate(jobs)}).static_order():
            starts[i] = max([starts[i], *(ends[before] for before in jobs[i].after)])
            job = jobs[i]
            ends[i] = there.job_end_s(starts[i], times[i].by_type, job.nodes, uneven=job.uneven)
    return starts, ends


def _lp_bound_s(tables: Sequence[Mapping[int, float]], there: Capacity, starts: Sequence[float]) -> float:
    """By the configuration LP; 0 without scipy, or where it would take too long or has no use."""
    if not 0 < len(tables) <= MAX_LP_JOBS or there.gpus > MAX_LP_GPUS:
        return 0.0
    seconds = list(chain(*(table.values() for table in tables)))
    if min(seconds) <= 0 or not all(map(math.isfinite, [*starts, *seconds])):
        return 0.0
    iterations = min(100, _MAX_LP_PATTERNS // len(set(starts)))
    try:
        if there.constant:
            return configuration_lp(tables, there.gpus, release_s=starts, iterations=iterations).bound_s
        steps = [(stretch.start_s, stretch.gpus) for stretch in there.stretches]
        bound_s = 0.0
        for gpus in _usual_counts(there):
            if all(min(table) <= gpus for table in tables):
                found = configuration_lp(tables, gpus, release_s=starts, iterations=iterations)
                bound_s = max(bound_s, changing_bound_s(tables, found.weights, starts, steps))
        return bound_s
    except ImportError:
        return 0.0


def _usual_counts(there: Capacity) -> list[int]:
    """The counts of GPUs that there are for the longest times."""
    lasts: dict[int, float] = {}
    for stretch in there.stretches:
        lasts[stretch.gpus] = lasts.get(stretch.gpus, 0.0) + stretch.end_s - stretch.start_s
    return sorted(lasts, key=lambda gpus: (-lasts[gpus], -gpus))[:_MAX_LP_COUNTS]


def _cuts(weights: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The task sizes, each at most its weight, whose bound by mean busy times is the best without releases.

    If S(x) are the tasks of size x or more, that bound is the sum of all heights plus half the integral
    over x of |S(x)|^2 - the sum of h / w over S(x). At each x the best set of a given number has those
    of the least h / w among the jobs with w >= x, and the largest best sets grow as x falls, so they
    are a choice of sizes. If there are at least max(h / w) jobs, all of them are a best set.
    """
    sizes = [0.0] * len(weights)
    ratios: list[tuple[float, int]] = []
    undecided: set[int] = set()
    order = sorted((j for j, w in enumerate(weights) if w > 0), key=lambda j: -weights[j])
    largest = max((heights[j] / weights[j] for j in order), default=0.0)
    for number, j in enumerate(order, 1):
        undecided.add(j)
        chosen: Iterable[int] = undecided
        if number < min(largest, _MAX_SEARCHED_CUTS):
            insort(ratios, (heights[j] / weights[j], j))
            gains = [n * n - cost for n, cost in enumerate(accumulate(r for r, _ in ratios), 1)]
            best = max(range(number), key=lambda n: (gains[n], n))
            chosen = [k for _, k in ratios[: best + 1] if k in undecided] if gains[best] >= 0 else []
        for k in tuple(chosen):
            sizes[k] = weights[j]
            undecided.discard(k)
    return sizes


def _stretches(
    starts: Sequence[float], sizes: Sequence[float], *, by_rest: bool
) -> Iterator[tuple[int, float, float]]:
    """(task, begin, end) on one machine that always runs the smallest task, by its size or by its rest; times
    are those of the machine's clock."""
    arrivals = deque(sorted(range(len(starts)), key=lambda j: starts[j]))
    rest = list(sizes)
    waiting: list[tuple[float, int]] = []
    now = -math.inf
    while arrivals or waiting:
        if not waiting:
            now = starts[arrivals[0]]
        while arrivals and starts[arrivals[0]] <= now:
            j = arrivals.popleft()
            heappush(waiting, (sizes[j], j))
        _, j = heappop(waiting)
        end = now + rest[j]
        if arrivals and starts[arrivals[0]] < end:
            end = starts[arrivals[0]]
            rest[j] -= end - now
            heappush(waiting, (rest[j] if by_rest else sizes[j], j))
        yield j, now, end
        now = end


def _srpt(starts: Sequence[float], sizes: Sequence[float], there: Capacity) -> float:
    """The least sum of ends of these tasks on one machine (Schrage 1968)."""
    ends = list(starts)
    for j, _, end in _stretches([*map(there.clock, starts)], sizes, by_rest=True):
        ends[j] = max(starts[j], there.time(end))
    return sum(ends)


def _busy(starts: Sequence[float], sizes: Sequence[float], there: Capacity) -> float:
    """The least sum, over these tasks on one machine, of the mean time at which a task was worked on."""
    total = sum(start_s for start_s, size in zip(starts, sizes, strict=True) if size <= 0)
    for j, begin, end in _stretches([*map(there.clock, starts)], sizes, by_rest=False):
        if sizes[j] > 0:
            total += there.moment(begin, end) / sizes[j]
    return total
