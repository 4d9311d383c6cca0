"""Gantt charts of results: the jobs of each GPU, and their CPU cores, on a shared time axis.

Each result has a panel of its GPUs, and below it one for the cores of each host that had jobs on them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET

from hpcsched.core.model import Ended, Role
from hpcsched.report.drawing import BAD, FRAME, GRID, INK, PALETTE, TIMELINE, save_svg, time_unit
from hpcsched.report.pieces import anchor
from hpcsched.report.result import AttemptResult, JobResult, Result
from hpcsched.report.tables import headline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_IN_LEGEND = 12
"""Jobs; with more of them the labels in the bars have to do."""
_LEGEND_COLUMNS = 7

# Inches.
_WIDTH, _LEFT, _RIGHT = TIMELINE
_ROW, _PANEL_LEAST, _PANEL_MOST = 0.34, 0.5, 5.0
_CORES, _CORES_LEAST, _CORES_MOST = 1.7, 0.5, 8.0  # a panel of cores, and all of them together
_TITLE, _GAP, _AXIS, _LEGEND_LINE = 0.5, 0.25, 0.55, 0.2
_CHARACTER, _READABLE = 0.075, 0.15  # how wide one is, how high a row must be for text

_HATCH = "////"
_GUEST = 0.25
"""The height of a bar in the background, in rows."""
_BOUND: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}
_ALL: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": "-."}
_AWAY: dict[str, Any] = {"facecolor": GRID, "linewidth": 0}
_ENDS: dict[Ended | None, dict[str, Any]] = {
    Ended.SUSPENDED: {"color": INK, "linewidth": 2.0},
    Ended.RESIZED: {"color": INK, "linewidth": 1.2, "linestyle": ":"},
    Ended.FAILED: {"color": BAD, "linewidth": 2.5},
    Ended.LOST: {"color": BAD, "linewidth": 2.5, "linestyle": ":"},
}


def gantt_svg(
    results: Sequence[Result], path: Path, *, links: Container[int] = (), span_s: float | None = None
) -> None:
    """Draw `results` into the SVG file `path`, which appears whole or not at all.

    `links` are the ids of jobs that have a section on the page that the chart is for: their bars lead there.
    `span_s` is the length of the time axis; None: as long as the results are.

    The same results give the same bytes. Bars are attempts, coloured by job: solid as primary, light and
    hatched as secondary, low in the background, one above the other where they share a GPU; their dark parts
    are starts, resumes and suspends, where known. Jobs on CPU cores lie one upon the other, as high as they
    have cores; a line above them is how many there are. GPUs are grey while their allocation is not there.

    Raises MissingExtra without matplotlib, OSError if the file cannot be written.
    """
    save_svg(lambda figure: _draw(figure, results, links, span_s or span_of(results)), path)


def _draw(figure: Figure, results: Sequence[Result], links: Container[int], span_s: float) -> None:
    names = {job.id: job.name for result in results for job in result.jobs}
    shades = (*PALETTE, *map(_darker, PALETTE))
    colours = {job_id: shades[i % len(shades)] for i, job_id in enumerate(sorted(names))}
    handles = _handles(results, names if len(names) <= _MOST_IN_LEGEND else {}, colours)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    columns = max(1, min(len(handles), _LEGEND_COLUMNS, int(_WIDTH / (_CHARACTER * longest + 0.5))))
    legend_lines = -(-len(handles) // columns)
    panels = [(result, *panel) for result in results for panel in _panels(result)]
    height = sum(above + inches for _, _, above, inches in panels) + _AXIS + _LEGEND_LINE * legend_lines
    width = _WIDTH - _LEFT - _RIGHT
    figure.set_size_inches(_WIDTH, height)

    unit, unit_s = time_unit(span_s)
    bottom = height
    for number, (result, host, above, inches) in enumerate(panels, 1):
        bottom -= above + inches
        axes = figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, inches / height))
        frame = axes, unit_s, span_s, span_s * _CHARACTER / width, links
        if host is None:
            _GpuPanel(*frame, inches / max(1, _rows(result))).draw(result, colours)
        else:
            _CoresPanel(*frame, inches).draw(result, host, colours)
        if above == _TITLE:
            axes.set_title(headline(result), loc="left", fontsize=9.5, fontweight="bold", color=INK)
        axes.set_xlim(0, span_s / unit_s)
        axes.tick_params(labelbottom=number == len(panels))
    if panels:
        axes.set_xlabel(f"time ({unit})", color=INK)
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
    )


def _panels(result: Result) -> list[tuple[str | None, float, float]]:
    """The panels of a result: a host (None: its GPUs), the inches above it, and its height."""
    hosts = sorted({a.host for job in result.jobs for a in job.attempts if a.host is not UNSET})
    if not (hosts or result.on_gpus):
        hosts = sorted(result.cores or ())[:1]
    of_cores = max(_CORES_LEAST, min(_CORES, _CORES_MOST / max(1, len(hosts))))
    of_gpus = min(max(_rows(result) * _ROW, _PANEL_LEAST), _PANEL_MOST)
    panels: list[tuple[str | None, float]] = [(None, of_gpus)] if result.on_gpus or not hosts else []
    panels += [(host, of_cores) for host in hosts]
    return [(host, _GAP if number else _TITLE, inches) for number, (host, inches) in enumerate(panels)]


def _rows(result: Result) -> int:
    """A row for each GPU; where hosts came and went there were more than at any one time."""
    held = (gpu for job in result.jobs for attempt in job.attempts for gpu in attempt.gpus)
    there = (gpu for one in result.allocations or () for gpu in one.gpus)
    return max(result.gpus, 1 + max(chain(held, there), default=-1))


@dataclass(frozen=True)
class _Panel:
    """A chart: `unit_s` is the axis's unit, `span_s` its length, `character_s` a character's width, all in
    seconds."""

    axes: Axes
    unit_s: float
    span_s: float
    character_s: float
    links: Container[int]

    def _leads(self, job: JobResult) -> dict[str, str]:
        """Where a click on a part of the job leads: an option of what is drawn."""
        return {"url": f"#{anchor(job.id)}"} if job.id in self.links else {}

    def _dress(self, label: str) -> None:
        axes = self.axes
        axes.set_ylabel(label, color=INK)
        axes.tick_params(labelcolor=INK, color=FRAME)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(FRAME)

    def _name(self, job: JobResult, start_s: float, stop_s: float, y: float) -> None:
        """The job's name, or else its id, in the middle of that time; nothing where neither fits."""
        for text in (job.name, f"#{job.id}"):
            if (len(text) + 1) * self.character_s <= stop_s - start_s:
                plate = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
                x = (start_s + stop_s) / 2 / self.unit_s
                style: dict[str, Any] = {"fontsize": 8, "color": INK, **self._leads(job)}
                self.axes.text(x, y, text, ha="center", va="center", bbox=plate, **style)
                return

    def _box(self, start_s: float, end_s: float, low: float, high: float, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        if end_s > start_s:
            width = (end_s - start_s) / self.unit_s
            self.axes.add_patch(Rectangle((start_s / self.unit_s, low), width, high - low, **style))

    def _line(self, start_s: float, end_s: float, low: float, high: float, **style: Any) -> None:
        self.axes.plot([start_s / self.unit_s, end_s / self.unit_s], [low, high], **style)


@dataclass(frozen=True)
class _GpuPanel(_Panel):
    """One result's GPUs; `row` is the height of one in inches."""

    row: float

    def draw(self, result: Result, colours: Mapping[int, str]) -> None:
        axes, rows = self.axes, _rows(result)
        axes.set_ylim(max(1, rows) - 0.5, -0.5)
        axes.set_yticks(range(0, rows, 1 if self.row >= _READABLE else max(2, rows // 8)))
        self._dress(result.noun)
        self._away(result)
        bars = [(job, attempt) for job in result.jobs for attempt in job.attempts]
        bars.sort(key=lambda bar: bar[1].role is Role.BACKGROUND)  # before the others, where they share a GPU
        strips = _strips(bars, _end_s(result))
        for job, attempt in bars:
            end_s = _end_s(result) if attempt.end_s is None else attempt.end_s
            strip = strips.get((job.id, attempt.start_s), _WHOLE)
            for first, count in _runs(attempt.gpus):
                self._bar(job, attempt, end_s, first, count, colours[job.id], strip)
                if attempt.role is not Role.BACKGROUND:
                    self._label(job, attempt, end_s, first, count, strip)
        if result.lower_bound_s:
            axes.axvline(result.lower_bound_s / self.unit_s, **_BOUND)

    def _away(self, result: Result) -> None:
        """The times at which the GPUs of allocations are not there."""
        for one in result.allocations or ():
            end_s = self.span_s if one.end_s is None else one.end_s
            for first, count in _runs(one.gpus):
                low, high = first - 0.5, first + count - 0.5
                self._box(0.0, min(one.start_s, self.span_s), low, high, **_AWAY)
                self._box(end_s, self.span_s, low, high, **_AWAY)

    def _bar(
        self,
        job: JobResult,
        attempt: AttemptResult,
        end_s: float,
        first: int,
        count: int,
        colour: str,
        strip: _Strip,
    ) -> None:
        """An attempt on the GPUs first .. first + count - 1."""
        margin = 0.07 if self.row > 0.1 else 0.0
        low, high = first - 0.5 + margin, first + count - 0.5 - margin
        number, strips = strip
        low, high = low + (high - low) * number / strips, low + (high - low) * (number + 1) / strips
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
        frame: dict[str, Any] = {"facecolor": "none", "edgecolor": "white", "linewidth": 0.6}
        self._box(start_s, end_s, low, high, **frame, **self._leads(job))
        if attempt.ended in _ENDS:
            self._line(end_s, end_s, low, high, solid_capstyle="butt", **_ENDS[attempt.ended])

    def _label(
        self, job: JobResult, attempt: AttemptResult, end_s: float, first: int, count: int, strip: _Strip
    ) -> None:
        """The job's name, or else its id, in the bar's clear part; nothing where neither fits."""
        if strip != _WHOLE:
            return  # there are too many of them
        if self.row * count >= _READABLE:
            start_s, stop_s = attempt.start_s + attempt.launch_s, end_s - attempt.suspend_s
            self._name(job, start_s, stop_s, first + (count - 1) / 2)


class _Piece(NamedTuple):
    """The cores `low` to `high` of a host, in a stack of all that are held, for so long."""

    start_s: float
    end_s: float
    low: float
    high: float


@dataclass(frozen=True)
class _CoresPanel(_Panel):
    """The CPU cores of a host; `inches` is the panel's height."""

    inches: float

    def draw(self, result: Result, host: str, colours: Mapping[int, str]) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = self.axes
        self._dress("CPU cores")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        if len(result.cores or ()) > 1:
            axes.set_title(host, loc="right", fontsize=8.5, color=INK)
        there, end_s = (result.cores or {}).get(host, 0.0), _end_s(result)
        pieces = _stacked(result.jobs, host, end_s)
        top = 1.05 * max([there, *(piece.high for mine in pieces.values() for piece in mine)]) or 1.0
        axes.set_ylim(0, top)
        if there:
            axes.axhline(there, **_ALL)
        for job in result.jobs:
            if mine := pieces.get(job.id):
                self._areas(job, mine, colours[job.id])
                self._ends(job, mine, end_s)
                high = [piece for piece in mine if self.inches * (piece.high - piece.low) / top >= _READABLE]
                if high:
                    widest = max(high, key=lambda piece: piece.end_s - piece.start_s)
                    self._name(job, widest.start_s, widest.end_s, (widest.low + widest.high) / 2)

    def _areas(self, job: JobResult, pieces: Sequence[_Piece], colour: str) -> None:
        """A job's pieces, joined where they follow each other."""
        gaps = [i for i, (one, other) in enumerate(pairwise(pieces), 1) if other.start_s > one.end_s]
        for first, end in pairwise([0, *gaps, len(pieces)]):
            run = [*pieces[first:end], pieces[end - 1]]
            times = [*(piece.start_s for piece in run[:-1]), run[-1].end_s]
            area = self.axes.fill_between(
                [at / self.unit_s for at in times],
                [piece.low for piece in run],
                [piece.high for piece in run],
                step="post",
                facecolor=colour,
                edgecolor="white",
                linewidth=0.6,
            )
            area.set_urls(list(self._leads(job).values()))

    def _ends(self, job: JobResult, pieces: Sequence[_Piece], end_s: float) -> None:
        """The dark parts of its attempts, and how they ended; where it went on in place, one sees that."""
        shade: dict[str, Any] = {"facecolor": INK, "alpha": 0.4, "linewidth": 0}
        for attempt in job.attempts:
            in_place = attempt.ended is Ended.RESIZED
            if in_place and not attempt.launch_s:
                continue
            stop_s = end_s if attempt.end_s is None else attempt.end_s
            trained_s = stop_s - (0.0 if in_place else attempt.suspend_s)
            for begin_s, until_s, low, high in pieces:
                started_s = min(until_s, stop_s, attempt.start_s + attempt.launch_s)
                self._box(max(begin_s, attempt.start_s), started_s, low, high, **shade)
                self._box(max(begin_s, trained_s), min(until_s, stop_s), low, high, **shade)
                if attempt.ended in _ENDS and not in_place and until_s == stop_s:
                    self._line(stop_s, stop_s, low, high, solid_capstyle="butt", **_ENDS[attempt.ended])


def _stacked(jobs: Sequence[JobResult], host: str, end_s: float) -> dict[int, list[_Piece]]:
    """Each job's part of a host's cores at any time, in the order of ids from below."""
    changes: dict[float, dict[int, float]] = {}
    for job in jobs:
        for attempt in job.attempts:
            stop_s = end_s if attempt.end_s is None else attempt.end_s
            if attempt.host == host and stop_s > attempt.start_s:
                changes.setdefault(attempt.start_s, {})[job.id] = attempt.cores
                changes.setdefault(stop_s, {})[job.id] = 0.0
    pieces: dict[int, list[_Piece]] = {}
    held: dict[int, float] = {}
    for start_s, stop_s in pairwise(sorted(changes)):
        held |= changes[start_s]
        low = 0.0
        for job_id in sorted(held):
            if not held[job_id]:
                continue
            mine, high = pieces.setdefault(job_id, []), low + held[job_id]
            if mine and mine[-1][1:] == (start_s, low, high):
                mine[-1] = mine[-1]._replace(end_s=stop_s)
            else:
                mine.append(_Piece(start_s, stop_s, low, high))
            low = high
    return pieces


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
        if any(a.ended is ended and not (ended is Ended.RESIZED and a.cores) for a in attempts):
            handles.append(Line2D([], [], label=str(ended), **style))
    if any(result.allocations for result in results):
        handles.append(Patch(label="not there", **_AWAY))
    if any(result.cores for result in results):
        handles.append(Line2D([], [], label="all CPU cores", **_ALL))
    if any(result.lower_bound_s for result in results):
        handles.append(Line2D([], [], label="lower bound", **_BOUND))
    return handles


def span_of(results: Sequence[Result]) -> float:
    """The seconds that the time axis of these results has."""
    ends = [max(_end_s(result), result.lower_bound_s or 0.0) for result in results]
    return 1.01 * max(ends, default=0.0) or 1.0


def _end_s(result: Result) -> float:
    """The end of all jobs, also in the background."""
    return max(result.makespan_s, result.background_end_s or 0.0)


_Strip = tuple[int, int]
_WHOLE: _Strip = (0, 1)


def _strips(bars: Sequence[tuple[JobResult, AttemptResult]], end_s: float) -> dict[tuple[int, float], _Strip]:
    """For attempts that share a GPU, packed or side by side: which of how many parts of its row each gets.

    By job and start. Attempts that overlap, also by way of others, have parts of the same height.
    """
    packed = {attempt.gpus[0] for _, attempt in bars if attempt.role in (Role.PACKED, Role.SHARED)}
    strips: dict[tuple[int, float], _Strip] = {}
    for gpu in packed:
        mine = [
            (a.start_s, job.id, end_s if a.end_s is None else a.end_s) for job, a in bars if gpu in a.gpus
        ]
        ends: list[float] = []
        cluster: dict[tuple[int, float], int] = {}
        for start_s, job_id, stop_s in sorted(mine):
            if cluster and start_s >= max(ends):
                strips |= {key: (strip, len(ends)) for key, strip in cluster.items()}
                ends, cluster = [], {}
            free = next((i for i, taken_s in enumerate(ends) if taken_s <= start_s), len(ends))
            ends[free : free + 1] = [stop_s]
            cluster[job_id, start_s] = free
        strips |= {key: (strip, len(ends)) for key, strip in cluster.items()}
    return strips


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
