"""Stage plans: the allocation patterns of the configuration LP, one after the other.

In each stage certain jobs run on certain counts and all others wait; from stage to stage jobs are suspended,
resized and resumed. That comes closest to the LP's bound where jobs are long against what this costs. As
with list plans (`planning.jobs.list_schedules`), one rule is both what plans are tried by and what is gone
by. What is left after the last stage is done by the list rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from hpcsched.planning.jobs.configuration_lp import Pattern, Patterns, configuration_lp
from hpcsched.planning.jobs.list_schedules import MOMENT_S, Change, ListPlan, act
from hpcsched.planning.jobs.problem import Outlook, Work
from hpcsched.planning.jobs.search import ROUNDING, Search, measure, value
from hpcsched.planning.jobs.timeline import Sketch

MOST_JOBS = 40
"""The LP is solved for no more: it takes about a second then."""

ITERATIONS = 60
"""Of its column generation: close enough to the optimum, in half the time."""

LONG = 20.0
"""The bound has to be so many times what the costliest switch takes, or patterns are not tried."""

WORTH = 0.005
"""Nor if the best plan so far is this close to the bound."""

STARTS = 12
"""Sequences of the patterns that are tried: each begins with another one."""

STRETCHES, ROUNDS = (1.02, 1.05, 1.1), 3
"""Where jobs have a latest end: makespans over the bound that are asked for, and LPs solved for each."""

AFTER_S = MOMENT_S / 2
"""A stage's end is looked at so much later: after all jobs that end with it."""

_Timed = tuple[float, Pattern]
"""For so many seconds these counts."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages as (until, GPU counts by job), `until` in seconds of the run's clock.

    `rest` is how what is left is done.
    """

    stages: tuple[_Timed, ...]
    rest: ListPlan


class StagedSketch(Sketch):
    """A future in which jobs may be set aside: `paused` says when they have left."""

    __slots__ = ("paused",)

    def __init__(self, outlook: Outlook) -> None:
        super().__init__(outlook)
        self.paused: dict[int, float] = {}

    def preempt(self, i: int) -> None:
        """Suspend a running job, and let it wait from when it has left; in its last step it ends instead."""
        free_s, step = self._saved(i)
        if step >= self._works[i].steps:
            return
        self._step[i], self._tickets[i], self.ends[i] = step, 0, inf
        self._give_back(free_s, self.hosts[i], self.width[i])
        self.width[i], self.paused[i] = 0, free_s
        del self.active[i]

    def start(self, i: int, gpus: int, hosts: tuple[str, ...]) -> None:
        """Launch a waiting job, or go on with one that was set aside."""
        if i not in self.paused:
            super().start(i, gpus, hosts)
            return
        del self.paused[i]
        work = self._works[i]
        self.rooms.take(hosts, gpus)
        self.width[i], self.hosts[i], self.active[i] = gpus, hosts, None
        self._begin[i] = self.now + work.resume_s[gpus]
        self._end(i, self._begin[i] + (work.steps - self._step[i]) / work.rate[gpus])

    def reaches(self, i: int, steps: float) -> float:
        """When a running job will have done so many steps in all, if nothing changes."""
        return self._begin[i] + (steps - self._step[i]) / self._works[i].rate[self.width[i]]

    def needs_s(self, i: int, steps: float, gpus: int) -> float:
        """Seconds of training that a job needs on a count to have done so many steps in all."""
        done = self.step_of(i) if self.width[i] else self._step[i]
        return (steps - done) / self._works[i].rate[gpus]

    def waiting(self, order: Sequence[int]) -> list[int]:
        """Those of these jobs that could be started now."""
        return [
            i
            for i in order
            if i not in self.active and self.ends[i] == inf and self.paused.get(i, -inf) <= self.now
        ]


