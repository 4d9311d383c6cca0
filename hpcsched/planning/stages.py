"""Stage plans: the allocation patterns of the configuration LP, one after the other.

In each stage certain jobs run on certain counts and all others wait; from stage to stage jobs are suspended,
resized and resumed. That comes closest to the LP's bound where jobs are long against what this costs. As
with list plans (`planning.lists`), one rule is both what plans are tried by and what is gone by. What is
left after the last stage is done by the list rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from hpcsched.planning.lists import MOMENT_S, Change, ListPlan, act
from hpcsched.planning.outlook import Outlook
from hpcsched.planning.patterns import Pattern, configuration_lp
from hpcsched.planning.sketch import Sketch

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


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages as (until, GPU counts by job), `until` in seconds of the run's clock.

    `rest` is how what is left is done.
    """

    stages: tuple[tuple[float, Pattern], ...]
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

    A job that is still starting is changed when it has started: the sketch looks again then.
    """
    works, rooms, now = outlook.works, sketch.rooms, sketch.now
    ready, started = True, inf

    def movable(i: int) -> bool:
        nonlocal started
        if sketch.begin(i) > now + MOMENT_S:
            started = min(started, sketch.begin(i))
            return False
        return sketch.resizable(i)

    for i in list(sketch.active):
        width, goal = sketch.width[i], counts.get(i, 0)
        if goal >= width:
            continue
        ready = False
        if not movable(i):
            continue
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


def sequences(outlook: Outlook, least_s: float) -> Iterator[list[tuple[float, Pattern]]]:
    """Orders of the LP's patterns, as (seconds, counts), with few changes from one to the next.

    There are none where patterns are no use: several hosts, jobs that wait for others, of unknown work or
    that cannot be suspended now; if switches cost too much, or `least_s` seconds, the best so far, is close
    to the bound.
    Raises ImportError without scipy.
    """
    works, capacity = outlook.works, outlook.view.capacity.by_host()
    if len(capacity) != 1 or len(works) > MOST_JOBS or len(outlook.blocked) or outlook.leaving:
        return
    if not all(work.known and work.nodes == 1 and work.steps > work.step for work in works):
        return
    if not all(works[i].resizable for i in outlook.running):
        return
    if least_s < LONG * _switch_s(outlook):
        return
    (gpus,) = capacity.values()
    times = [_times(outlook, i) for i in range(len(works))]
    found = configuration_lp(times, gpus, iterations=ITERATIONS)
    if found.bound_s * (1 + WORTH) > least_s:
        return
    patterns = [(seconds, pattern) for seconds, pattern in found.patterns if seconds > MOMENT_S]
    now = {i: works[i].width for i in outlook.running}
    first = sorted(range(len(patterns)), key=lambda k: (-_kept(now, patterns[k][1]), k))
    for k in first[:STARTS]:
        order, left = [patterns[k]], [p for j, p in enumerate(patterns) if j != k]
        while left:
            last = order[-1][1]
            nearest = max(range(len(left)), key=lambda j: (_kept(last, left[j][1]), left[j][0], -j))
            order.append(left.pop(nearest))
        yield order


def _switch_s(outlook: Outlook) -> float:
    """What the costliest suspend and resume takes."""
    return max(work.save_s + max(work.resume_s[work.least :]) for work in outlook.works)


def _times(outlook: Outlook, i: int) -> dict[int, float]:
    """Seconds to a job's end by count: for one that runs, nothing for the count it has."""
    work = outlook.works[i]
    if not work.width:
        return {g: work.whole_s[g] for g in range(work.least, work.most + 1)}
    left = work.steps - work.step
    switch_s = {
        g: 0.0 if g == work.width else work.save_s + work.resume_s[g] for g in range(1, work.most + 1)
    }
    return {g: switch_s[g] + left / work.rate[g] for g in range(work.least, work.most + 1)}


def _kept(before: Pattern, after: Pattern) -> int:
    """GPUs that stay with their jobs."""
    return sum(gpus for i, gpus in after.items() if before.get(i) == gpus)


def try_stages(
    outlook: Outlook, order: Sequence[tuple[float, Pattern]], rest: ListPlan
) -> tuple[StagePlan, StagedSketch]:
    """The future under stages in this order, each until its jobs are where they should be.

    In a stage of the LP a job does a certain share of its work; what it does beyond that, while others are
    suspended and resumed, it need not do later.
    """
    works, sketch = outlook.works, StagedSketch(outlook)
    switch_s = _switch_s(outlook)
    jobs = [*rest.order, *outlook.running]
    due = [float(work.step) for work in works]
    stages = []
    for seconds, counts in order:
        for i, gpus in counts.items():
            share = seconds / _times(outlook, i)[gpus]
            due[i] = min(due[i] + share * (works[i].steps - works[i].step), works[i].steps)
        if all(sketch.needs_s(i, due[i], gpus) <= switch_s for i, gpus in counts.items()):
            continue  # not worth it
        while True:
            ready = act_stage(outlook, sketch, counts, sketch.waiting(jobs))
            until = max((sketch.reaches(i, due[i]) for i in counts if i in sketch.active), default=-inf)
            if ready and until <= sketch.now + MOMENT_S:
                break
            if ready and not sketch.now < sketch.looks_at < until:
                sketch.look_at(until)
            if sketch.next() is None:
                break
        stages.append((sketch.now, counts))
    while True:
        act(outlook, sketch, rest, sketch.waiting(jobs), grow=not sketch.paused)
        if sketch.next() is None:
            return StagePlan(tuple(stages), rest), sketch


def stage_at(stages: Sequence[tuple[float, Mapping[int, int]]], now: float) -> int | None:
    """Which stage it is now; None after the last."""
    return next((k for k, (until, _) in enumerate(stages) if until > now + MOMENT_S), None)
