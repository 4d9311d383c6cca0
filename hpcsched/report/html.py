"""A run as one HTML page: how it went, its Gantt chart, its jobs, and how their batches and cores changed.

The page needs no other file, no script and no network; all that comes from users is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from string import Template

from msgspec import UNSET

from hpcsched.contract.seats import Seat
from hpcsched.core.mechanisms.cpu.layout import cores_of, said_seats
from hpcsched.core.model import Attempt, JobState
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.printing import printable
from hpcsched.report.drawing import INK, PALETTE
from hpcsched.report.result import JobResult, Result
from hpcsched.report.tables import duration, steps_done, stretches, time_format
from hpcsched.store.batches import Decision


@dataclass(frozen=True, kw_only=True)
class BatchHistory:
    """A job whose global batch changes: its decisions (at least one), what it was told, and their picture."""

    job_id: int
    name: str
    decisions: Sequence[Decision]
    options: WorkerOptions
    svg: str


@dataclass(frozen=True, kw_only=True)
class CoresHistory:
    """A job on CPU cores: its configurations (at least one), the cores it may have, and their picture."""

    job_id: int
    name: str
    attempts: Sequence[Attempt]
    budget: float
    svg: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """What there is to show of a run.

    `state` is the run's, `notes` say what else a reader should know. `gantt` is the chart as an SVG document
    (None: it could not be drawn). `efficiencies` are those of jobs by id, where they are known.
    """

    title: str
    state: str
    began: str
    result: Result
    gantt: str | None
    efficiencies: Mapping[int, float]
    histories: Sequence[BatchHistory] = ()
    configurations: Sequence[CoresHistory] = ()
    notes: Sequence[str] = ()

    def html(self) -> str:
        """The whole page."""
        numbers = count(1)
        parts = [f'<p class="note">{escape(note)}</p>' for note in self.notes]
        parts.append(_tiles(self._headline()))
        if self.gantt is not None:
            figure = _inline(self.gantt, next(numbers))
            parts.append(f"<h2>{self._resources()} over time</h2>\n<figure>{figure}</figure>")
        if self.result.jobs:
            parts.append(f"<h2>Jobs</h2>\n{_job_table(self.result, self.efficiencies)}\n{_EXPLAINED}")
        if self.configurations:
            parts.append(f"<h2>Configurations on CPU cores</h2>\n{_CHANGES}")
            parts += [_configuration(history, next(numbers)) for history in self.configurations]
        if self.histories:
            parts.append(f"<h2>Global batches</h2>\n{_DECISIONS}")
            parts += [_section(history, next(numbers)) for history in self.histories]
        page = _PAGE.substitute(
            title=escape(self.title),
            began=escape(self.began),
            style=_STYLE,
            policy=_POLICY,
            body="\n".join(parts),
        )
        return printable(page, lines=True)

    def _resources(self) -> str:
        """What the jobs had, in the words of a heading."""
        if self.result.core_hours is UNSET:
            return "GPUs"
        return "GPUs and CPU cores" if self.result.on_gpus else "CPU cores"

    def _headline(self) -> list[tuple[str, str]]:
        """What sums the run up, as (name, value)."""
        r = self.result
        over = r.jobs_total > 0 and self.state == "FINISHED"
        tiles = [
            ("state", self.state),
            ("policy", r.policy),
            *([("GPUs", str(r.gpus))] if r.on_gpus else []),
            *([("CPU cores", f"{sum(r.cores.values()):g}")] if r.cores else []),
            ("jobs completed", f"{r.jobs_completed} of {r.jobs_total}"),
            ("makespan" if over else "time so far", duration(r.makespan_s)),
            ("mean JCT", _or_dash(None if r.mean_jct_s is None else duration(r.mean_jct_s))),
        ]
        if r.on_gpus:
            tiles += [("GPU-hours", f"{r.gpu_hours:.2f}"), ("utilisation", f"{r.utilisation:.0%}")]
        if r.core_hours is not UNSET:
            tiles.append(("core-hours", f"{r.core_hours:.2f}"))
        tiles += [
            ("overhead", f"{r.overhead_share:.1%}"),
        ]
        if r.gap is not None:
            tiles.append(("above the bound", f"{r.gap:z.1%}"))
        if r.background_total:
            done = f"{r.background_completed} of {r.background_total}"
            tiles += [("in the background", done), ("GPU-hours there", f"{r.background_gpu_hours:.2f}")]
        return tiles


def _tiles(tiles: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">\n{cells}\n</dl>'


def _job_table(result: Result, efficiencies: Mapping[int, float]) -> str:
    jobs, now_s = result.jobs, max(result.makespan_s, result.background_end_s or 0.0)
    metrics = sorted({name for job in jobs for name in job.metrics})
    unit, clock = time_format(t for job in jobs for t in _times(job) if t is not None)
    times = [f"{name} {unit}".rstrip() for name in ("submit", "start", "end", "JCT")]
    heads = ["id", "name", "state", "GPUs", *times, "steps", "suspended", "overhead", "efficiency"]
    rows = []
    for job in jobs:
        cells = [
            str(job.id),
            job.name,
            str(job.state),
            stretches(job),
            *map(clock, _times(job)),
            steps_done(job),
            str(job.suspensions),
            _or_dash(_overhead(job, now_s)),
            _or_dash(f"{efficiencies[job.id]:.0%}" if job.id in efficiencies else None),
        ]
        for name in metrics:
            value = job.metrics.get(name)
            cells.append(_or_dash(None if value is None else f"{value:#.4g}"))
        rows.append(_row("td", cells, {**_LEFT, 2: f"left {_KINDS.get(job.state, 'open')}"}))
    head = _row("th", [*heads, *metrics], _LEFT)
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


_LEFT = {1: "left name", 2: "left", 3: "left"}
"""Columns of text: their classes."""

_KINDS = {JobState.COMPLETED: "good", JobState.FAILED: "bad", JobState.CANCELLED: "gone"}


def _row(tag: str, cells: Sequence[str], classes: Mapping[int, str]) -> str:
    marks = [f' class="{classes[column]}"' if column in classes else "" for column in range(len(cells))]
    made = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _times(job: JobResult) -> tuple[float | None, ...]:
    return job.submit_s, job.start_s, job.end_s, job.jct_s


def _overhead(job: JobResult, now_s: float) -> str | None:
    """The share of the time on GPUs or cores that was no training; None if there was no such time."""
    held_s = sum((now_s if a.end_s is None else a.end_s) - a.start_s for a in job.attempts)
    return f"{job.overhead_s / held_s:.1%}" if held_s > 0 else None


def _configuration(history: CoresHistory, number: int) -> str:
    """A job's configurations: a line on what it came to, the picture, and what led from one to the next."""
    attempts, last = history.attempts, history.attempts[-1]
    facts = [
        ("configuration", said_seats(last.seats)),
        ("cores", f"{cores_of(last.seats):.4g} of {history.budget:.4g}"),
        ("changes", str(len(attempts) - 1)),
    ]
    if rates := [attempt.usage.rate for attempt in attempts if attempt.usage]:
        facts.append(("steps/s", f"{rates[0]:.4g}" + (f" to {rates[-1]:.4g}" if len(rates) > 1 else "")))
    if last.usage:
        facts.append(("efficiency", _efficiency(last)))
    unit, clock = time_format(attempt.start_s for attempt in attempts)
    heads = [f"from {unit}".rstrip(), "servers", "workers", "cores", "steps/s", "efficiency", "why"]
    rows = [
        _row(
            "td",
            [
                clock(attempt.start_s),
                _shares([seat for seat in attempt.seats if seat.server]),
                _shares([seat for seat in attempt.seats if not seat.server]),
                f"{cores_of(attempt.seats):.4g}",
                f"{attempt.usage.rate:.4g}" if attempt.usage else "-",
                _efficiency(attempt),
                _or_dash(str(attempt.why) if attempt.why else None),
            ],
            {6: "left why"},
        )
        for attempt in attempts
    ]
    head, body = _row("th", heads, {6: "left"}), "\n".join(rows)
    table = f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
    return _section_of(history.job_id, history.name, facts, _inline(history.svg, number), table)


