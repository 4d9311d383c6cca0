"""Stage schedules: the allocation patterns of the configuration LP, one after the other.

In each stage certain jobs run on certain counts and all others wait; from stage to stage jobs are suspended,
resized and resumed. That comes closest to the LP's bound where jobs are long against what this costs. As
with list schedules (`planning.jobs.list_schedules`), one rule is what plans are tried by and what is gone by.
What is left after the last stage is done by the list rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from hpcsched.planning.jobs.configuration_lp import LpSolution, Pattern, configuration_lp
from hpcsched.planning.jobs.list_schedules import SAME_TIME_S, CountChange, ListSchedule, apply
from hpcsched.planning.jobs.problem import Problem, Work
from hpcsched.planning.jobs.search import MIN_ABS_GAIN, ScheduleSearch, measure, value
from hpcsched.planning.jobs.timeline import Timeline

MAX_LP_JOBS = 40
"""The most jobs that the LP is solved for: it takes about a second then."""

MAX_LP_ITERATIONS = 60
"""Iterations of its column generation, at most (chosen): close enough to the optimum, in half the time."""

MIN_BOUND_IN_SWITCHES = 20.0
"""The least bound for which stages are tried, in times of the costliest switch (chosen)."""

MIN_REL_GAP = 0.005
"""The least gap between the best plan so far and the bound, as a share, for which stages are tried
(chosen)."""

MAX_SEQUENCES = 12
"""Sequences of the patterns that are tried, at most (chosen): each begins with another one."""

MAKESPAN_STRETCHES, LPS_A_STRETCH = (1.02, 1.05, 1.1), 3
"""Where jobs have a latest end: the makespans over the bound that are asked for, and the LPs that are solved
for each (chosen)."""

STAGE_END_LAG_S = SAME_TIME_S / 2
"""The time after a stage's end at which it is looked at: after all jobs that end with it."""

_Timed = tuple[float, Pattern]
"""For so many seconds these counts."""


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """Stages as (until, GPU counts by job), `until` in seconds of the run's clock.

    `rest` is how what is left is done.
    """

    stages: tuple[_Timed, ...]
    rest: ListSchedule


class StagedTimeline(Timeline):
    """A future in which jobs may be set aside: `paused` says when they have left."""

    __slots__ = ("paused",)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
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
        """The time at which a running job will have done so many steps in all, if nothing changes."""
        return self._begin[i] + (steps - self._step[i]) / self._works[i].rate[self.width[i]]

    def needs_s(self, i: int, steps: float, gpus: int) -> float:
        """Seconds of training that a job needs on a count to have done so many steps in all."""
        done = self.step_of(i) if self.width[i] else self._step[i]
        return (steps - done) / self._works[i].rate[gpus]

    def waiting(self, order: Sequence[int]) -> list[int]:
        """The jobs among these that could be started now."""
        return [
            i
            for i in order
            if i not in self.active and self.ends[i] == inf and self.paused.get(i, -inf) <= self.now
        ]


def apply_stage(
    problem: Problem,
    timeline: StagedTimeline,
    counts: Pattern,
    waiting: Sequence[int],
    told: Callable[[CountChange], None] | None = None,
) -> bool:
    """Do what can be done now to bring the jobs to the counts of a stage; whether all is as it should be.

    A job that is still starting is changed when it has started: the timeline looks again then. One that is
    about to end is let end: what really happens is never exactly as planned.
    """
    works, rooms, now = problem.works, timeline.rooms, timeline.now
    ready, started = True, inf

    def movable(i: int) -> bool:
        nonlocal started
        if timeline.begin(i) > now + SAME_TIME_S:
            started = min(started, timeline.begin(i))
            return False
        return timeline.resizable(i)

    for i in sorted(timeline.active, key=lambda i: works[i].job.id):
        width, goal = timeline.width[i], counts.get(i, 0)
        if goal >= width:
            continue
        ready = False
        if not movable(i) or timeline.ends[i] - now <= works[i].save_s + works[i].resume_s[width]:
            continue  # what it has left takes no longer than to come back for it
        if told:
            told(CountChange(i, width, goal, timeline.hosts[i] if goal else ()))
        if goal:
            timeline.resize(i, goal, timeline.hosts[i])
        else:
            timeline.preempt(i)
    for i, goal in counts.items():
        if i in timeline.active:
            width, own = timeline.width[i], timeline.own(i)
            if width >= goal:
                continue
            ready = False
            if movable(i) and rooms.most(works[i].nodes, own) >= goal:
                _, hosts = rooms.pick(goal, works[i].nodes, own)
                if told:
                    told(CountChange(i, width, goal, hosts))
                timeline.resize(i, goal, hosts)
        elif i in waiting:
            gpus, hosts = rooms.pick(goal, works[i].nodes)
            if gpus < goal:
                ready = False
                continue
            if told:
                told(CountChange(i, 0, goal, hosts))
            timeline.start(i, goal, hosts)
        elif timeline.ends[i] == inf:
            ready = False
    if started < inf:
        timeline.look_at(started)
    return ready


