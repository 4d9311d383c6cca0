"""The search for a list schedule: a portfolio of orders and caps, then hill climbing.

The effort is counted in timelines tried, not in seconds: the same state and seed give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from hpcsched.planning.jobs.list_schedules import FutureLimits, ListSchedule, simulate
from hpcsched.planning.jobs.problem import Problem, Work
from hpcsched.planning.jobs.timeline import Timeline

KNEE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""The shares of a job's fastest rate that caps of the portfolio keep, each on the smallest count (chosen)."""

DUAL_HALVINGS = 20
"""Halvings of the bisection for the dual caps: the makespan to a millionth."""

MIN_ABS_GAIN = 1e-9
"""The least gain of a value that counts: less is rounding. Values are near 1."""

MAKESPAN_WEIGHT = 3.0
"""The weight of a share of the makespan against one of the mean completion time, where both are the goal
(chosen)."""

TIE_WEIGHT = 1e-3
"""The weight of the measure that is not the goal: it breaks ties (chosen)."""

CAP_CHANGE_SHARE, MOVE_CHANGE_SHARE = 0.3, 0.5
"""How often a change is to a cap, and how often to one job's place; the rest swaps two jobs (chosen)."""

MAX_RETRIED_CHANGES = 8
"""Further changes of a plan that was tried before, at most (chosen): of few jobs' plans all that are near are
soon known."""

MAX_REL_LOSS = 5e-4
"""The share of the best by which a plan may be worse at first and still be gone on from (chosen): a way out
of plans that no single change betters. It shrinks to nothing as the budget is spent."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives of a future: seconds until all is done, and the mean time from submission to end."""

    makespan_s: float
    mean_jct_s: float


def measure(problem: Problem, timeline: Timeline) -> Objectives:
    """The measures of one future of all its jobs."""
    total = sum(timeline.ends) - problem.submitted_s
    return Objectives(max(timeline.ends) - problem.now, total / len(problem))


def weights(goal: str, base: Objectives) -> tuple[float, float]:
    """The weights of a second of makespan and of mean completion time; where only one is the goal, the other
    breaks ties."""
    makespan, jct = {"both": (MAKESPAN_WEIGHT, 1.0), "makespan": (1.0, TIE_WEIGHT), "jct": (TIE_WEIGHT, 1.0)}[
        goal
    ]
    return makespan / (base.makespan_s or 1.0), jct / (base.mean_jct_s or 1.0)


def value(goal: str, found: Objectives, base: Objectives) -> float:
    """The value to minimise, relative to the baseline."""
    makespan, jct = weights(goal, base)
    return makespan * found.makespan_s + jct * found.mean_jct_s


@dataclass(slots=True)
class ScheduleSearch:
    """The search for the best list schedule within limits.

    `latest[i]` is when job i has to end, `by` when all has; `base` are the baseline's measures.
    `budget` futures are tried in hill climbing, besides the portfolio.
    """

    problem: Problem
    latest: Sequence[float]
    by: float
    base: Objectives
    goal: str
    budget: int
    seed: int
    plan: ListSchedule | None = None
    timeline: Timeline | None = None
    best: float = inf
    what: str = ""
    tried: int = 0
    _seen: set[ListSchedule] = field(default_factory=set)
    _begin: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self._begin = Timeline(self.problem)

    def run(self, known: Sequence[ListSchedule] = ()) -> None:
        """Try the `known` plans, the portfolio, and changes to the best of them."""
        for plan in known:
            self._try(plan, "the plan so far", self.best)
        for plan, what in portfolio(self.problem):
            self._try(plan, what, self.best)
        self._climb()

    def _try(self, plan: ListSchedule, what: str, least: float) -> float:
        """A plan's worth if it is below `least` and the plan was not tried before, else infinity."""
        if plan in self._seen:
            return inf
        self._seen.add(plan)
        self.tried += 1
        # Only what can be good enough is followed to its end.
        makespan, jct = weights(self.goal, self.base)
        per_jct = len(self.problem) / jct
        total_s = least * per_jct + self.problem.submitted_s
        limits = FutureLimits(self.latest, self.by, total_s, makespan * per_jct)
        timeline = simulate(self.problem, plan, limits, self._begin)
        if timeline is None:
            return inf
        worth = value(self.goal, measure(self.problem, timeline), self.base)
        if worth < self.best - MIN_ABS_GAIN:
            self.plan, self.timeline, self.best, self.what = plan, timeline, worth, what
        return worth if worth < least else inf

    def _climb(self) -> None:
        """Change the plan again and again, going on from what is better or hardly worse."""
        if self.plan is None or not self.plan.order:
            return
        ranges = [(work.least, work.optimal) for work in self.problem.works]
        random, what = Random(self.seed), self.what
        plan, worth, first, begun = self.plan, self.best, self.best, self.tried
        for _ in range(self.budget):
            left = 1 - (self.tried - begun) / self.budget
            changed = plan
            for _ in range(MAX_RETRIED_CHANGES):
                changed = _changed(changed, ranges, random)
                if changed not in self._seen:
                    break
            found = self._try(changed, what, worth + MAX_REL_LOSS * left * self.best)
            if found < inf:
                plan, worth = changed, found
        if self.best < first:
            self.what = f"{what}, bettered by {1 - self.best / first:.1%}"