def _shares(seats: Sequence[Seat]) -> str:
    """How many processes, times the cores of each: 2 x 0.5; of different ones, 2 x 0.3-0.6."""
    low, high = min(seat.share for seat in seats), max(seat.share for seat in seats)
    return f"{len(seats)} x {low:.4g}" + (f"-{high:.4g}" if high > low else "")


def _efficiency(attempt: Attempt) -> str:
    """The cores used, of those that it had."""
    return f"{sum(attempt.usage.cpu) / cores_of(attempt.seats):.0%}" if attempt.usage else "-"


def _section(history: BatchHistory, number: int) -> str:
    """A job's batches: a line on where they are and what they follow, and the picture."""
    first, last, options = history.decisions[0], history.decisions[-1], history.options
    batch = f"{first.global_batch} samples"
    if last.global_batch != first.global_batch:
        batch = f"from {first.global_batch} to {last.global_batch} samples"
    facts = [("global batch", batch)]
    low, high = options.global_batch or (0, 0)
    if low < high:
        facts.append(("bounds", f"{low} to {high}"))
    ranks = f"{len(last.workers)} rank" + "s" * (len(last.workers) != 1)
    facts.append(("workers", f"{sum(last.workers)} of {last.local_batch} samples on {ranks}"))
    value = last.similarity if options.metric == "similarity" else last.noise_scale
    if value is not None:
        facts.append((options.metric.replace("-", " "), f"{value:.4g}"))
        facts.append(("target", f"{options.target:g}, every {options.every} updates"))
    facts.append(("learning rate", f"x {last.factor:.3g}"))
    if last.loss is not None:
        facts.append(("loss", f"{last.loss:.4g}"))
    return _section_of(history.job_id, history.name, facts, _inline(history.svg, number))


