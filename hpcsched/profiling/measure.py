"""From a program's progress lines to rates: windows of its own clock, after a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcsched.contract.progress import Line
from hpcsched.errors import BadInput


@dataclass(frozen=True, slots=True)
class Window:
    """`rate` steps per second over `seconds` of the program's clock."""

    rate: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class RateMeter:
    """Cuts progress into `repeats` windows of at least `seconds`, after `warmup_s` from the first step.

    A window begins and ends where the step count was first seen to rise, so neither a program that
    reports many steps at once nor one that repeats itself shifts the rate. Steps up to `from_step`
    were done before.
    """

    warmup_s: float
    seconds: float
    repeats: int
    from_step: int = 0
    first: tuple[int, float] | None = None
    """The first new step that was reported, and the program's time of it."""
    windows: list[Window] = field(default_factory=list)
    _last: tuple[int, float] | None = None
    _start: tuple[int, float] | None = None

    @property
    def done(self) -> bool:
        return len(self.windows) >= self.repeats

    @property
    def step(self) -> int:
        """The last step seen."""
        return self._last[0] if self._last else self.from_step

    def add(self, step: int, t: float) -> bool:
        """Take a report of `step` steps done at `t` seconds; False if it brings no step or no time."""
        if step <= self.step or (self._last and t <= self._last[1]):
            return False
        self._last = (step, t)
        if self.first is None:
            self.first = self._last
        if self._start is None:
            if t - self.first[1] >= self.warmup_s:
                self._start = self._last
        elif t - self._start[1] >= self.seconds and not self.done:
            elapsed = t - self._start[1]
            self.windows.append(Window((step - self._start[0]) / elapsed, elapsed))
            self._start = self._last
        return True


def median_and_spread(rates: Sequence[float]) -> tuple[float, float | None]:
    """The median of at least one rate, and the relative standard deviation (None from one rate alone)."""
    spread = statistics.stdev(rates) / statistics.fmean(rates) if len(rates) > 1 else None
    return statistics.median(rates), spread


def parse_report(line: bytes) -> tuple[int, float] | None:
    """(step, seconds) of a progress line {"step": n, "t": s}; None for anything else."""
    try:
        report = Line.decode(line)
    except BadInput:
        return None
    return report.step, report.t
