"""What is known of a model's scalability: throughput by GPU count, and what a restart costs.

MARBLE section V-D: the optimal number of GPUs comes from measured throughput, never from a
model of how training should scale.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

Cost = float | Mapping[int, float]
"""Seconds: one number for every GPU count, or a number for each."""

SOURCES = ("measured", "published", "fitted", "learned")


def _at(points: list[tuple[int, float]], gpus: int) -> float:
    """Linear between points; flat beyond the last and before the first."""
    i = bisect_left(points, (gpus,))
    if i == len(points):
        return points[-1][1]
    if points[i][0] == gpus or i == 0:
        return points[i][1]
    (g0, y0), (g1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (gpus - g0) / (g1 - g0)


def _going_on(table: Mapping[int, float], n: int) -> float:
    """Linear between points, and beyond the last by the slope of the last two (of a single one, from 0)."""
    points = sorted(table.items())
    (last, value), (before, less) = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    return _at(points, n) if n <= last else value + (n - last) * max(0.0, value - less) / (last - before)


def cost_at(cost: Cost | None, gpus: int) -> float | None:
    """Seconds of a cost on `gpus` GPUs; None stays None (not known)."""
    if cost is None or isinstance(cost, (int, float)):
        return None if cost is None else float(cost)
    return _at(sorted(cost.items()), gpus)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured scalability of one model on one device type and number of hosts.

    `throughput` is in `unit`s (steps, usually) per second by GPU count on each of the `nodes` hosts.
    Between measured counts it is interpolated linearly; past the last measured count it is flat; below
    the first measured count it is proportional to the GPU count, which never promises more than was
    measured.
    `start_s`, `suspend_s` and `resume_s` are seconds; so are `grow_s` and `shrink_s`, for which training
    stands still when a job that goes on gets more or fewer GPUs (by the count it then has). None means
    not known.

    Raises ValueError for an empty table, counts below 1, and values that are not finite and positive.
    """

    model: str
    device: str
    throughput: Mapping[int, float]
    nodes: int = 1
    global_batch: int | None = None
    unit: str = "step"
    start_s: Cost | None = None
    suspend_s: Cost | None = None
    resume_s: Cost | None = None
    grow_s: Cost | None = None
    shrink_s: Cost | None = None
    memory_mib: Mapping[int, float] | None = None
    checkpoint_mib: float | None = None
    source: str = "measured"
    note: str = ""
    software: str = ""
    spread: Mapping[int, float] | None = None
    """Relative standard deviation of the throughput by GPU count, where it was measured."""
    packed_s: Mapping[int, float] | None = None
    """Seconds of a step of so many models of this kind that train as one on a GPU (pack, Eq. 2)."""
    packed_mib: Mapping[int, float] | None = None
    """What so many of them take of the GPU's memory."""
    busy: Mapping[int, float] | None = None
    """The share of the time, 0 to 1, for which it has its GPUs busy."""
    _points: list[tuple[int, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.throughput:
            raise ValueError("throughput is empty")
        for name, what, table in (
            ("throughput", "GPU count", self.throughput),
            ("memory_mib", "GPU count", self.memory_mib or {}),
            ("packed_s", "number of models", self.packed_s or {}),
            ("packed_mib", "number of models", self.packed_mib or {}),
            ("busy", "GPU count", self.busy or {}),
        ):
            for gpus, value in table.items():
                if gpus < 1:
                    raise ValueError(f"{name}: {what} {gpus} is below 1")
                if not math.isfinite(value) or value <= 0:
                    raise ValueError(f"{name}[{gpus}] is {value}, not a positive finite number")
        for name, cost in (
            ("start_s", self.start_s),
            ("suspend_s", self.suspend_s),
            ("resume_s", self.resume_s),
            ("grow_s", self.grow_s),
            ("shrink_s", self.shrink_s),
        ):
            values = cost.items() if isinstance(cost, Mapping) else [] if cost is None else [(1, cost)]
            for gpus, value in values:
                if gpus < 1 or not math.isfinite(value) or value < 0:
                    raise ValueError(f"{name} is {value} at {gpus} GPUs, not a finite number of at least 0")
        if any(share > 1 for share in (self.busy or {}).values()):
            raise ValueError(f"busy is {self.busy}, not shares of the time, 0 to 1")
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}, not one of {', '.join(SOURCES)}")
        object.__setattr__(self, "_points", sorted(self.throughput.items()))

    def packed_step_s(self, models: int) -> float | None:
        """Seconds of a step of so many models of this kind as one; None where that was never measured.

        Linear between measured numbers, and beyond them by the slope of the last two: one more costs nothing
        at best.
        """
        return _going_on(self.packed_s, models) if self.packed_s else None

    def packed_memory_mib(self, models: int) -> float | None:
        """What so many models of this kind take of a GPU's memory as one, likewise; where that was never
        measured, as much as they take separately. None: not known."""
        if self.packed_mib:
            return _going_on(self.packed_mib, models)
        alone = cost_at(self.memory_mib, 1)
        return None if alone is None else models * alone

    def rate(self, gpus: int) -> float:
        """Units per second on `gpus` GPUs (at least 1)."""
        first, value = self._points[0]
        return value * gpus / first if gpus < first else _at(self._points, gpus)

    def optimal(self, most: int, least: int = 1) -> int:
        """The smallest GPU count in [least, most] that reaches the largest throughput there.

        Interpolation is linear, so the maximum is at a measured count or at an end of the range.
        """
        counts = {g for g, _ in self._points if least <= g <= most} | {least, most}
        return max(counts, key=lambda g: (self.rate(g), -g))

    def launch_s(self, gpus: int, *, first: bool) -> float | None:
        """Seconds from a launch on `gpus` GPUs to its first step; None where it is not known.

        The first launch pays `start_s`, later ones `resume_s`, or `start_s` if only that is known.
        """
        cost = self.start_s if first or self.resume_s is None else self.resume_s
        return cost_at(cost, gpus)
