"""List plans: jobs start in an order of their own, each on no more GPUs than its cap.

When nothing waits and GPUs are free, the job that would end last grows to where it ends soonest, if that
pays for its suspend and resume; a running job is never changed otherwise, except that a plan may begin with
shrinking some. A job that is still starting can not be suspended yet: the plan looks again when it has
started. This is the rule that a planner tries its plans by and the rule that it goes by: one code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from hpcsched.planning.jobs.problem import Outlook
from hpcsched.planning.jobs.timeline import Sketch

GAIN = 1e-9
"""A job grows only if it ends sooner by more than this share: rounding is no gain."""


MOMENT_S = 1e-6
"""Times this close together are the same."""


@dataclass(frozen=True, slots=True)
class ListPlan:
    """A list plan: `order` of the jobs that wait, `caps` of all jobs by index (see `Outlook`).

    A running job with a cap below its count shrinks to it at once. `strict`: a job waits for its whole cap.
    """

    order: tuple[int, ...]
    caps: tuple[int, ...]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan does with a job now: `old` is its count before (0: it waited)."""

    job: int
    old: int
    gpus: int
    hosts: tuple[str, ...]


def act(
    outlook: Outlook,
    sketch: Sketch,
    plan: ListPlan,
    waiting: list[int],
    *,
    grow: bool = True,
    told: Callable[[Change], None] | None = None,
) -> None:
    """Do what the plan does now; jobs that start are taken out of `waiting`, which is in its order.

    `grow`: whether nothing else waits that is not in `waiting`.
    """
    works, rooms, caps, strict = outlook.works, sketch.rooms, plan.caps, plan.strict
    k = 0
    while rooms.left and k < len(waiting):
        i = waiting[k]
        work, cap = works[i], caps[i]
        gpus, hosts = rooms.pick(cap, work.nodes)
        if gpus < (cap if strict else work.least):
            k += 1
            continue
        if told:
            told(Change(i, 0, gpus, hosts))
        sketch.start(i, gpus, hosts)
        del waiting[k]
    if rooms.left and grow and not waiting:
        _grow(outlook, sketch, told)


def shrink(
    outlook: Outlook, sketch: Sketch, plan: ListPlan, told: Callable[[Change], None] | None = None
) -> None:
    """Take the running jobs down to their caps."""
    for i in outlook.running:
        if plan.caps[i] < sketch.width[i] and sketch.resizable(i):
            gpus, hosts = plan.caps[i], sketch.hosts[i]
            if told:
                told(Change(i, sketch.width[i], gpus, hosts))
            sketch.resize(i, gpus, hosts)


def _grow(outlook: Outlook, sketch: Sketch, told: Callable[[Change], None] | None) -> None:
    """The latest first: to the count that it ends soonest on."""
    started = inf
    works, rooms, ends = outlook.works, sketch.rooms, sketch.ends
    for i in sorted(sorted(sketch.active), key=ends.__getitem__, reverse=True):
        work, width = works[i], sketch.width[i]
        if width >= work.most or not sketch.resizable(i):
            continue
        if sketch.begin(i) > sketch.now + MOMENT_S:
            started = min(started, sketch.begin(i))
            continue
        own = sketch.own(i)
        best, end = sketch.grown(i, min(work.most, rooms.most(work.nodes, own)))
        if end < ends[i] - GAIN * abs(ends[i]):
            _, hosts = rooms.pick(best, work.nodes, own)
            if told:
                told(Change(i, width, best, hosts))
            sketch.resize(i, best, hosts)
            if not rooms.left:
                return
    if started < inf:
        sketch.look_at(started)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a future must keep to be worth following to its end.

    No job ends after its `latest` (run clock, by index), none after `by`, and the sum of all ends is at most
    `total_s` less `slope` times the makespan.
    """

    latest: Sequence[float] = ()
    by: float = inf
    total_s: float = inf
    slope: float = 0.0


def follow(outlook: Outlook, plan: ListPlan, limits: Limits | None = None) -> Sketch | None:
    """The future under a list plan; None as soon as it is clear that it is not within the limits."""
    sketch, blocked = outlook.sketch(), outlook.blocked
    rank = {i: k for k, i in enumerate(plan.order)} if blocked else {}
    waiting = [i for i in plan.order if not outlook.works[i].after] if blocked else list(plan.order)
    if len(outlook.running):
        shrink(outlook, sketch, plan)
    act(outlook, sketch, plan, waiting)
    limits = limits or Limits([inf] * len(outlook))
    latest, by, slope = limits.latest, limits.by, limits.slope
    total_s = limits.total_s + slope * outlook.now
    left, ended_s, rooms = len(outlook), 0.0, sketch.rooms
    while (happened := sketch.next()) is not None:
        i, free = happened
        if i >= 0:
            now = sketch.now
            left -= 1
            ended_s += now
            # The jobs that are left end now at the soonest.
            if now > latest[i] or now > by or ended_s + (left + slope) * now > total_s:
                return None
        if free:
            waiting = sorted([*waiting, *free], key=rank.__getitem__)
        if rooms.left:
            act(outlook, sketch, plan, waiting)
    return sketch
