"""The history of a global batch as a figure: batch, gradient, workers and loss over the epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.report.drawing import (
    FRAME,
    INK,
    MOST_VALUE,
    PALETTE,
    SMALL,
    WIDE_RANGE,
    beside,
    draw_panels,
    legend_beside,
    logarithmic,
    save_svg,
)
from hpcsched.store.batches import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcsched.report.drawing import Panel

MOST_POINTS = 600
"""In a line, about as many as it is pixels wide."""

_MOST_DOTS = 120

_MOST_NAMED = 8
"""Ranks; with more of them there is no room to name each."""

_BLUE, _GREEN, _ORANGE = PALETTE[4], PALETTE[2], PALETTE[5]

T = TypeVar("T")


def batches_svg(
    decisions: Sequence[Decision], options: WorkerOptions, path: Path, *, step: int, title: str
) -> None:
    """Draw a history of at least one decision, up to `step` of the job, into the SVG file `path`.

    What was never measured has no panel. Dotted lines: the job went on on other GPUs, or after a restart.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: draw(figure, decisions, options, step=step, title=title), path)


def draw(
    figure: Figure, decisions: Sequence[Decision], options: WorkerOptions, *, step: int, title: str
) -> None:
    """Draw a job's batches on a figure."""
    history = _History(decisions, options, step)
    span = math.floor(history.begin), history.end
    draw_panels(figure, history.panels(), title=title, span=span, label="epoch")


