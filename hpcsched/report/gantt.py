"""Gantt charts of results: who had which GPU when, one panel per policy on a shared time axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.core.model import Ended, Role
from hpcsched.report.drawing import INK, PALETTE, save_svg
from hpcsched.report.result import AttemptResult, JobResult, Result
from hpcsched.report.tables import headline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FRAME = "#aaaaaa"
_MOST_IN_LEGEND = 12
"""Jobs; with more of them the labels in the bars have to do."""
_LEGEND_COLUMNS = 7

# Inches.
_WIDTH, _LEFT, _RIGHT = 11.0, 0.65, 0.15
_ROW, _PANEL_LEAST, _PANEL_MOST = 0.34, 0.5, 5.0
_TITLE, _AXIS, _LEGEND_LINE = 0.5, 0.55, 0.2
_CHARACTER, _READABLE = 0.075, 0.15  # how wide one is, how high a row must be for text

_HATCH = "////"
_GUEST = 0.25
"""The height of a bar in the background, in rows."""
_BOUND: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}
_ENDS: dict[Ended | None, dict[str, Any]] = {
    Ended.SUSPENDED: {"color": INK, "linewidth": 2.0},
    Ended.RESIZED: {"color": INK, "linewidth": 1.2, "linestyle": ":"},
    Ended.FAILED: {"color": "#C00000", "linewidth": 2.5},
    Ended.LOST: {"color": "#C00000", "linewidth": 2.5, "linestyle": ":"},
}


def gantt_svg(results: Sequence[Result], path: Path) -> None:
    """Draw `results` into the SVG file `path`, which appears whole or not at all.

    The same results give the same bytes. Bars are attempts, coloured by job: solid as primary, light and
    hatched as secondary, low in the background, one above the other where they are packed; their dark parts
    are starts, resumes and suspends, where known.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: _draw(figure, results), path)


def _draw(figure: Figure, results: Sequence[Result]) -> None:
    names = {job.id: job.name for result in results for job in result.jobs}
    shades = (*PALETTE, *map(_darker, PALETTE))
    colours = {job_id: shades[i % len(shades)] for i, job_id in enumerate(sorted(names))}
    handles = _handles(results, names if len(names) <= _MOST_IN_LEGEND else {}, colours)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    columns = max(1, min(len(handles), _LEGEND_COLUMNS, int(_WIDTH / (_CHARACTER * longest + 0.5))))
    legend_lines = -(-len(handles) // columns)
    heights = [min(max(result.gpus * _ROW, _PANEL_LEAST), _PANEL_MOST) for result in results]
    height = sum(heights) + _TITLE * len(results) + _AXIS + _LEGEND_LINE * legend_lines
    width = _WIDTH - _LEFT - _RIGHT
    figure.set_size_inches(_WIDTH, height)

    span_s = 1.01 * max([_end_s(r) for r in results] + [r.lower_bound_s or 0.0 for r in results] + [0.0])
    span_s = span_s or 1.0
    unit, unit_s = _unit(span_s)
    bottom = height
    for result, panel in zip(results, heights, strict=True):
        bottom -= _TITLE + panel
        axes = figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, panel / height))
        _Panel(axes, unit_s, span_s * _CHARACTER / width, panel / result.gpus).draw(result, colours)
        axes.set_xlim(0, span_s / unit_s)
        axes.tick_params(labelbottom=result is results[-1])
    if results:
        axes.set_xlabel(f"time ({unit})", color=INK)
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
    )


