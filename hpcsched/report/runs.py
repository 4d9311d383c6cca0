"""Several runs as one HTML page: their measures side by side, their Gantt charts on one time scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET

from hpcsched.printing import printable
from hpcsched.report.pieces import Table, inline, or_dash, row, template
from hpcsched.report.result import Result
from hpcsched.report.tables import noun_of, time_format


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """A run on the page: what it is called and where it lies, its state and its beginning, in words.

    `gantt` is its chart as an SVG document (None: it could not be drawn), `facts` are those on record of it,
    as (name, words).
    """

    name: str
    path: str
    state: str
    began: str
    result: Result
    gantt: str | None
    facts: Sequence[tuple[str, str]] = ()


class _Drawn(NamedTuple):
    """A run's section: `id` is what the table leads to."""

    part: RunPart
    id: str
    gantt: str | None


def runs_page(parts: Sequence[RunPart], notes: Sequence[str] = ()) -> str:
    """The whole page. Raises MissingExtra without jinja2."""
    drawn = [
        _Drawn(part, _anchor(number), None if part.gantt is None else inline(part.gantt, number))
        for number, part in enumerate(parts, 1)
    ]
    title, called = f"hpcsched: {len(parts)} runs", noun_of(part.result for part in parts)
    page = template("runs.html.jinja").render(
        title=title, notes=notes, table=_table(parts), parts=drawn, noun=called
    )
    return printable(page, lines=True)


def _anchor(number: int) -> str:
    return f"run-{number}"


def _table(parts: Sequence[RunPart]) -> Table:
    results = [part.result for part in parts]
    called = noun_of(results)
    unit, clock = time_format(
        at for result in results for at in (result.makespan_s, result.mean_jct_s) if at is not None
    )
    on_cores = any(result.core_hours is not UNSET for result in results)
    heads = ["run", "state", "policy", f"{called}s", f"makespan {unit}".rstrip(), "jobs completed"]
    heads += [f"mean JCT {unit}".rstrip(), f"{called}-hours", "utilisation", f"{called}-hours idle"]
    heads += [*(["core-hours"] if on_cores else []), "overhead", "work lost"]
    rows = []
    for number, (part, r) in enumerate(zip(parts, results, strict=True), 1):
        cells = [
            part.name,
            part.state,
            r.policy,
            str(r.gpus),
            clock(r.makespan_s),
            f"{r.jobs_completed} of {r.jobs_total}",
            clock(r.mean_jct_s),
            or_dash(f"{r.gpu_hours:.2f}" if r.on_gpus else None),
            or_dash(f"{r.utilisation:.0%}" if r.on_gpus else None),
            or_dash(f"{r.idle.gpu_hours:.2f}" if r.on_gpus and r.idle else None),
            *([or_dash(f"{r.core_hours:.2f}" if r.core_hours is not UNSET else None)] if on_cores else []),
            f"{r.overhead_of_held:.1%}",
            f"{r.lost_of_held:.1%}",
        ]
        line = [*row(cells, _LEFT)]
        line[0] = line[0]._replace(link=_anchor(number))
        rows.append(line)
    return Table(row(heads, _LEFT), rows)


_LEFT = {0: "left name", 1: "left", 2: "left"}