def act_stage(
    outlook: Outlook,
    sketch: StagedSketch,
    counts: Pattern,
    waiting: Sequence[int],
    told: Callable[[Change], None] | None = None,
) -> bool:
    """Do what can be done now to bring the jobs to the counts of a stage; whether all is as it should be.

    A job that is still starting is changed when it has started: the sketch looks again then. One that is
    about to end is let end: what really happens is never exactly as planned.
    """
    works, rooms, now = outlook.works, sketch.rooms, sketch.now
    ready, started = True, inf

    def movable(i: int) -> bool:
        nonlocal started
        if sketch.begin(i) > now + MOMENT_S:
            started = min(started, sketch.begin(i))
            return False
        return sketch.resizable(i)

    for i in sorted(sketch.active, key=lambda i: works[i].job.id):
        width, goal = sketch.width[i], counts.get(i, 0)
        if goal >= width:
            continue
        ready = False
        if not movable(i) or sketch.ends[i] - now <= works[i].save_s + works[i].resume_s[width]:
            continue  # what it has left takes no longer than to come back for it
        if told:
            told(Change(i, width, goal, sketch.hosts[i] if goal else ()))
        if goal:
            sketch.resize(i, goal, sketch.hosts[i])
        else:
            sketch.preempt(i)
    for i, goal in counts.items():
        if i in sketch.active:
            width, own = sketch.width[i], sketch.own(i)
            if width >= goal:
                continue
            ready = False
            if movable(i) and rooms.most(works[i].nodes, own) >= goal:
                _, hosts = rooms.pick(goal, works[i].nodes, own)
                if told:
                    told(Change(i, width, goal, hosts))
                sketch.resize(i, goal, hosts)
        elif i in waiting:
            gpus, hosts = rooms.pick(goal, works[i].nodes)
            if gpus < goal:
                ready = False
                continue
            if told:
                told(Change(i, 0, goal, hosts))
            sketch.start(i, goal, hosts)
        elif sketch.ends[i] == inf:
            ready = False
    if started < inf:
        sketch.look_at(started)
    return ready


def best_stages(search: Search) -> tuple[StagePlan, StagedSketch] | None:
    """The best stage plan within the limits of a search, if it is better than what that has found.

    There is none where patterns are no use: several hosts, jobs that wait for others, of unknown work or
    that cannot be suspended now, costly switches, a plan that is close to the bound already; and without
    scipy.
    """
    outlook, works = search.outlook, search.outlook.works
    base = value(search.goal, search.base, search.base)
    least, found_s = base, search.base.makespan_s
    if search.sketch and search.best < base:
        least, found_s = search.best, measure(outlook, search.sketch).makespan_s
    if not _of_use(outlook) or not LONG * _switch_s(outlook) <= found_s <= outlook.view.left_s:
        return None
    last = sorted((*outlook.waiting, *outlook.running), key=lambda i: (search.latest[i], i))
    rest = ListPlan(tuple(last), tuple(work.optimal for work in works))
    best = None

    def late_s(order: Sequence[_Timed]) -> list[float]:
        """Try it: how much too late each job ends."""
        nonlocal least, best
        plan, sketch = try_stages(outlook, order, rest)
        search.tried += 1
        late = [max(0.0, end - at) for end, at in zip(sketch.ends, search.latest, strict=True)]
        worth = value(search.goal, measure(outlook, sketch), search.base)
        if worth < least - ROUNDING and not any(late) and max(sketch.ends) <= search.by:
            least, best = worth, (plan, sketch)
        return late

    with contextlib.suppress(ImportError):  # without scipy there are no patterns
        _try_orders(outlook, search.latest, found_s, late_s)
    return best


def _of_use(outlook: Outlook) -> bool:
    works = outlook.works
    return (
        len(outlook.view.capacity.by_host()) == 1
        and len(works) <= MOST_JOBS
        and not len(outlook.blocked)
        and not outlook.leaving
        and all(work.known and work.nodes == 1 and work.steps > work.step for work in works)
        and all(works[i].resizable for i in outlook.running)
    )


def _try_orders(
    outlook: Outlook,
    latest: Sequence[float],
    found_s: float,
    late_s: Callable[[Sequence[_Timed]], list[float]],
) -> None:
    """Try patterns that do all work in less than `found_s` seconds, in orders worth it."""
    works = outlook.works
    (gpus,) = outlook.view.capacity.by_host().values()
    times = [_times(work) for work in works]
    found = configuration_lp(times, gpus, iterations=ITERATIONS)
    if found.bound_s * (1 + WORTH) > found_s:
        return
    patterns = [timed for timed in found.patterns if timed[0] > MOMENT_S]
    now = {i: works[i].width for i in outlook.running}
    first = sorted(range(len(patterns)), key=lambda k: (-_kept(now, patterns[k][1]), k))
    for k in first[:STARTS]:
        rest = [*patterns[:k], *patterns[k + 1 :]]
        late_s([patterns[k], *_alike(rest, patterns[k][1])])
    # With time reversed, the latest that a job may end is a release. The LP knows of no switches: a job that
    # is late because of them has to end sooner by it in the next round.
    for stretch in STRETCHES:
        by_s = found.bound_s * stretch
        due_s = [at - outlook.now for at in latest]
        for _ in range(ROUNDS):
            release_s = [max(0.0, by_s - due) for due in due_s]
            if by_s >= found_s or not any(release_s):
                return
            timely = configuration_lp(times, gpus, release_s=release_s, iterations=ITERATIONS)
            if timely.bound_s > by_s:
                break
            late = late_s(list(_reversed(timely, now)))
            if not any(late):
                return
            due_s = [due - over for due, over in zip(due_s, late, strict=True)]