@dataclass(frozen=True)
class _Panel:
    """One result's chart: `unit_s` is the axis's unit, `character_s` a character's width, both in
    seconds; `row` a GPU's height in inches."""

    axes: Axes
    unit_s: float
    character_s: float
    row: float

    def draw(self, result: Result, colours: Mapping[int, str]) -> None:
        axes = self.axes
        axes.set_title(headline(result), loc="left", fontsize=9.5, fontweight="bold", color=INK)
        axes.set_ylim(result.gpus - 0.5, -0.5)
        axes.set_yticks(range(0, result.gpus, 1 if self.row >= _READABLE else max(2, result.gpus // 8)))
        axes.set_ylabel("GPU", color=INK)
        axes.tick_params(labelcolor=INK, color=_FRAME)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_FRAME)

        bars = [(job, attempt) for job in result.jobs for attempt in job.attempts]
        bars.sort(key=lambda bar: bar[1].role is Role.BACKGROUND)  # before the others, where they share a GPU
        seats = _seats(bars, _end_s(result))
        for job, attempt in bars:
            end_s = _end_s(result) if attempt.end_s is None else attempt.end_s
            seat = seats.get((job.id, attempt.start_s), _WHOLE)
            for first, count in _runs(attempt.gpus):
                self._bar(attempt, end_s, first, count, colours[job.id], seat)
                if attempt.role is not Role.BACKGROUND:
                    self._label(job, attempt, end_s, first, count, seat)
        if result.lower_bound_s:
            axes.axvline(result.lower_bound_s / self.unit_s, **_BOUND)

    def _bar(
        self, attempt: AttemptResult, end_s: float, first: int, count: int, colour: str, seat: _Seat
    ) -> None:
        """An attempt on the GPUs first .. first + count - 1."""
        margin = 0.07 if self.row > 0.1 else 0.0
        low, high = first - 0.5 + margin, first + count - 0.5 - margin
        number, seats = seat
        low, high = low + (high - low) * number / seats, low + (high - low) * (number + 1) / seats
        start_s = attempt.start_s
        if attempt.role is Role.BACKGROUND:
            low = high - _GUEST
        if attempt.role is not Role.SECONDARY:
            self._box(start_s, end_s, low, high, facecolor=colour, linewidth=0)
        else:
            light = _lighter(colour)
            self._box(start_s, end_s, low, high, facecolor=light, edgecolor=colour, hatch=_HATCH, linewidth=0)
        if self.row >= _READABLE:
            for gpu in range(first, first + count - 1):
                self._line(start_s, end_s, gpu + 0.5, gpu + 0.5, color="white", linewidth=0.6, alpha=0.6)
        shade: dict[str, Any] = {"facecolor": INK, "alpha": 0.4, "linewidth": 0}
        self._box(start_s, min(start_s + attempt.launch_s, end_s), low, high, **shade)
        self._box(max(end_s - attempt.suspend_s, start_s), end_s, low, high, **shade)
        self._box(start_s, end_s, low, high, facecolor="none", edgecolor="white", linewidth=0.6)
        if attempt.ended in _ENDS:
            self._line(end_s, end_s, low, high, solid_capstyle="butt", **_ENDS[attempt.ended])

    def _label(
        self, job: JobResult, attempt: AttemptResult, end_s: float, first: int, count: int, seat: _Seat
    ) -> None:
        """The job's name, or else its id, in the bar's clear part; nothing where neither fits."""
        if seat != _WHOLE:
            return  # there are too many of them
        start_s, stop_s = attempt.start_s + attempt.launch_s, end_s - attempt.suspend_s
        for text in (job.name, f"#{job.id}"):
            if self.row * count >= _READABLE and (len(text) + 1) * self.character_s <= stop_s - start_s:
                plate = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
                x, y = (start_s + stop_s) / 2 / self.unit_s, first + (count - 1) / 2
                self.axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK, bbox=plate)
                return

    def _box(self, start_s: float, end_s: float, low: float, high: float, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        if end_s > start_s:
            width = (end_s - start_s) / self.unit_s
            self.axes.add_patch(Rectangle((start_s / self.unit_s, low), width, high - low, **style))

    def _line(self, start_s: float, end_s: float, low: float, high: float, **style: Any) -> None:
        self.axes.plot([start_s / self.unit_s, end_s / self.unit_s], [low, high], **style)


def _handles(results: Sequence[Result], names: Mapping[int, str], colours: Mapping[int, str]) -> list[Artist]:
    """The legend: `names` of jobs by id, and what the marks mean that occur in the results."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    attempts = [a for result in results for job in result.jobs for a in job.attempts]
    handles: list[Artist] = [Patch(facecolor=colours[i], label=names[i]) for i in sorted(names)]
    if any(a.role is Role.SECONDARY for a in attempts):
        grey = "#999999"
        handles.append(Patch(facecolor=grey, label="primary"))
        handles.append(
            Patch(facecolor=_lighter(grey), edgecolor=grey, hatch=_HATCH, linewidth=0, label="secondary")
        )
    if any(a.role is Role.BACKGROUND for a in attempts):
        handles.append(Line2D([], [], color="#999999", linewidth=3.0, label="in the background"))
    if any(a.overhead_s for a in attempts):
        handles.append(Patch(facecolor=INK, alpha=0.6, linewidth=0, label="start, resume, suspend"))
    for ended, style in _ENDS.items():
        if any(a.ended is ended for a in attempts):
            handles.append(Line2D([], [], label=str(ended), **style))
    if any(result.lower_bound_s for result in results):
        handles.append(Line2D([], [], label="lower bound", **_BOUND))
    return handles


def _end_s(result: Result) -> float:
    """When all was over, also in the background."""
    return max(result.makespan_s, result.background_end_s or 0.0)


def _unit(span_s: float) -> tuple[str, float]:
    """The axis's unit, and its length in seconds."""
    if span_s <= 1200:
        return "s", 1.0
    return ("min", 60.0) if span_s <= 2 * 3600 else ("h", 3600.0)


_Seat = tuple[int, int]
_WHOLE: _Seat = (0, 1)


def _seats(bars: Sequence[tuple[JobResult, AttemptResult]], end_s: float) -> dict[tuple[int, float], _Seat]:
    """For attempts that share a GPU as packed ones do: which of how many parts of its row each gets.

    By job and start. Attempts that overlap, also by way of others, have parts of the same height.
    """
    packed = {attempt.gpus[0] for _, attempt in bars if attempt.role is Role.PACKED}
    seats: dict[tuple[int, float], _Seat] = {}
    for gpu in packed:
        mine = [
            (a.start_s, job.id, end_s if a.end_s is None else a.end_s) for job, a in bars if gpu in a.gpus
        ]
        ends: list[float] = []
        cluster: dict[tuple[int, float], int] = {}
        for start_s, job_id, stop_s in sorted(mine):
            if cluster and start_s >= max(ends):
                seats |= {key: (seat, len(ends)) for key, seat in cluster.items()}
                ends, cluster = [], {}
            free = next((i for i, taken_s in enumerate(ends) if taken_s <= start_s), len(ends))
            ends[free : free + 1] = [stop_s]
            cluster[job_id, start_s] = free
        seats |= {key: (seat, len(ends)) for key, seat in cluster.items()}
    return seats


def _runs(gpus: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring GPUs together, as (first, count), so that a bar and its label can span them."""
    ordered = sorted(gpus)
    first = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            yield ordered[first], i - first
            first = i


def _lighter(colour: str) -> str:
    """The colour `#rrggbb`, two thirds of the way to white."""
    return "#" + "".join(f"{round(255 - (255 - channel) / 3):02x}" for channel in _channels(colour))


def _darker(colour: str) -> str:
    """The colour `#rrggbb`, two fifths of the way to black: for as many jobs again."""
    return "#" + "".join(f"{round(0.6 * channel):02x}" for channel in _channels(colour))


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