def best_stages(search: ScheduleSearch) -> tuple[StageSchedule, StagedTimeline] | None:
    """The best stage plan within the limits of a search, if it is better than what that has found.

    There is none where patterns are no use: several hosts, jobs that wait for others, of unknown work or
    that cannot be suspended now, costly switches, a plan that is close to the bound already; and without
    scipy.
    """
    problem, works = search.problem, search.problem.works
    base = value(search.goal, search.base, search.base)
    least, found_s = base, search.base.makespan_s
    if search.timeline and search.best < base:
        least, found_s = search.best, measure(problem, search.timeline).makespan_s
    if (
        not _of_use(problem)
        or not MIN_BOUND_IN_SWITCHES * _switch_s(problem) <= found_s <= problem.view.left_s
    ):
        return None
    last = sorted((*problem.waiting, *problem.running), key=lambda i: (search.latest[i], i))
    rest = ListSchedule(tuple(last), tuple(work.optimal for work in works))
    best = None

    def late_s(order: Sequence[_Timed]) -> list[float]:
        """Try it: how much too late each job ends."""
        nonlocal least, best
        plan, timeline = try_stages(problem, order, rest)
        search.tried += 1
        late = [max(0.0, end - at) for end, at in zip(timeline.ends, search.latest, strict=True)]
        worth = value(search.goal, measure(problem, timeline), search.base)
        if worth < least - MIN_ABS_GAIN and not any(late) and max(timeline.ends) <= search.by:
            least, best = worth, (plan, timeline)
        return late

    with contextlib.suppress(ImportError):  # without scipy there are no patterns
        _try_orders(problem, search.latest, found_s, late_s)
    return best


def _of_use(problem: Problem) -> bool:
    works = problem.works
    return (
        len(problem.view.capacity.by_host()) == 1
        and len(works) <= MAX_LP_JOBS
        and not len(problem.blocked)
        and not problem.leaving
        and all(
            work.known and work.nodes == 1 and work.steps > work.step and not work.rigid for work in works
        )
        and all(works[i].resizable for i in problem.running)
    )


def _try_orders(
    problem: Problem,
    latest: Sequence[float],
    found_s: float,
    late_s: Callable[[Sequence[_Timed]], list[float]],
) -> None:
    """Try patterns that do all work in less than `found_s` seconds, in orders worth it."""
    works = problem.works
    (gpus,) = problem.view.capacity.by_host().values()
    times = [_times(work) for work in works]
    found = configuration_lp(times, gpus, iterations=MAX_LP_ITERATIONS)
    if found.bound_s * (1 + MIN_REL_GAP) > found_s:
        return
    patterns = [timed for timed in found.patterns if timed[0] > SAME_TIME_S]
    now = {i: works[i].width for i in problem.running}
    first = sorted(range(len(patterns)), key=lambda k: (-_kept(now, patterns[k][1]), k))
    for k in first[:MAX_SEQUENCES]:
        rest = [*patterns[:k], *patterns[k + 1 :]]
        late_s([patterns[k], *_alike(rest, patterns[k][1])])
    # With time reversed, the latest that a job may end is a release. The LP knows of no switches: a job that
    # is late because of them has to end sooner by it in the next round.
    for stretch in MAKESPAN_STRETCHES:
        by_s = found.bound_s * stretch
        due_s = [at - problem.now for at in latest]
        for _ in range(LPS_A_STRETCH):
            release_s = [max(0.0, by_s - due) for due in due_s]
            if by_s >= found_s or not any(release_s):
                return
            timely = configuration_lp(times, gpus, release_s=release_s, iterations=MAX_LP_ITERATIONS)
            if timely.bound_s > by_s:
                break
            late = late_s(list(_reversed(timely, now)))
            if not any(late):
                return
            due_s = [due - over for due, over in zip(due_s, late, strict=True)]


