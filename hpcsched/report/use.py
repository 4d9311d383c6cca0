"""How busy the devices of each host were over the time of a run, and how full their memory, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from hpcsched.report.batches import MOST_POINTS, thinned
from hpcsched.report.drawing import INK, PALETTE, PAPER, SMALL, TIMELINE, draw_panels, save_svg, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcsched.report.drawing import Panel

_BUSY, _FULL = PALETTE[4], PALETTE[1]
_GAP = 5.0
"""Where samples are so much further apart than usual the line is broken."""
_MOST_DOTS = 60


class Point(NamedTuple):
    """The devices of a host at one time of the run's clock: the utilisation (0 to 1) of each, and its used
    memory in MiB, where they were measured."""

    at: float
    busy: Sequence[float]
    memory_mib: Sequence[float]


def use_svg(hosts: Mapping[str, Sequence[Point]], path: Path, *, span_s: float) -> None:
    """Draw the devices of at least one host, which have been measured, into the SVG file `path`.

    `span_s`: the length of the time axis, which is that of the run's Gantt chart. A line is the mean of a
    host's devices, its band goes from the least to the most used one.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: draw(figure, hosts, span_s=span_s), path)


def draw(figure: Figure, hosts: Mapping[str, Sequence[Point]], *, span_s: float) -> None:
    """Draw the devices of hosts on a figure."""
    unit, unit_s = time_unit(span_s)
    panels: list[Panel] = []
    for host, points in hosts.items():
        if any(point.busy for point in points):
            panels.append(partial(_busy, host, points, unit_s))
        if any(point.memory_mib for point in points):
            panels.append(partial(_memory, host, points, unit_s))
    span, label = (0.0, span_s / unit_s), f"time ({unit})"
    draw_panels(figure, panels, title="", span=span, label=label, sides=TIMELINE)


def _busy(host: str, points: Sequence[Point], unit_s: float, axes: Axes) -> None:
    _band(axes, [(p.at, [100 * busy for busy in p.busy]) for p in points], unit_s, _BUSY)
    axes.set_ylim(0, 104)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("busy (%)", color=INK)
    _named(axes, host)


def _memory(host: str, points: Sequence[Point], unit_s: float, axes: Axes) -> None:
    _band(axes, [(p.at, [mib / 1024 for mib in p.memory_mib]) for p in points], unit_s, _FULL)
    most_mib = max(mib for point in points for mib in point.memory_mib)
    axes.set_ylim(0, 1.25 * most_mib / 1024 or 1.0)
    axes.set_ylabel("memory (GiB)", color=INK)
    _named(axes, host)


def _named(axes: Axes, host: str) -> None:
    plate = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "alpha": 0.75, "linewidth": 0}
    axes.text(
        0.005, 0.95, host, transform=axes.transAxes, va="top", fontsize=SMALL, color=INK, bbox=plate
    )  # fmt: skip


def _band(axes: Axes, points: Sequence[tuple[float, Sequence[float]]], unit_s: float, colour: str) -> None:
    """The mean over time, and what is between the least and the most; broken where nobody sampled."""
    known = [_Seen(at / unit_s, min(values), fmean(values), max(values)) for at, values in points if values]
    apart = [after.at - before.at for before, after in pairwise(known)]
    most = _GAP * median(apart or [inf])
    breaks = [number for number, gap in enumerate(apart, 1) if gap > most]
    dots = "o" if len(known) <= _MOST_DOTS else ""
    for first, end in pairwise([0, *breaks, len(known)]):
        piece = thinned(known[first:end], lambda seen: seen.mean, max(4, MOST_POINTS // (len(breaks) + 1)))
        times = [seen.at for seen in piece]
        low, mean, high = zip(*(seen[1:] for seen in piece), strict=True)
        axes.fill_between(times, low, high, facecolor=colour, alpha=0.25, linewidth=0)
        axes.plot(times, mean, color=colour, linewidth=1.2, marker=dots, markersize=2.8)


class _Seen(NamedTuple):
    at: float
    low: float
    mean: float
    high: float
