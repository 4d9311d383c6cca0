"""All ways to run workers on one GPU in rounds: the best for each number, and the most within a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcsched.compat import dataclass
from hpcsched.planning.vsw.costs import Unknown, VswCosts, after_s
from hpcsched.planning.vsw.solver import Option

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """Rounds of so many workers at once, and a last one of those that are left.

    Args:
        at_once: workers in every round but the last.
        most: rounds before the last, at most.
        full_s: seconds of a round before the last.
        last_s: seconds of the last round but for its backward pass, and of what follows in each step; by
            its workers, from 1 to `at_once`.
        backward_s: seconds of that backward pass, beside which gradients are summed; likewise.
    """

    at_once: int
    most: int
    full_s: float
    last_s: Floats
    backward_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """The ways to run workers of one local batch on one kind of GPU; `least`: rounds before the last."""

    ways: tuple[Way, ...]
    least: int

    @classmethod
    def of(
        cls,
        costs: VswCosts,
        kind: str,
        local_batch: int,
        *,
        sync: str,
        accumulation: tuple[int, int],
        at_once: int | None,
    ) -> Rounds:
        """The ways that memory and the bounds of accumulation allow.

        Args:
            at_once: so many at once and no other number, unless a GPU has fewer workers in all.

        Raises Unknown if there is none, or the measurements do not tell.
        """
        own = costs.gpus[kind]
        try:
            speed = own.speed(local_batch)
        except Unknown as error:
            raise Unknown(f"{error} on {kind}") from error
        if speed.usable < 1:
            raise Unknown(f"no worker with a local batch of {local_batch} fits into memory of {kind}")
        if at_once is not None and at_once > speed.usable:
            raise Unknown(f"{at_once} workers at once on {kind}: {speed.usable} are known to fit")
        low, high = accumulation
        exposed = costs.exposed(sync)
        times = [speed.at(n) for n in range(1, (speed.usable if at_once is None else at_once) + 1)]
        ways = []
        for n, full in enumerate(times, start=1):
            # Fewer workers than should run at once are as many at once as there are.
            most = high if at_once in (None, n) else 0
            after = after_s(own, exposed, n)
            way = Way(
                at_once=n,
                most=most,
                full_s=full.total_s,
                last_s=np.array([each.data_s + each.forward_s + after for each in times[:n]]),
                backward_s=np.array([each.backward_s for each in times[:n]]),
            )
            if low <= most:
                ways.append(way)
        if not ways:
            raise Unknown(f"no accumulation of {low} to {high} is possible")
        return cls(ways=tuple(ways), least=low)

    @property
    def fewest(self) -> int:
        """The fewest workers that the least accumulation allows."""
        return self.least * self.ways[0].at_once + 1

    def options(self, most: int, communication_s: tuple[float, float]) -> tuple[list[Option], list[int]]:
        """The fastest way for each number of workers up to `most`, and how many of them run at once.

        Args:
            communication_s: of the all-reduce of all buckets but the last, and of the last.
        """
        most_s, last_bucket_s = communication_s
        best_s = np.full(most + 1, np.inf)
        at_once = np.zeros(most + 1, dtype=np.int64)
        for way in self.ways:
            n = way.at_once
            ends_s = way.last_s + np.maximum(way.backward_s, most_s) + last_bucket_s
            for rest in range(1, n + 1):
                workers = np.arange(rest + n * self.least, min(most, rest + n * way.most) + 1, n)
                time_s = (workers - rest) // n * way.full_s + ends_s[rest - 1]
                better = time_s < best_s[workers]
                best_s[workers[better]] = time_s[better]
                at_once[workers[better]] = n
        known = np.flatnonzero(np.isfinite(best_s))
        return list(map(Option, known.tolist(), best_s[known].tolist())), at_once[known].tolist()

    def capacity(self, limit_s: Floats, most_s: Floats, last_bucket_s: Floats) -> Ints:
        """The most workers with which a step takes at most so long, without a least accumulation.

        0: not even one. Where measured times fall with the workers, those of fewer workers count for more
        of them, too. The arrays have one shape.
        """
        best = np.zeros(limit_s.shape, dtype=np.int64)
        left_s = limit_s - last_bucket_s
        for way in self.ways:
            before_s = np.maximum.accumulate(way.last_s)
            whole_s = np.maximum.accumulate(way.last_s + way.backward_s)
            spare_s = left_s - np.maximum(whole_s[0], before_s[0] + most_s)
            full = np.clip(np.floor(spare_s / way.full_s), 0, way.most)
            left = left_s - full * way.full_s
            # The last round ends when both its backward pass and the all-reduce beside it are done.
            rest = np.minimum(
                np.searchsorted(whole_s, left, side="right"),
                np.searchsorted(before_s, left - most_s, side="right"),
            )
            np.maximum(best, way.at_once * full.astype(np.int64) + rest, out=best)
        return best

    def longest_s(self, workers: int) -> float:
        """Seconds, without communication, that no way to run so many workers exceeds."""
        return max(workers * way.full_s + float((way.last_s + way.backward_s).max()) for way in self.ways)
