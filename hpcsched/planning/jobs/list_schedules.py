"""List schedules: jobs start in an order of their own, each on no more GPUs than its cap.

When nothing waits and GPUs are free, the job that would end last grows to where it ends soonest, if that
pays for its suspend and resume; a running job is never changed otherwise, except that a plan may begin with
shrinking some. A job that is still starting can not be suspended yet: the plan looks again when it has
started. This is the rule that a planner tries its plans by and the rule that it goes by: one code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from hpcsched.planning.jobs.problem import Problem
from hpcsched.planning.jobs.timeline import Timeline

MIN_REL_GAIN = 1e-9
"""The share by which a job must end sooner, or it does not grow: rounding is no gain."""

SAME_TIME_S = 1e-6
"""Times this close together are the same: a microsecond, chosen."""


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """A list schedule: `order` of the jobs that wait, `caps` of all jobs by index (see `Problem`).

    A running job with a cap below its count shrinks to it at once. `strict`: a job waits for its whole cap.
    """

    order: tuple[int, ...]
    caps: tuple[int, ...]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CountChange:
    """A change that a schedule makes now: the job's new count; `old` is its count before (0: it waited)."""

    job: int
    old: int
    gpus: int
    hosts: tuple[str, ...]


def apply(
    problem: Problem,
    timeline: Timeline,
    plan: ListSchedule,
    waiting: list[int],
    *,
    grow: bool = True,
    told: Callable[[CountChange], None] | None = None,
) -> None:
    """Do what the plan does now; jobs that start are taken out of `waiting`, which is in its order.

    `grow`: whether nothing else waits that is not in `waiting`.
    """
    works, rooms, caps, strict = problem.works, timeline.rooms, plan.caps, plan.strict
    k = 0
    while rooms.left and k < len(waiting):
        i = waiting[k]
        work, cap = works[i], caps[i]
        cap = work.fit[cap]
        gpus, hosts = rooms.pick(cap, work.nodes)
        if gpus < (cap if strict else work.least):
            k += 1
            continue
        gpus = work.fit[gpus]
        if told:
            told(CountChange(i, 0, gpus, hosts))
        timeline.start(i, gpus, hosts)
        del waiting[k]
    if rooms.left and grow and not waiting:
        _grow(problem, timeline, told)


def shrink(
    problem: Problem,
    timeline: Timeline,
    plan: ListSchedule,
    told: Callable[[CountChange], None] | None = None,
) -> None:
    """Take the running jobs down to their caps."""
    for i in problem.running:
        if plan.caps[i] < timeline.width[i] and timeline.resizable(i):
            gpus, hosts = problem.works[i].fit[plan.caps[i]], timeline.hosts[i]
            if told:
                told(CountChange(i, timeline.width[i], gpus, hosts))
            timeline.resize(i, gpus, hosts)


def _grow(problem: Problem, timeline: Timeline, told: Callable[[CountChange], None] | None) -> None:
    """The latest first: to the count that it ends soonest on."""
    started = inf
    works, rooms, ends = problem.works, timeline.rooms, timeline.ends
    for i in sorted(sorted(timeline.active), key=ends.__getitem__, reverse=True):
        work, width = works[i], timeline.width[i]
        if width >= work.most or not timeline.resizable(i):
            continue
        if timeline.begin(i) > timeline.now + SAME_TIME_S:
            started = min(started, timeline.begin(i))
            continue
        own = timeline.own(i)
        best, end = timeline.grown(i, min(work.most, rooms.most(work.nodes, own)))
        if end < ends[i] - MIN_REL_GAIN * abs(ends[i]):
            _, hosts = rooms.pick(best, work.nodes, own)
            if told:
                told(CountChange(i, width, best, hosts))
            timeline.resize(i, best, hosts)
            if not rooms.left:
                return
    if started < inf:
        timeline.look_at(started)


@dataclass(frozen=True, slots=True)
class FutureLimits:
    """The limits of a future that is worth following to its end.

    No job ends after its `latest` (run clock, by index), none after `by`, and the sum of all ends is at most
    `total_s` less `slope` times the makespan.
    """

    latest: Sequence[float] = ()
    by: float = inf
    total_s: float = inf
    slope: float = 0.0


def simulate(
    problem: Problem,
    plan: ListSchedule,
    limits: FutureLimits | None = None,
    begin: Timeline | None = None,
) -> Timeline | None:
    """The future under a list schedule; None as soon as it is clear that it is not within the limits.

    `begin` is a timeline of the problem in which nothing is decided yet; it stays as it is. For many
    schedules it is made once.
    """
    timeline = begin.copy() if begin else Timeline(problem)
    blocked = problem.blocked
    rank = {i: k for k, i in enumerate(plan.order)} if blocked else {}
    waiting = [i for i in plan.order if not problem.works[i].after] if blocked else list(plan.order)
    if len(problem.running):
        shrink(problem, timeline, plan)
    apply(problem, timeline, plan, waiting)
    limits = limits or FutureLimits([inf] * len(problem))
    latest, by, slope = limits.latest, limits.by, limits.slope
    total_s = limits.total_s + slope * problem.now
    left, ended_s, rooms = len(problem), 0.0, timeline.rooms
    while (happened := timeline.next()) is not None:
        i, free = happened
        if i >= 0:
            now = timeline.now
            left -= 1
            ended_s += now
            # The jobs that are left end now at the soonest.
            if now > latest[i] or now > by or ended_s + (left + slope) * now > total_s:
                return None
        if free:
            waiting = sorted([*waiting, *free], key=rank.__getitem__)
        if rooms.left:
            apply(problem, timeline, plan, waiting)
    return timeline
