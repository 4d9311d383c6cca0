"""Which jobs side by side, on how many GPUs, for how long: the configuration LP over allocation patterns.

A pattern gives GPU counts to some of the jobs, together no more than there are. The least total time of
patterns that do all work is a lower bound of every schedule's makespan, and where a change of counts
costs nothing the patterns that reach it are a best schedule. This is the LP of Gilmore and Gomory (1961)
for cutting stock, with time as the stock. There are too many patterns to list, so a knapsack finds the
next one worth adding: column generation.

Needs scipy (the extra `plan`), and imports it only when called.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

Pattern = dict[int, int]
"""GPU count by index of the job."""

BOUND_MARGIN = 1e-12
"""The share that is taken off a bound, so that no rounding error lifts it above what is proven (double
precision has 2e-16)."""

_GAP = 1e-7
"""Primal and dual may differ by this share at the end: the LP solver itself is not more exact."""


@dataclass(frozen=True, kw_only=True)
class LpSolution:
    """Both sides of a configuration LP; times in seconds.

    `bound_s` is proven: no schedule that does all work ends before. `patterns` are (duration, pattern):
    one after the other in this order, each as soon as its jobs are released, they do all work and end by
    `end_s`, which is never below `bound_s`. Unless the iterations ran out the two are the same but for
    rounding. `after[k]` is how many different releases lie before the k-th pattern: those with the same
    number may change places. `weights` are the dual: whatever pattern runs, the sum of
    weights[j] / times[j][its count] over its jobs is at most 1.
    """

    bound_s: float
    end_s: float
    patterns: tuple[tuple[float, Pattern], ...]
    after: tuple[int, ...]
    weights: tuple[float, ...]


def configuration_lp(
    times: Sequence[Mapping[int, float]],
    gpus: int,
    *,
    release_s: Sequence[float] | None = None,
    iterations: int = 200,
) -> LpSolution:
    """Solve it for jobs that take `times[j][g]` seconds on g GPUs, launch included.

    In a second on g GPUs a job does the share 1 / times[j][g] of itself. None runs before its `release_s`
    (default 0). After any number of `iterations` the bound holds and the patterns do all work. Each
    iteration solves one LP and adds at most two patterns for each different release. The same input gives
    the same answer.

    Proof of the bound. Give each job any weight w[j] >= 0, and let price(k) be the most that
    sum(w[j] / times[j][g]) can be for a pattern of jobs that were released by the k-th release. Scale the
    weights until price(last) is 1. From the k-th release to the next, at most price(k) of the weight is
    done in a second, and at most 1 after the last. So what is left of sum(w) at the last release needs at
    least as many seconds. This asks for exact prices only, which the knapsack finds, not for an exact LP.

    Raises ImportError without scipy, and ValueError for a job with no count from 1 to `gpus`, or with a
    time that is not positive and finite, or a release that is not finite.
    """
    if not times:
        return LpSolution(bound_s=0.0, end_s=0.0, patterns=(), after=(), weights=())
    master = _Master(times, gpus, [0.0] * len(times) if release_s is None else release_s)
    master.solve(iterations)
    return master.answer()


def changing_bound_s(
    times: Sequence[Mapping[int, float]],
    weights: Sequence[float],
    release_s: Sequence[float],
    steps: Sequence[tuple[float, int]],
) -> float:
    """Seconds before which no schedule does all work, where the number of GPUs changes: `steps` are (from
    when on, how many), the first from 0 on. Infinite if so much is never done.

    The proof is that of `configuration_lp`; a second's price goes by the GPUs of its time: it is the most
    that a pattern of so many is worth, of the jobs released by then. Any weights of at least 0 prove a
    bound; those of an `LpSolution` for one of the counts prove a good one. Raises ImportError without numpy.
    """
    jobs = sorted(range(len(times)), key=lambda j: release_s[j])
    worth = _Knapsack([times[j] for j in jobs], max(gpus for _, gpus in steps)).worth(
        [weights[j] for j in jobs]
    )
    releases = [release_s[j] for j in jobs]
    left, changes = sum(weights), sorted({*(at for at, _ in steps), *releases})
    for at, until in pairwise([*changes, math.inf]):
        gpus = steps[bisect_right(steps, at, key=itemgetter(0)) - 1][1]
        price = worth[bisect_right(releases, at)][gpus]
        if left <= price * (until - at) if price > 0 else left <= 0:
            return (at + left / price if left > 0 else at) * (1 - BOUND_MARGIN)
        left -= price * (until - at) if price > 0 else 0.0
    return math.inf


class _Knapsack:
    """Finds the best pattern: of pieces g GPUs large and worth weight / time on g, at most one a job.

    One pass finds it for the first job alone, for the first two, the first three ...
    """

    def __init__(self, times: Sequence[Mapping[int, float]], gpus: int) -> None:
        import numpy as np

        self._np, self._gpus = np, gpus
        self._room = np.arange(gpus + 1)
        self._counts: list[list[int]] = []
        self._rates: list[Any] = []
        self._before: list[Any] = []
        for table in times:
            # A count that is no faster than a smaller one is never worth its GPUs.
            sizes = sorted(table)
            least = accumulate((table[g] for g in sizes[:-1]), min, initial=math.inf)
            counts = [g for g, seconds in zip(sizes, least, strict=True) if table[g] < seconds]
            self._counts.append([0, *counts])
            self._rates.append(np.array([0.0, *(1 / table[g] for g in counts)])[:, None])
            self._before.append(gpus + self._room - np.array([0, *counts])[:, None])
        self._chosen: list[Any] = []

    def prices(self, weights: Sequence[float]) -> list[float]:
        """By number of jobs, from 0: what the best pattern of that many is worth."""
        return [of_room[-1] for of_room in self.worth(weights)]

    def worth(self, weights: Sequence[float]) -> list[list[float]]:
        """The same on 0, 1, ... GPUs, up to all."""
        padded = self._np.full(2 * self._gpus + 1, -math.inf)  # its first half is room that there is not
        best = padded[self._gpus :]
        best[:] = 0.0
        self._chosen, found = [], [best.tolist()]
        for weight, rates, before in zip(weights, self._rates, self._before, strict=True):
            worth = padded[before] + weight * rates
            chosen = worth.argmax(axis=0)  # the first of equals: no GPUs for a piece worth nothing
            best[:] = worth[chosen, self._room]
            self._chosen.append(chosen)
            found.append(best.tolist())
        return found

    def pattern(self, jobs: int) -> Pattern:
        """The best pattern of the first `jobs` under the weights last priced."""
        room, pattern = self._gpus, {}
        for j in reversed(range(jobs)):
            if count := self._counts[j][self._chosen[j][room]]:
                pattern[j] = count
                room -= count
        return pattern


class _Master:
    """The LP of the patterns found so far. In here jobs are numbered in the order of their release."""

    def __init__(self, times: Sequence[Mapping[int, float]], gpus: int, release_s: Sequence[float]) -> None:
        self._jobs = sorted(range(len(times)), key=lambda j: release_s[j])
        self._times = [_usable(j, times[j], gpus) for j in self._jobs]
        if not all(map(math.isfinite, release_s)):
            raise ValueError("a release is not finite")
        releases = sorted(set(release_s))
        self._last_s = releases[-1]
        self._lengths = [later - at for at, later in pairwise(releases)]
        self._present = [sum(r <= at for r in release_s) for at in releases]
        self._knapsack = _Knapsack(self._times, gpus)

        fastest = [min(table, key=lambda g: (table[g], g)) for table in self._times]
        self._least = [table[g] for table, g in zip(self._times, fastest, strict=True)]
        self._columns: list[tuple[int, Pattern]] = []  # (interval, pattern)
        self._known: set[tuple[int, frozenset[tuple[int, int]]]] = set()
        for j, count in enumerate(fastest):
            self._add(len(self._lengths), {j: count})
        self._seconds = list(self._least)
        self._bound_s, self._weights = self._last_s, [0.0] * len(times)
        self._try([min(g * t for g, t in table.items()) for table in self._times])  # the area bound

    def _add(self, interval: int, pattern: Pattern) -> bool:
        key = (interval, frozenset(pattern.items()))
        if new := key not in self._known:
            self._known.add(key)
            self._columns.append((interval, pattern))
        return new

    def _try(self, weights: Sequence[float]) -> list[float]:
        """Keep the bound that these weights prove if it is the best so far; returns their prices."""
        prices = self._knapsack.prices(weights)
        if prices[-1] > 0:
            before = sum(s * prices[n] for s, n in zip(self._lengths, self._present, strict=False))
            bound_s = self._last_s + (sum(weights) - before) / prices[-1]
            if bound_s > self._bound_s:
                self._bound_s, self._weights = bound_s, [w / prices[-1] for w in weights]
        return prices

    def solve(self, iterations: int) -> None:
        """Add the patterns that the duals of the LP ask for, until they ask for none.

        The duals jump from one LP to the next, so patterns for duals that stay near the best ones are added
        as well: that proves good bounds in far fewer iterations (Wentges 1997).
        """
        for _ in range(iterations):
            duals = self._solve_lp()
            if duals is None:
                return
            weights, worth = duals
            near = [(w + 4 * best) / 5 for w, best in zip(weights, self._weights, strict=True)]
            new = self._price(weights, worth)
            end_s = self._last_s + sum(self._of_interval(len(self._lengths)))
            if not new or self._bound_s >= end_s * (1 - _GAP):
                return
            self._price(near, worth)

    def _price(self, weights: Sequence[float], worth: Sequence[float]) -> bool:
        """Add the patterns that are worth more than a second of their interval; False if there are none."""
        prices = self._try(weights)
        asked = [k for k, n in enumerate(self._present) if prices[n] > worth[k] + _GAP]
        return sum(self._add(k, self._knapsack.pattern(self._present[k])) for k in asked) > 0

    def _of_interval(self, interval: int) -> list[float]:
        return [s for s, (k, _) in zip(self._seconds, self._columns, strict=False) if k == interval]

    def _solve_lp(self) -> tuple[list[float], list[float]] | None:
        """(Weight by job, what a second is worth by interval); None if the solver gave up.

        A row for each job: it is done; a row for each interval but the last: its patterns fit in.
        Rows are scaled so that their entries are at most 1.
        """
        from scipy.optimize import linprog
        from scipy.sparse import csc_array

        jobs, intervals = len(self._times), len(self._lengths)
        entries = []
        for c, (k, pattern) in enumerate(self._columns):
            entries += [(-self._least[j] / self._times[j][count], j, c) for j, count in pattern.items()]
            if k < intervals:
                entries.append((1.0, jobs + k, c))
        values, rows, columns = zip(*entries, strict=True)
        scale, longest = max(self._least), sum(self._least)  # no interval has use for more
        result = linprog(
            [float(k == intervals) for k, _ in self._columns],
            A_ub=csc_array((values, (rows, columns)), shape=(jobs + intervals, len(self._columns))),
            b_ub=[*(-t / scale for t in self._least), *(min(s, longest) / scale for s in self._lengths)],
            method="highs",
        )
        if result.status != 0:
            return None
        self._seconds = [max(0.0, float(x)) * scale for x in result.x]
        duals = [max(0.0, -float(y)) for y in result.ineqlin.marginals]
        return [y * t for y, t in zip(duals, self._least, strict=False)], [*duals[jobs:], 1.0]

    def answer(self) -> LpSolution:
        """The best bound found, and the last patterns, made to fit and to do all work."""
        last = len(self._lengths)
        shrink = [min(1.0, s / (sum(self._of_interval(k)) or s)) for k, s in enumerate(self._lengths)]
        used = [
            (k, seconds * (shrink[k] if k < last else 1.0), pattern)
            for seconds, (k, pattern) in zip(self._seconds, self._columns, strict=False)
            if seconds > 0
        ]
        done = [0.0] * len(self._times)
        for _, seconds, pattern in used:
            for j, count in pattern.items():
                done[j] += seconds / self._times[j][count]
        for j, share in enumerate(done):
            if share < 1 - BOUND_MARGIN:  # by the tolerance of the solver
                used.append((last, (1 - share) * self._least[j], self._columns[j][1]))
        used.sort(key=lambda column: column[0])
        weights = dict(zip(self._jobs, self._weights, strict=True))
        return LpSolution(
            bound_s=self._bound_s - BOUND_MARGIN * abs(self._bound_s),
            end_s=self._last_s + sum(seconds for k, seconds, _ in used if k == last),
            patterns=tuple((s, {self._jobs[j]: g for j, g in p.items()}) for _, s, p in used),
            after=tuple(k + 1 for k, _, _ in used),
            weights=tuple(weights[j] for j in range(len(weights))),
        )


def _usable(job: int, table: Mapping[int, float], gpus: int) -> dict[int, float]:
    times = {count: seconds for count, seconds in table.items() if 1 <= count <= gpus}
    if not times:
        raise ValueError(f"job {job} has no count from 1 to {gpus} GPUs")
    if not all(0 < seconds < math.inf for seconds in times.values()):
        raise ValueError(f"job {job} has a time that is not positive and finite")
    return times
