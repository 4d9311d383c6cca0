"""The configurations of a job on CPU cores as a figure: cores, processes and speed over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.core.mechanisms.cpu.layout import cores_of, counted
from hpcsched.core.model import Attempt
from hpcsched.report.drawing import (
    FRAME,
    INK,
    PALETTE,
    beside,
    draw_panels,
    legend_beside,
    save_svg,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcsched.report.drawing import Panel

_SERVERS, _WORKERS, _RATE = PALETTE[1], PALETTE[0], PALETTE[2]
_REST = 0.3
"""How much longer than the search the figure goes on, as a part of it: after that nothing changes."""


def cores_svg(attempts: Sequence[Attempt], path: Path, *, budget: float, now_s: float, title: str) -> None:
    """Draw the configurations of at least one attempt on CPU cores, until now, into the SVG file `path`.

    Thin lines are changes, dotted ones starts after a stop. What was measured of a configuration stands for
    as long as it lasted, with a dot in the middle; there is no line where nothing was measured.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: draw(figure, attempts, budget=budget, now_s=now_s, title=title), path)


def draw(figure: Figure, attempts: Sequence[Attempt], *, budget: float, now_s: float, title: str) -> None:
    """Draw a job's configurations on a figure."""
    history = _History(attempts, budget, now_s)
    span = history.begin_s / history.unit_s, history.end_s / history.unit_s
    draw_panels(figure, history.panels(), title=title, span=span, label=history.label)


class _History:
    """The data of the figure, from `begin_s` to `end_s`, both seconds into the run."""

    def __init__(self, attempts: Sequence[Attempt], budget: float, now_s: float) -> None:
        self._attempts, self._budget = attempts, budget
        last = attempts[-1]
        self.begin_s = attempts[0].start_s
        whole_s = now_s if last.end_s is None else last.end_s
        searched_s = last.start_s - self.begin_s
        self.end_s = min(whole_s, last.start_s + _REST * searched_s) if searched_s else whole_s
        if self.end_s <= self.begin_s:
            self.end_s = self.begin_s + 1.0
        unit, self.unit_s = time_unit(self.end_s)
        self.label = f"time into the run ({unit})"
        if self.end_s < whole_s:
            self.label += f"; no more changes until {whole_s / self.unit_s:.4g} {unit}"

    def panels(self) -> list[Panel]:
        """From above, each with the changes; the speed only where it was measured."""
        panels: list[Panel] = [self._cores, self._counts]
        if any(attempt.usage for attempt in self._attempts):
            panels.append(self._rate)
        return [partial(self._with_changes, panel) for panel in panels]

    def _with_changes(self, panel: Panel, axes: Axes) -> None:
        for attempt in self._attempts[1:]:
            style = "-" if attempt.in_place else ":"
            axes.axvline(attempt.start_s / self.unit_s, color=FRAME, linewidth=0.5, linestyle=style)
        panel(axes)

    def _points(self, value: Callable[[Attempt], float], none: float) -> tuple[list[float], list[float]]:
        """The steps of a line, as (times, values): a value holds until the next time; `none` while there is
        no attempt."""
        times, values = [], []
        for attempt, following in zip(self._attempts, [*self._attempts[1:], None], strict=True):
            times.append(attempt.start_s)
            values.append(value(attempt))
            stop_s = self._stop_s(attempt)
            if following is None or following.start_s > stop_s:
                times.append(stop_s)
                values.append(none if following else values[-1])
        return [at / self.unit_s for at in times], values

    def _stop_s(self, attempt: Attempt) -> float:
        """Until when an attempt is shown."""
        return self.end_s if attempt.end_s is None else min(attempt.end_s, self.end_s)

    def _cores(self, axes: Axes) -> None:
        times, servers = self._points(lambda attempt: cores_of([s for s in attempt.seats if s.server]), 0.0)
        _, both = self._points(lambda attempt: cores_of(attempt.seats), 0.0)
        axes.fill_between(times, 0.0, servers, step="post", facecolor=_SERVERS, linewidth=0)
        axes.fill_between(times, servers, both, step="post", facecolor=_WORKERS, linewidth=0)
        axes.axhline(self._budget, color=INK, linewidth=0.9, linestyle="--")
        axes.set_ylim(0, 1.08 * max(self._budget, *both))
        axes.set_ylabel("CPU cores", color=INK)
        beside(axes, self._budget, f"budget {self._budget:g}")
        legend_beside(axes, [("workers", _WORKERS), ("servers", _SERVERS)])

    def _counts(self, axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        servers = self._points(lambda attempt: counted(attempt.seats)[0], nan)
        workers = self._points(lambda attempt: counted(attempt.seats)[1], nan)
        for (times, counts), colour in ((servers, _SERVERS), (workers, _WORKERS)):
            axes.step(times, counts, where="post", color=colour, linewidth=1.6)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.set_ylabel("processes", color=INK)

    def _rate(self, axes: Axes) -> None:
        times, rates = self._points(lambda attempt: attempt.usage.rate if attempt.usage else nan, nan)
        axes.step(times, rates, where="post", color=_RATE, linewidth=1.3)
        for attempt in self._attempts:
            if attempt.usage:
                middle_s = (attempt.start_s + self._stop_s(attempt)) / 2
                axes.plot([middle_s / self.unit_s], [attempt.usage.rate], "o", color=_RATE, markersize=3)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("steps/s", color=INK)
