"""Adaptive batches: when a global batch grows, how far, and what the learning rate makes of it (JABAS,
section 6.1; SimiGrad).

All of it follows from three numbers of one step: the gradient is summed up in two halves a and b, each of one
half of the workers, and what is needed of them are the products a.a, b.b and a.b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Optional

from hpcsched.compat import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Two halves of a step's gradient, each a mean over `samples` samples: their inner products."""

    aa: float
    bb: float
    ab: float
    samples: float

    @property
    def known(self) -> bool:
        """Whether they say anything: gradients that overflow, or are zero, do not."""
        return all(map(math.isfinite, (self.aa, self.bb, self.ab))) and min(self.aa, self.bb) > 0

    @property
    def similarity(self) -> float:
        """The cosine of the two halves, -1 to 1: 1 if more samples would not change where the step goes.

        NaN where it is not known.
        """
        return self.ab / math.sqrt(self.aa) / math.sqrt(self.bb) if self.known else math.nan

    @property
    def signal(self) -> float:
        """The squared length of the true gradient, without bias (McCandlish et al. 2018, appendix A): the two
        halves have it in common, and nothing else."""
        return self.ab

    @property
    def noise(self) -> float:
        """The summed variance of one sample's gradient, without bias: what the halves do not share."""
        return self.samples * (self.aa + self.bb - 2 * self.ab) / 2

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale in samples: noise over signal; infinite if no signal is left of the noise.

        NaN where it is not known.
        """
        if not self.known:
            return math.nan
        return self.noise / self.signal if self.signal > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A measure of a step, and what it says of the batch: 1 for a larger, -1 for a smaller one."""

    name: str
    value: Callable[[Halves], float]
    wants: Callable[[float, float, int], int]
    """Of the value, the target, and the global batch that the rule is at."""


def _by_similarity(value: float, target: float, _batch: int) -> int:
    return 1 if value < target else -1 if value > target else 0


def _by_noise_scale(value: float, target: float, batch: int) -> int:
    return 1 if batch < target * value else -1 if batch > target * value else 0


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="similarity", value=lambda halves: halves.similarity, wants=_by_similarity),
        Metric(name="noise-scale", value=lambda halves: halves.noise_scale, wants=_by_noise_scale),
    )
}
"""`similarity`: the halves are to be as alike as the target. `noise-scale`: the batch is to be the target
times the gradient noise scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The rule by which a global batch follows its training: by `rate` up or down every `every` steps, from
    `low` to `high`.

    Batches are whole numbers of `unit` samples: a local batch for each of an even number of workers, as the
    gradient comes in two halves.
    """

    low: int
    high: int
    unit: int
    metric: Metric
    target: float
    every: int
    rate: float

    def __post_init__(self) -> None:
        if self.low < self.unit or self.low % self.unit or self.high % self.unit or self.high < self.low:
            raise ValueError(f"{self.low} to {self.high} samples in units of {self.unit}")

    @property
    def adapts(self) -> bool:
        """Whether there is more than one batch to choose from."""
        return self.low < self.high

    def next(self, wish: float, value: float) -> float:
        """The batch to wish for after one of `wish` samples, for this value of the metric; the same where it
        is NaN.

        Not rounded: else small batches could never grow, or would grow by more than the rate.
        """
        if math.isnan(value):
            return wish
        way = self.metric.wants(value, self.target, self.rounded(wish))
        return min(float(self.high), max(float(self.low), wish * (1 + way * self.rate)))

    def rounded(self, wish: float) -> int:
        """The batch that comes nearest to that, in whole units."""
        units = math.floor(wish / self.unit + 0.5)
        return min(self.high, max(self.low, units * self.unit))


Rule = Callable[[float, Optional[Halves], int], float]
"""By which factor a learning rate changes: of the batch over the trainer's own batch, what was last measured
of the gradient, and the trainer's own batch."""


def _adascale(ratio: float, halves: Halves | None, base: int) -> float:
    """The gain of AdaScale (Johnson et al. 2020): between 1, all signal, and the ratio, all noise."""
    if halves is None or not halves.known:
        return math.sqrt(ratio)  # in between, until it is known
    noise, signal = max(0.0, halves.noise) / base, max(0.0, halves.signal)
    if noise + signal == 0:
        return 1.0
    return (noise + signal) / (noise / ratio + signal)


RULES: Mapping[str, Rule] = {
    "sqrt": lambda ratio, _halves, _base: math.sqrt(ratio),
    "linear": lambda ratio, _halves, _base: ratio,
    "adascale": _adascale,
    "none": lambda _ratio, _halves, _base: 1.0,
}
"""Learning-rate rules by their names in a job file; `sqrt` is the paper's."""


def worker_count(global_batch: int, local_batch: int, *, even: bool) -> int:
    """Workers of a global batch, rounded, at least one (of each half)."""
    return (
        2 * max(1, round(global_batch / local_batch / 2))
        if even
        else max(1, round(global_batch / local_batch))
    )
