"""The stability detector: a training has to go steadily before its use of resources is judged (NEARCHUS,
section IV)."""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import fmean, median

from hpcsched.compat import zip

MAX_VARIATION = 0.05
"""The largest coefficient of variation of a steady metric (NEARCHUS, section IV)."""
WINDOW_SAMPLES = 5
"""Consecutive samples that it is taken of (NEARCHUS, section IV: N_comp)."""
MAX_SAMPLES = 30
"""Samples after which steadiness is waited for no longer (chosen)."""


class Stability:
    """Looks at the last `count` samples of some metrics: steady once each varies by less than `limit`.

    The paper's two metrics are the CPU use of all processes together and the steps per second. Raises
    ValueError for a `count` of less than 2, which says nothing, a `limit` of 0 or less, and a `patience` of
    less than `count`.
    """

    def __init__(
        self, *, limit: float = MAX_VARIATION, count: int = WINDOW_SAMPLES, patience: int = MAX_SAMPLES
    ) -> None:
        if count < 2 or limit <= 0 or patience < count:
            raise ValueError(f"{count} samples, limit {limit}, patience {patience}: nothing to detect")
        self.limit, self.count, self.patience = limit, count, patience
        self.samples = 0
        self._kept: deque[tuple[float, ...]] = deque(maxlen=count)

    def add(self, *metrics: float) -> None:
        """A sample: a value of each metric, always in the same order."""
        self._kept.append(metrics)
        self.samples += 1

    @property
    def stable(self) -> bool:
        """Whether every metric has been steady over the last `count` samples; one that is 0 is not."""
        whole = len(self._kept) == self.count
        return whole and all(variation(metric) < self.limit for metric in zip(*self._kept, strict=True))

    @property
    def settled(self) -> bool:
        """Whether there is no point in waiting: it is stable, or has not become so in `patience` samples."""
        return self.stable or self.samples >= self.patience

    def medians(self) -> tuple[float, ...]:
        """The median of each metric over the samples that are looked at; empty without any."""
        return tuple(map(median, zip(*self._kept, strict=True)))


def variation(values: tuple[float, ...]) -> float:
    """The coefficient of variation: standard deviation over mean, without unit; infinite for a mean of 0."""
    mean = fmean(values)
    if mean == 0:
        return float("inf")
    return sqrt(fmean((value - mean) ** 2 for value in values)) / abs(mean)