class _History:
    """The data of the figure, from epoch `begin` to `end`; a decision holds until the next one."""

    def __init__(self, decisions: Sequence[Decision], options: WorkerOptions, step: int) -> None:
        self._decisions, self._options = decisions, options
        last = decisions[-1]
        self.begin = decisions[0].epoch
        self.end = last.epoch * max(1.0, step / last.step) if last.step else last.epoch
        if self.end <= self.begin:
            self.end = self.begin + 1.0

    def panels(self) -> list[Panel]:
        """From above, each with the moves; all but the first only where something is known."""
        losses = _drawable((d.epoch, d.loss) for d in self._decisions)
        measured = self._measured()
        panels: list[Panel] = [self._batch]
        if measured:
            panels.append(lambda axes: self._metric(axes, measured))
        panels.append(self._workers)
        if losses:
            panels.append(lambda axes: _loss(axes, losses))
        return [partial(self._with_moves, panel) for panel in panels]

    def _with_moves(self, panel: Panel, axes: Axes) -> None:
        for at in self._moves():
            axes.axvline(at, color=FRAME, linewidth=0.8, linestyle=":")
        panel(axes)

    def _moves(self) -> list[float]:
        """The epochs at which a new attempt begins."""
        return [after.epoch for before, after in pairwise(self._decisions) if before.attempt != after.attempt]

    def _measured(self) -> list[tuple[float, float]]:
        """Each value of the metric once: a line repeats it until there is a newer one."""
        name = self._options.metric.replace("-", "_")
        return _changes(_drawable((d.epoch, getattr(d, name)) for d in self._decisions))

    def _batch(self, axes: Axes) -> None:
        batches = [float(d.global_batch) for d in self._decisions]
        axes.set_yscale("log", base=2)
        axes.minorticks_off()
        ticks = _powers(min(batches), max(batches))
        axes.set_yticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set_ylim(min(batches) / 1.25, max(batches) * 1.25)
        self._steps(axes, [(d.epoch, float(d.global_batch)) for d in self._decisions], color=_BLUE)
        axes.set_ylabel("global batch\n(samples)", color=INK)

    def _metric(self, axes: Axes, measured: Sequence[tuple[float, float]]) -> None:
        target = self._options.target
        if self._options.metric == "similarity":
            axes.set_ylabel("gradient\nsimilarity", color=INK)
            _line(axes, measured, _GREEN)
            axes.axhline(target, color=INK, linewidth=0.9, linestyle="--")
            beside(axes, target, f"target {target:g}")
            return
        axes.set_ylabel("noise scale\n(samples)", color=INK)
        wanted = [(d.epoch, d.global_batch / target) for d in self._decisions]
        if min(value for _, value in measured) > 0:
            logarithmic(axes, [value for _, value in (*measured, *wanted)])
        _line(axes, measured, _GREEN)
        self._steps(axes, wanted, color=INK, linewidth=0.9, linestyle="--")
        beside(axes, wanted[-1][1], "batch" if target == 1 else f"batch / {target:g}")

    def _workers(self, axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        kept = _changes([(d.epoch, d.workers) for d in self._decisions])
        kept = thinned(kept, lambda point: float(sum(point[1])))
        kept.append((self.end, kept[-1][1]))
        epochs = [epoch for epoch, _ in kept]
        ranks = max(len(workers) for _, workers in kept)
        tops = [list(accumulate((*workers, *(0,) * (ranks - len(workers))))) for _, workers in kept]
        below = [0] * len(kept)
        for rank in range(ranks):
            above = [top[rank] for top in tops]
            colour = PALETTE[rank % len(PALETTE)]
            axes.fill_between(epochs, below, above, step="post", facecolor=colour, linewidth=0)
            below = above
        axes.set_ylim(0, 1.08 * max(below))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.set_ylabel("stream\nworkers", color=INK)
        if ranks > _MOST_NAMED:
            axes.text(
                1.015, 0.5, f"ranks 0 to {ranks - 1},\nfrom below", transform=axes.transAxes,
                fontsize=SMALL, va="center", color=INK,
            )  # fmt: skip
            return
        legend_beside(axes, [(f"rank {rank}", PALETTE[rank]) for rank in reversed(range(ranks))])

    def _steps(self, axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
        kept = thinned(_changes(points), lambda point: point[1])
        kept.append((self.end, kept[-1][1]))
        epochs, values = zip(*kept, strict=True)
        axes.step(epochs, values, where="post", **({"linewidth": 1.6} | style))


def thinned(items: Sequence[T], value: Callable[[T], float], most: int = MOST_POINTS) -> list[T]:
    """At most `most` (4 or more) of the items, in their order: all, or of each stretch those of the smallest
    and largest value, and the first and last of all."""
    if len(items) <= most:
        return list(items)
    stretch = -(-len(items) // ((most - 2) // 2))
    kept = {0, len(items) - 1}
    for begin in range(0, len(items), stretch):
        numbers = range(begin, min(begin + stretch, len(items)))
        kept |= {choose(numbers, key=lambda i: value(items[i])) for choose in (min, max)}
    return [items[i] for i in sorted(kept)]


def _drawable(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Values that are known and that an axis can show: what has diverged may be beyond."""
    return [(at, value) for at, value in points if value is not None and abs(value) < MOST_VALUE]


def _changes(points: Sequence[tuple[float, T]]) -> list[tuple[float, T]]:
    """The decisions at which the value is another than before, and the first."""
    return [point for i, point in enumerate(points) if i == 0 or point[1] != points[i - 1][1]]


def _loss(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    values = [value for _, value in points]
    if min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        logarithmic(axes, values)
    _line(axes, points, _ORANGE)
    axes.set_ylabel("loss", color=INK)


def _line(axes: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    """Measured values; each with a dot where there is room for dots."""
    epochs, values = zip(*thinned(points, lambda point: point[1]), strict=True)
    few = len(points) <= _MOST_DOTS
    axes.plot(epochs, values, color=colour, linewidth=1.1 if few else 0.6, marker="o" * few, markersize=2.8)


def _powers(low: float, high: float) -> list[float]:
    """The powers of two from `low` to `high`, every other one where they are many; if that is fewer than two
    of them, `low` and `high` instead."""
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    if len(exponents) < 2:
        return sorted({low, high})
    return [2.0**n for n in exponents[:: -(-len(exponents) // 6)]]
