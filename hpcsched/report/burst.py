"""Burst plans for people: in a line, and as a Gantt chart of each GPU's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.report.drawing import INK, PALETTE, save_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 11.0, 0.6, 0.15, 0.35, 0.5  # inches
_ROW, _PANEL_LEAST, _PANEL_MOST = 0.3, 1.0, 4.0
_CHARACTER = 0.068
_READABLE = 0.13


def summary(plan: BurstPlan) -> str:
    """One line: the step's time against data parallelism, and the share of the GPUs that it uses."""
    limit = plan.amplification_limit
    within = f" within an amplification of {limit:g}" if isfinite(limit) else ""
    line = f"{plan.iter_us / 1e3:.3f} ms a step on {plan.gpus} GPUs{within}"
    if isfinite(plan.data_parallel_us) and plan.iter_us > 0:
        faster = plan.data_parallel_us / plan.iter_us
        line += f" ({plan.data_parallel_us / 1e3:.3f} ms data parallel: {faster:.2f}x)"
    busy = plan.gpu_us / (plan.gpus * plan.iter_us) if plan.iter_us else 1.0
    return f"{line}; {plan.gpu_us / 1e6:.4g} GPU-seconds, {min(1.0, busy):.0%} of the GPUs' time"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges: 0-3,6."""
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in _runs(ranks))


def plan_svg(plan: BurstPlan, path: Path) -> None:
    """Draw the plan into the SVG file `path`: ranks upwards, time to the right.

    Boxes are layers, as high as they have ranks; what is left white is free for other work. Raises
    MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: _draw(figure, plan), path)


def _draw(figure: Figure, plan: BurstPlan) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    panel = min(max(plan.gpus * _ROW, _PANEL_LEAST), _PANEL_MOST)
    height = panel + _TOP + _BOTTOM
    figure.set_size_inches(_WIDTH, height)
    wide = _WIDTH - _LEFT - _RIGHT
    axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / height, wide / _WIDTH, panel / height))
    span = plan.iter_us or 1.0
    for number, layer in enumerate(plan.layers):
        for low, high in _runs(layer.ranks):
            box = Rectangle(
                (layer.start_us / 1e3, low - 0.5),
                (layer.end_us - layer.start_us) / 1e3,
                high - low + 1,
                facecolor=PALETTE[number % len(PALETTE)],
                edgecolor=INK,
                linewidth=0.4,
            )
            axes.add_patch(box)
            inches = (layer.end_us - layer.start_us) / span * wide
            tall = (high - low + 1) / plan.gpus * panel
            if inches > _CHARACTER * len(layer.name) and tall > _READABLE:
                axes.text(
                    (layer.start_us + layer.end_us) / 2e3,
                    (low + high) / 2,
                    layer.name,
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=INK,
                )
    axes.set_xlim(0, span / 1e3)
    axes.set_ylim(-0.5, plan.gpus - 0.5)
    axes.set_xlabel("time (ms)", color=INK)
    axes.set_ylabel("rank", color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{plan.model}, global batch {plan.global_batch}: {summary(plan)}"
    axes.set_title(title, fontsize=8.5, loc="left", color=INK)


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each stretch of ranks without a gap."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b > a + 1), ranks[-1]]
    yield from zip(starts, ends, strict=True)