def _section_of(
    job_id: int, name: str, facts: Iterable[tuple[str, str]], figure: str, below: str = ""
) -> str:
    line = " &middot; ".join(f"{escape(name)} <b>{escape(text)}</b>" for name, text in facts)
    return (
        f'<section>\n<h3>{escape(f"Job {job_id}: {name}")}</h3>\n<p class="facts">{line}</p>\n'
        f"<figure>{figure}</figure>\n{below}</section>"
    )


def _inline(svg: str, number: int) -> str:
    """An SVG document as an element of a page that has others: its ids are those of figure `number`."""
    element = svg[svg.index("<svg") :]
    return re.sub(r'(<[^<>]*?\bid="|url\(#|href="#)', rf"\1f{number}-", element)


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text


_EXPLAINED = (
    '<p class="small">GPUs: the counts a job went through, p as primary or packed, s as secondary, b in the '
    "background; c: CPU cores. Submit, start and end count from the run's beginning. Overhead: share of the "
    "job's time on GPUs or cores that went into starts, resumes, suspends and changes. Efficiency: steps per "
    "GPU-second, overhead included, over those on one GPU by the model's profile, or as seen in this run; - "
    "where neither tells.</p>"
)
_DECISIONS = (
    '<p class="small">Each decision on a batch and its workers holds until the next one; the figures next to '
    "a job's name are the newest. Dotted lines: the job went on on other GPUs, or after a restart.</p>"
)

_CHANGES = (
    '<p class="small">Servers, workers: how many, times the cores of each. Steps/s and efficiency (cores '
    "used, of those it had) are what was measured last of a configuration; - where nothing was. Thin lines: "
    "changes while it trained on; dotted: starts after a stop.</p>"
)

_STYLE = Template("""
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: $ink; background: #fff;
  max-width: 1080px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 28px 0 8px; border-bottom: 1px solid #ddd; padding-bottom: 4px; }
h3 { font-size: 14px; margin: 20px 0 4px; }
.small, .facts, header p { color: #555; font-size: 12.5px; margin: 4px 0; }
.facts b { color: $ink; font-weight: 600; }
.note { border-left: 3px solid $orange; background: #fdf6ec; padding: 6px 10px; margin: 12px 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 16px 0; }
.tiles div { flex: none; min-width: 84px; border: 1px solid #ddd; border-radius: 4px; padding: 6px 10px; }
.tiles dt { color: #555; font-size: 12px; }
.tiles dd { margin: 0; font-size: 17px; font-weight: 600; }
figure { margin: 8px 0; }
figure svg { max-width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th { color: #555; font-weight: 600; border-bottom: 1px solid #aaa; }
.left { text-align: left; }
.why { white-space: normal; min-width: 380px; }
.name { white-space: normal; overflow-wrap: anywhere; min-width: 90px; max-width: 240px; }
.good { color: #00704f; } .bad { color: #c00000; font-weight: 600; } .gone { color: #777; }
.open { color: $blue; }
@page { size: A4 landscape; margin: 12mm; }
@media print { body { margin: 0; max-width: none; } .wide { overflow: visible; }
  table { font-size: 11px; } figure svg { max-height: 130mm; width: auto; }
  figure, .tiles, tr { break-inside: avoid; } h2, h3, h2 + .small, .facts { break-after: avoid; } }
""").substitute(ink=INK, orange=PALETTE[1], blue=PALETTE[4])

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:"
"""Nothing is loaded and nothing runs, whatever has got into the page."""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$began</p>
</header>
$body
</body>
</html>
""")