def _reversed(found: Patterns, now: Pattern) -> Iterator[_Timed]:
    """The patterns from the last to the first; those between the same releases in any order."""
    last = now
    for _, group in groupby(reversed(range(len(found.patterns))), key=lambda k: found.after[k]):
        for timed in _alike([found.patterns[k] for k in group], last):
            last = timed[1]
            if timed[0] > MOMENT_S:
                yield timed


def _alike(patterns: Sequence[_Timed], last: Pattern) -> Iterator[_Timed]:
    """In an order with few changes from one to the next."""
    left = list(patterns)
    while left:
        nearest = max(range(len(left)), key=lambda j: (_kept(last, left[j][1]), left[j][0], -j))
        yield left[nearest]
        last = left.pop(nearest)[1]


def _switch_s(outlook: Outlook) -> float:
    """What the costliest suspend and resume takes."""
    return max(work.save_s + max(work.resume_s[work.least :]) for work in outlook.works)


def _times(work: Work) -> dict[int, float]:
    """Seconds to a job's end by count: for one that runs, with a switch unless it is the count it has."""
    if not work.width:
        return {g: work.whole_s[g] for g in range(work.least, work.most + 1)}
    left = work.steps - work.step
    switch_s = {g: 0.0 if g == work.width else work.switch_s(work.width, g) for g in range(1, work.most + 1)}
    return {g: switch_s[g] + left / work.rate[g] for g in range(work.least, work.most + 1)}


def _kept(before: Pattern, after: Pattern) -> int:
    """GPUs that stay with their jobs."""
    return sum(gpus for i, gpus in after.items() if before.get(i) == gpus)


def try_stages(outlook: Outlook, order: Sequence[_Timed], rest: ListPlan) -> tuple[StagePlan, StagedSketch]:
    """The future under stages in this order, each until its jobs are where they should be.

    In a stage of the LP a job does a certain share of its work; what it does beyond that, while others are
    suspended and resumed, it need not do later.
    """
    works, sketch = outlook.works, StagedSketch(outlook)
    switch_s, times = _switch_s(outlook), [_times(work) for work in outlook.works]
    due = [float(work.step) for work in works]
    stages = []
    for seconds, counts in order:
        for i, gpus in counts.items():
            share = seconds / times[i][gpus]
            due[i] += share * (works[i].steps - works[i].step)
            if due[i] > works[i].steps - 1:
                due[i] = works[i].steps
        needs = {i: sketch.needs_s(i, due[i], gpus) for i, gpus in counts.items()}
        if all(n <= (0.0 if due[i] == works[i].steps else switch_s) for i, n in needs.items()):
            continue  # not worth it
        while True:
            ready = act_stage(outlook, sketch, counts, sketch.waiting(rest.order))
            until = max((sketch.reaches(i, due[i]) for i in counts if i in sketch.active), default=-inf)
            if ready and until <= sketch.now + MOMENT_S:
                break
            if ready and not sketch.now < sketch.looks_at < until + AFTER_S:
                sketch.look_at(until + AFTER_S)
            if sketch.next() is None:
                break
        stages.append((sketch.now, counts))
    while True:
        leaving = any(at > sketch.now for at in sketch.paused.values())
        act(outlook, sketch, rest, sketch.waiting(rest.order), grow=not leaving)
        if sketch.next() is None:
            return StagePlan(tuple(stages), rest), sketch


def stage_at(stages: Sequence[tuple[float, Mapping[int, int]]], now: float) -> int | None:
    """Which stage it is now; None after the last."""
    return next((k for k, (until, _) in enumerate(stages) if until > now + MOMENT_S), None)