def _reversed(found: LpSolution, now: Pattern) -> Iterator[_Timed]:
    """The patterns from the last to the first; those between the same releases in any order."""
    last = now
    for _, group in groupby(reversed(range(len(found.patterns))), key=lambda k: found.after[k]):
        for timed in _alike([found.patterns[k] for k in group], last):
            last = timed[1]
            if timed[0] > SAME_TIME_S:
                yield timed


def _alike(patterns: Sequence[_Timed], last: Pattern) -> Iterator[_Timed]:
    """In an order with few changes from one to the next."""
    left = list(patterns)
    while left:
        nearest = max(range(len(left)), key=lambda j: (_kept(last, left[j][1]), left[j][0], -j))
        yield left[nearest]
        last = left.pop(nearest)[1]


def _switch_s(problem: Problem) -> float:
    """What the costliest suspend and resume takes."""
    return max(work.save_s + max(work.resume_s[work.least :]) for work in problem.works)


def _times(work: Work) -> dict[int, float]:
    """Seconds to a job's end by count: for one that runs, with a switch unless it is the count it has."""
    counts = [g for g in range(work.least, work.most + 1) if work.fit[g] == g]
    if not work.width:
        return {g: work.whole_s[g] for g in counts}
    left = work.steps - work.step
    switch_s = {g: 0.0 if g == work.width else work.switch_s(work.width, g) for g in range(1, work.most + 1)}
    return {g: switch_s[g] + left / work.rate[g] for g in counts}


def _kept(before: Pattern, after: Pattern) -> int:
    """GPUs that stay with their jobs."""
    return sum(gpus for i, gpus in after.items() if before.get(i) == gpus)


def try_stages(
    problem: Problem, order: Sequence[_Timed], rest: ListSchedule
) -> tuple[StageSchedule, StagedTimeline]:
    """The future under stages in this order, each until its jobs are where they should be.

    In a stage of the LP a job does a certain share of its work; what it does beyond that, while others are
    suspended and resumed, it need not do later.
    """
    works, timeline = problem.works, StagedTimeline(problem)
    switch_s, times = _switch_s(problem), [_times(work) for work in problem.works]
    due = [float(work.step) for work in works]
    stages = []
    for seconds, counts in order:
        for i, gpus in counts.items():
            share = seconds / times[i][gpus]
            due[i] += share * (works[i].steps - works[i].step)
            if due[i] > works[i].steps - 1:
                due[i] = works[i].steps
        needs = {i: timeline.needs_s(i, due[i], gpus) for i, gpus in counts.items()}
        if all(n <= (0.0 if due[i] == works[i].steps else switch_s) for i, n in needs.items()):
            continue  # not worth it
        while True:
            ready = apply_stage(problem, timeline, counts, timeline.waiting(rest.order))
            until = max((timeline.reaches(i, due[i]) for i in counts if i in timeline.active), default=-inf)
            if ready and until <= timeline.now + SAME_TIME_S:
                break
            if ready and not timeline.now < timeline.looks_at < until + STAGE_END_LAG_S:
                timeline.look_at(until + STAGE_END_LAG_S)
            if timeline.next() is None:
                break
        stages.append((timeline.now, counts))
    while True:
        leaving = any(at > timeline.now for at in timeline.paused.values())
        apply(problem, timeline, rest, timeline.waiting(rest.order), grow=not leaving)
        if timeline.next() is None:
            return StageSchedule(tuple(stages), rest), timeline


def stage_at(stages: Sequence[tuple[float, Mapping[int, int]]], now: float) -> int | None:
    """Which stage it is now; None after the last."""
    return next((k for k, (until, _) in enumerate(stages) if until > now + SAME_TIME_S), None)