def _changed(plan: ListSchedule, ranges: Sequence[tuple[int, int]], random: Random) -> ListSchedule:
    """A neighbour: one job with another cap in its range, or a job moved, or two swapped."""
    order, kind = plan.order, random.random()
    if kind < CAP_CHANGE_SHARE or len(order) < 2:
        i = order[random.randrange(len(order))]
        cap = random.randint(*ranges[i])
        return ListSchedule(order, (*plan.caps[:i], cap, *plan.caps[i + 1 :]), plan.strict)
    a = random.randrange(len(order))
    b = (a + random.randrange(1, len(order))) % len(order)
    jobs = list(order)
    if kind < CAP_CHANGE_SHARE + MOVE_CHANGE_SHARE:
        jobs.insert(b, jobs.pop(a))
    else:
        jobs[a], jobs[b] = jobs[b], jobs[a]
    return ListSchedule(tuple(jobs), plan.caps, plan.strict)


def portfolio(problem: Problem) -> Iterator[tuple[ListSchedule, str]]:
    """Orders times caps, each with its name."""
    works = problem.works
    jobs = [*problem.waiting, *problem.blocked]
    running = [works[i].width for i in problem.running]
    for caps, name in _all_caps(problem):
        for order, order_name in _orders(works, jobs, caps):
            keep = ListSchedule(order, (*running, *caps[len(running) :]))
            yield keep, f"{order_name}, {name}"
            if name == "dual caps":
                yield replace(keep, strict=True), f"{order_name}, {name}, strict"
            smaller = tuple(min(width, cap) for width, cap in zip(running, caps, strict=False))
            if smaller != tuple(running):
                shrunk = ListSchedule(order, (*smaller, *caps[len(running) :]))
                yield shrunk, f"{order_name}, {name}, running jobs too"


def _orders(
    works: Sequence[Work], jobs: Sequence[int], caps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], str]]:
    def time_s(i: int) -> float:
        return works[i].whole_s[caps[i]]

    def area_s(i: int) -> float:
        return works[i].nodes * caps[i] * works[i].whole_s[caps[i]]

    yield tuple(jobs), "first come first"
    yield tuple(sorted(jobs, key=time_s)), "shortest first"
    yield tuple(sorted(jobs, key=lambda i: -area_s(i))), "largest first"
    yield tuple(sorted(jobs, key=lambda i: -time_s(i))), "longest first"


def _all_caps(problem: Problem) -> Iterator[tuple[tuple[int, ...], str]]:
    works = problem.works
    yield dual_caps(problem), "dual caps"
    optimal = [work.optimal for work in works]
    for most in range(1, max(optimal, default=0) + 1):
        caps = [max(work.least, min(most, best)) for work, best in zip(works, optimal, strict=True)]
        yield tuple(caps), f"at most {most} GPU{'s' * (most > 1)}"
    for knee in KNEE_SHARES:
        caps = [_knee(work, knee * work.rate[best]) for work, best in zip(works, optimal, strict=True)]
        yield tuple(caps), f"{knee:.0%} of the fastest"


def _knee(work: Work, rate: float) -> int:
    """The smallest count with at least this rate."""
    return next((g for g in range(work.least, work.most + 1) if work.rate[g] >= rate), work.most)


def dual_caps(problem: Problem) -> tuple[int, ...]:
    """For each job the smallest count on which it alone takes no longer than T.

    T is the least for which the areas fit: sum of nodes g t(g) <= GPUs T (dual approximation; jobs that
    run count with what they have left).
    """
    works, now = problem.works, problem.now
    gpus = sum(problem.view.capacity.by_host().values())
    held = 0.0
    for i in problem.running:
        work = works[i]
        left_s = work.begin - now + (work.steps - work.step) / work.rate[work.width]
        held += work.nodes * work.width * left_s

    others = [works[i] for i in (*problem.waiting, *problem.blocked)]
    # By job: (seconds, area) on each count up to its fastest.
    tables = [
        [(w.whole_s[g], w.nodes * g * w.whole_s[g]) for g in range(w.least, w.optimal + 1)] for w in others
    ]

    def area(limit_s: float) -> float:
        total: float = held
        for table in tables:
            total += next((a for t, a in table if t <= limit_s), table[-1][1])
        return total

    low, high = 0.0, area(inf) / gpus + max((table[0][0] for table in tables), default=0.0)
    for _ in range(DUAL_HALVINGS):
        middle = (low + high) / 2
        if area(middle) <= gpus * middle:
            high = middle
        else:
            low = middle
    return tuple(
        next((g for g in range(w.least, w.most + 1) if w.whole_s[g] <= high), 0) or w.optimal for w in works
    )
