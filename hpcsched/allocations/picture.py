"""A picture of advice: when all is done against the GPU-hours, for each allocation that was tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.allocations.advice import Advice, Row
from hpcsched.durations import clock
from hpcsched.report.drawing import FRAME, INK, PALETTE, SMALL, dress, save_svg, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (8.0, 4.2)
"""Inches."""
_MOST_NAMED = 8
"""Points of the front that are named; of more, the recommended one and the ends are."""


def advice_svg(advice: Advice, path: Path) -> None:
    """Draw the advice into the SVG file `path`, which appears whole or not at all: the front as a line, what
    it beats as grey points, and a batch job for each training as a range from best to worst.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """

    def draw(figure: Figure) -> None:
        figure.set_size_inches(*_SIZE)
        axes = figure.add_axes((0.09, 0.13, 0.87, 0.77))
        dress(axes)
        _draw(axes, advice)

    save_svg(draw, path)


def _draw(axes: Axes, advice: Advice) -> None:
    waiting = advice.waiting
    rows = [row for row in advice.rows if row.end_s is not None or not waiting]
    at = {row.number: row.compared_s(waiting=waiting) for row in rows}
    unit, seconds = time_unit(max(at.values()))
    beaten = [row for row in rows if not row.front]
    front = sorted((row for row in rows if row.front), key=lambda row: at[row.number])
    if beaten:
        axes.scatter(
            [at[row.number] / seconds for row in beaten], [row.gpu_hours for row in beaten],
            s=14, color=FRAME, label="beaten by another one",
        )  # fmt: skip
    axes.plot(
        [at[row.number] / seconds for row in front], [row.gpu_hours for row in front],
        color=PALETTE[4], marker="o", markersize=5, linewidth=1.2, label="nothing beats these",
    )  # fmt: skip
    named = front if len(front) <= _MOST_NAMED else [front[0], front[-1]]
    for row in front:
        best = row.number == advice.recommended
        if best:
            axes.scatter(
                [at[row.number] / seconds], [row.gpu_hours], s=110, facecolors="none",
                edgecolors=PALETTE[5], linewidths=1.6, label="recommended", zorder=5,
            )  # fmt: skip
        if best or row in named:
            axes.annotate(
                _name(row), (at[row.number] / seconds, row.gpu_hours), (6, 6),
                textcoords="offset points", fontsize=SMALL, color=INK,
            )  # fmt: skip
    possible = [one for one in advice.separate if not one.too_long]
    for one, colour in zip(possible, PALETTE[1:], strict=False):
        low = one.compared_s(waiting=waiting and one.end_s is not None)
        high = one.end_high_s if waiting and one.end_high_s is not None else low
        gpus = "-".join(map(str, dict.fromkeys(one.gpus)))
        axes.plot(
            [low / seconds, max(low, high) / seconds], [one.gpu_hours] * 2, color=colour, marker="|",
            markersize=9, linewidth=2, label=f"one batch job for each training ({gpus} GPU)",
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.12)
    end = "time from submission to the last result" if waiting else "time to the last result, without waiting"
    axes.set_xlabel(f"{end} ({unit})", color=INK)
    axes.set_ylabel("GPU-hours charged", color=INK)
    axes.set_title(
        f"{Path(advice.file).name}: {advice.counted} jobs, {len(rows)} allocations",
        loc="left", fontsize=9.5, fontweight="bold", color=INK,
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def _name(row: Row) -> str:
    """One allocation in few words, such as `2x4 GPUs, 1:00:00, twice`."""
    nodes = f"{row.nodes}x" if row.nodes > 1 else ""
    times = f", {row.allocations} times" if row.allocations > 1 else ""
    return f"{nodes}{row.gpus_per_node} GPU{'s' * (row.gpus_per_node > 1)}, {clock(row.time_s)}{times}"
