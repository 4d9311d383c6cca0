"""The losses and metrics of a job over its steps, as a figure of small panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.report.batches import thinned
from hpcsched.report.drawing import (
    BAD,
    FRAME,
    INK,
    MOST_VALUE,
    PALETTE,
    SMALL,
    WIDE_RANGE,
    dress,
    logarithmic,
    save_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
"""Metrics that are drawn: losses first, then by name."""

MOST_POINTS = 1000
"""Points of a line."""

VALIDATION = "val_"
"""What the names of metrics of a validation begin with."""

_TRAIN, _VALIDATION = PALETTE[4], PALETTE[5]
_MOST_DOTS = 40
_COLUMNS = 3

# Inches.
_WIDTH, _LEFT, _RIGHT, _BETWEEN = 11.0, 0.65, 0.15, 0.7
_PANEL, _TITLE, _ABOVE, _AXIS = 1.35, 0.3, 0.3, 0.5

Curve = Sequence[tuple[int, float]]


def curves_svg(curves: Mapping[str, Curve], path: Path, *, title: str) -> None:
    """Draw the values of metrics over steps, at least one point of one, into the SVG file `path`.

    A metric and that of the validation with its name are in one panel. A red line is where one was first not
    finite (nan).

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: draw(figure, curves, title=title), path)


def panels_of(curves: Mapping[str, Curve]) -> list[str]:
    """The names of the panels, in their order: losses first."""
    names = {name.removeprefix(VALIDATION) or name for name, curve in curves.items() if curve}
    return sorted(names, key=lambda name: ("loss" not in name, name))[:MOST_PANELS]


def draw(figure: Figure, curves: Mapping[str, Curve], *, title: str) -> None:
    """Draw the values of metrics on a figure."""
    names = panels_of(curves)
    rows = -(-len(names) // _COLUMNS)
    height = _TITLE + rows * (_ABOVE + _PANEL) + _AXIS
    width = (_WIDTH - _LEFT - _RIGHT - (_COLUMNS - 1) * _BETWEEN) / _COLUMNS
    figure.set_size_inches(_WIDTH, height)
    figure.text(
        _LEFT / _WIDTH, 1 - 0.05 / height, title, va="top", fontsize=9.5, fontweight="bold", color=INK
    )  # fmt: skip
    last = max((curve[-1][0] for curve in curves.values() if curve), default=0)
    for number, name in enumerate(names):
        row, column = divmod(number, _COLUMNS)
        left = _LEFT + column * (width + _BETWEEN)
        bottom = height - _TITLE - (row + 1) * (_ABOVE + _PANEL)
        axes = figure.add_axes((left / _WIDTH, bottom / height, width / _WIDTH, _PANEL / height))
        dress(axes)
        axes.set_title(name, loc="left", fontsize=SMALL, color=INK, pad=3)
        _lines(axes, curves.get(name, ()), curves.get(f"{VALIDATION}{name}", ()))
        below = number + _COLUMNS >= len(names)
        _steps(axes, last, below=below)


def _lines(axes: Axes, train: Curve, validation: Curve) -> None:
    """Both lines of a metric, and what they are where there are both."""
    drawn = [(train, _TRAIN, "training"), (validation, _VALIDATION, "validation")]
    shown = [[value for _, value in curve if _drawable(value)] for curve, _, _ in drawn]
    values = [*shown[0], *shown[1]]
    if values and min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        logarithmic(axes, values)
    for curve, colour, label in drawn:
        points = [point for point in curve if _drawable(point[1])]
        if points:
            kept = thinned(points, lambda point: point[1], MOST_POINTS)
            steps, heights = zip(*kept, strict=True)
            few = len(points) <= _MOST_DOTS
            style: dict[str, Any] = {"linewidth": 1.1 if few else 0.7, "marker": "o" * few, "markersize": 2.5}
            axes.plot(steps, heights, color=colour, label=label, **style)
        odd = next((step for step, value in curve if not isfinite(value)), None)
        if odd is not None:
            axes.axvline(odd, color=BAD, linewidth=0.9, linestyle=":")
    if all(shown):
        axes.legend(frameon=False, fontsize=SMALL - 1, labelcolor=INK, borderaxespad=0.1, handlelength=1.2)


def _steps(axes: Axes, last: int, *, below: bool) -> None:
    """The axis of steps, the same in all panels, with numbers where nothing is below."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, max(1, last) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.tick_params(labelbottom=below, labelsize=SMALL, color=FRAME)
    if below:
        axes.set_xlabel("step", color=INK, fontsize=SMALL)


def _drawable(value: float) -> bool:
    """Whether an axis can show a value: nan is none, and what has diverged may be beyond."""
    return abs(value) < MOST_VALUE
