"""Plain-text tables of results for terminals and pipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any

from msgspec import UNSET

from hpcsched.core.model import JobState, Role
from hpcsched.core.nouns import GPU, noun
from hpcsched.printing import fitting, said_cores
from hpcsched.report.result import AttemptResult, JobResult, Result

_SHOWN_H = 0.005
"""Fewer GPU-hours would be shown as none."""
_HOUR_S = 3600
_GAP = "  "
_TOGETHER = frozenset({Role.SHARED, Role.PACKED})


@dataclass(frozen=True)
class _Column:
    """A table's column; columns of a higher `rank` go first where the width is short, 0 never."""

    header: str
    cells: Sequence[str]
    rank: int = 0
    right: bool = True

    @cached_property
    def width(self) -> int:
        return max(map(len, (self.header, *self.cells)))

    def lines(self) -> list[str]:
        pad = str.rjust if self.right else str.ljust
        return [pad(text, self.width) for text in (self.header, *self.cells)]


def job_table(result: Result, *, width: int | None = None) -> str:
    """One line per job; columns that matter least are left out to fit into `width` characters.

    Ids and names are never cut, so a line can still be wider. GPUS tells the counts a job went
    through, `p` as primary, `s` as secondary, `b` in the background, `+` with others on one, or with a `c`
    its CPU cores; COST is what its starts, suspends and resumes took.
    """
    jobs = result.jobs
    instants = [t for job in jobs for t in (job.submit_s, job.start_s, job.end_s) if t is not None]
    unit, clock = time_format(instants)
    cost_unit, cost = time_format(job.overhead_s for job in jobs)
    columns = [
        _Column("JOBID", [str(job.id) for job in jobs]),
        _Column("NAME", [job.name for job in jobs], right=False),
        _Column("MODEL", [job.model for job in jobs], rank=6, right=False),
        _Column("ST", [job.state.code for job in jobs], rank=1, right=False),
        _Column(f"SUBMIT{unit}", [clock(job.submit_s) for job in jobs], rank=5),
        _Column(f"START{unit}", [clock(job.start_s) for job in jobs], rank=3),
        _Column(f"END{unit}", [clock(job.end_s) for job in jobs]),
        _Column(f"JCT{unit}", [clock(job.jct_s) for job in jobs], rank=2),
        _Column("GPUS", [stretches(job) for job in jobs], right=False),
        _Column("STEPS", [steps_done(job) for job in jobs], rank=4),
        _Column("SUSP", [str(job.suspensions) for job in jobs], rank=1),
        _Column(f"COST{cost_unit}", [cost(job.overhead_s) for job in jobs], rank=2),
    ]
    for name in sorted({name for job in jobs for name in job.metrics}):
        values = [job.metrics.get(name) for job in jobs]
        cells = ["-" if value is None else f"{value:#.4g}" for value in values]
        columns.append(_Column(name.upper(), cells, rank=1))
    return _render(columns, width)


def comparison_table(results: Sequence[Result], *, width: int | None = None, base: int = 0) -> str:
    """A column per policy, a line per measure, each with its change relative to `results[base]`.

    Changes are in percent of the value there; of a share (in %) they are in percentage points (pp). A
    line below says so. Results before the base are shown without. Where all this does not fit into
    `width` characters the changes are left out; where the policies do not fit even so, they go on
    below, in blocks.
    """
    rows = _measures(results)
    head = [_Column("", [row.label for row in rows], right=False)]
    plain, full = [], []
    for i, result in enumerate(results):
        column = _Column(result.title, [row.text(row.values[i]) for row in rows])
        changes = [row.change(row.values[i], row.values[base]) for row in rows]
        plain.append([column])
        full.append([column, _Column("", changes)] if i > base else [column])
    fits = width is None or _total([*head, *chain(*full)]) <= width
    narrow = not fits and width is not None and _total([*head, *chain(*plain)]) <= width
    table = _blocks(head, plain if narrow else full, width)
    compared = not narrow and len(results) > base + 1
    return f"{table}\n{_against(results[base])}" if compared else table


def _against(base: Result) -> str:
    """A line on the base of the changes, and their units."""
    return f"changes are against `{base.title}`: % of it, or percentage points (pp)"


def side_by_side(results: Sequence[Result], *, width: int | None = None) -> str:
    """One line per job, a column per policy: when the job ended there, and on which GPU counts it ran.

    The counts are left out where they do not fit into `width` characters. A job that has not completed
    shows its state instead, one that a policy did not have a dash.
    """
    names = {job.id: job.name for result in results for job in result.jobs}
    ids = sorted(names)
    ends = [job.end_s for result in results for job in result.jobs if job.end_s is not None]
    unit, clock = time_format(ends)
    head = [
        _Column("JOBID", [str(job_id) for job_id in ids]),
        _Column("NAME", [names[job_id] for job_id in ids], right=False),
    ]
    plain, full = [], []
    for result in results:
        by_id = {job.id: job for job in result.jobs}
        jobs = [by_id.get(job_id) for job_id in ids]
        end = _Column(result.title, ["-" if job is None else _ended(job, clock) for job in jobs])
        gpus = ["-" if job is None else stretches(job, ">", 3) for job in jobs]
        plain.append([end])
        full.append([end, _Column("GPUS", gpus, right=False)])
    fits = width is None or _total([*head, *chain(*full)]) <= width
    what = f"when each job ended{f' {unit}' if unit else ''}"
    on_cores = any(result.core_hours is not UNSET for result in results)
    roles = {attempt.role for result in results for job in result.jobs for attempt in job.attempts}
    counts = f"how many {noun_of(results)}s as primary (p) or secondary (s)"
    counts += " or with others (+)" * bool(roles & _TOGETHER)
    counts += " or CPU cores (c)" * on_cores
    what += f", on {counts}:" if fits else ":"
    return f"{what}\n{_blocks(head, full if fits else plain, width)}"


def allocation_table(results: Sequence[Result], *, width: int | None = None) -> str:
    """One line per allocation of these results, which have the same ones: when it came and went, and under
    each policy the GPU-hours that jobs used, of those for which it was in the run."""
    first = results[0].allocations or ()
    unit, clock = time_format(at for one in first for at in (one.start_s, one.end_s) if at is not None)
    head = [
        _Column("NODES", [str(one.nodes) for one in first]),
        _Column("GPUS", [str(one.gpus_per_node) for one in first]),
        *(
            [_Column("TYPE", [one.gpu_type or "-" for one in first])]
            if any(o.gpu_type for o in first)
            else ()
        ),
        _Column(f"FROM{unit}", [clock(one.start_s) for one in first]),
        _Column(f"UNTIL{unit}", [clock(one.end_s) for one in first]),
    ]
    groups = []
    for result in results:
        cells = [f"{one.used_gpu_hours:.2f} of {one.gpu_hours:.2f}" for one in result.allocations or ()]
        groups.append([_Column(result.title, cells)])
    return f"allocations, and {noun_of(results)}-hours used of each:\n{_blocks(head, groups, width)}"


def _ended(job: JobResult, clock: Callable[[float | None], str]) -> str:
    return clock(job.end_s) if job.state is JobState.COMPLETED else job.state.code


@dataclass(frozen=True)
class _Row:
    """A line of the comparison: a measure's value under each policy."""

    label: str
    values: Sequence[float | None]
    text: Callable[[float | None], str]
    change: Callable[[float | None, float | None], str]


def _measures(results: Sequence[Result]) -> list[_Row]:
    """The measures worth a line: bounds only where there are any."""
    times: list[float | None] = []
    for r in results:
        times += [r.makespan_s, r.lower_bound_s, r.mean_jct_s, r.mean_jct_bound_s, r.p95_jct_s]
        times += [r.background_end_s, r.background_mean_jct_s]
    unit, clock = time_format(t for t in times if t is not None)
    called = noun_of(results)

    def seconds(label: str, of: Callable[[Result], float | None]) -> _Row:
        return _Row(f"{label}{unit}", [of(r) for r in results], clock, _change)

    def share(label: str, of: Callable[[Result], float | None], change: Any = _points) -> _Row:
        shares = [of(r) for r in results]
        percent = [None if value is None else 100 * value for value in shares]
        return _Row(f"{label}(%)", percent, lambda value: _number(value, "z.1f"), change)

    rows = [seconds("makespan", lambda r: r.makespan_s)]
    if any(r.lower_bound_s is not None for r in results):
        rows.append(_Row(f"  lower bound{unit}", [r.lower_bound_s for r in results], clock, _nothing))
        rows.append(share("  gap to it", lambda r: r.gap, _nothing))
    rows.append(seconds("mean JCT", lambda r: r.mean_jct_s))
    if any(r.mean_jct_bound_s is not None for r in results):
        rows.append(_Row(f"  lower bound{unit}", [r.mean_jct_bound_s for r in results], clock, _nothing))
        rows.append(share("  gap to it", lambda r: r.jct_gap, _nothing))
    rows += [
        seconds("p95 JCT", lambda r: r.p95_jct_s),
        seconds("mean wait", lambda r: r.mean_wait_s),
    ]
    if any(r.on_gpus for r in results):
        rows.append(share("utilisation", lambda r: r.utilisation))
        rows.append(_Row(f"{called}-hours", [r.gpu_hours for r in results], _hours, _change))
    if any(r.idle and r.idle.given_back_gpu_hours for r in results):
        backs = [r.idle.given_back_gpu_hours if r.idle else None for r in results]
        rows.append(_Row(f"{called}-hours given back", backs, _hours, _change))
    if any(r.core_hours is not UNSET for r in results):
        rows.append(_Row("core-hours", [r.core_hours or 0.0 for r in results], _hours, _change))
    rows += [
        share("overhead", lambda r: r.overhead_share),
        _Row("switches", [r.switches for r in results], lambda v: _number(v, ".0f"), _more),
    ]
    if any(r.background_total for r in results):
        rows += [
            seconds("background: last end", lambda r: r.background_end_s),
            seconds("background: mean JCT", lambda r: r.background_mean_jct_s),
            _Row(f"background: {called}-hours", [r.background_gpu_hours for r in results], _hours, _change),
        ]
    if len({(r.jobs_completed, r.jobs_total) for r in results}) > 1:
        done = [f"{r.jobs_completed}/{r.jobs_total}" for r in results]
        rows.append(_Row("jobs completed", range(len(done)), lambda i: done[int(i or 0)], _nothing))
    return rows


def _blocks(head: list[_Column], groups: Sequence[list[_Column]], width: int | None) -> str:
    """A table; groups of columns that do not fit into the width go on below, each block with the head."""
    blocks: list[list[_Column]] = [[]]
    for group in groups:
        if blocks[-1] and width is not None and _total([*head, *blocks[-1], *group]) > width:
            blocks.append([])
        blocks[-1] += group
    return "\n\n".join(_render([*head, *block], None) for block in blocks)


def noun_of(results: Iterable[Result]) -> str:
    """What people call the devices of all these results."""
    return noun(kind for result in results for kind in result.devices or (GPU,))


def headline(result: Result) -> str:
    """One line that sums a result up."""
    told = duration if result.makespan_s < _HOUR_S else _clock
    parts = [f"makespan {told(result.makespan_s)}"]
    if result.mean_jct_s is not None:
        parts.append(f"mean JCT {told(result.mean_jct_s)}")
    if result.on_gpus:
        parts.append(f"{result.gpu_hours:.2f} {result.noun}-hours")
        parts.append(f"utilisation {result.utilisation:.0%}")
        if result.idle and result.idle.given_back_gpu_hours >= _SHOWN_H:
            parts.append(f"{result.idle.given_back_gpu_hours:.2f} {result.noun}-hours given back")
    if result.core_hours is not UNSET:
        parts.append(f"{result.core_hours:.2f} core-hours")
    if result.gap is not None:
        parts.append(f"{result.gap:z.1%} above the bound")
    who = f"{result.label} ({result.policy})" if result.label else result.policy
    return f"{who} on {_there(result)}: {', '.join(parts)}"


def _there(result: Result) -> str:
    """The GPUs and cores of the jobs, in words."""
    gpus = f"{result.gpus} {result.noun}{'s' * (result.gpus != 1)}"
    if not result.cores:
        return gpus
    count = sum(result.cores.values())
    cores = f"{count:.4g} CPU core{'s' * (count != 1)}"
    return f"{gpus} and {cores}" if result.on_gpus else cores


def duration(seconds: float) -> str:
    """A duration with its unit, as text: `59.9 s`, from an hour on `1:02:03`."""
    return _clock(seconds) if seconds >= _HOUR_S else f"{seconds:.1f} s"


def time_format(times: Iterable[float]) -> tuple[str, Callable[[float | None], str]]:
    """The header's unit and the formatter for times that stand together, so that they line up."""
    if max(times, default=0.0) >= _HOUR_S:
        return "", lambda t: "-" if t is None else _clock(t)
    return "(s)", lambda t: _number(t, ".1f")


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):  # at speeds near 0
        return str(seconds)
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _hours(value: float | None) -> str:
    return _number(value, ".2f")


def _change(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    percent = 100 * (value / base - 1)
    return "=" if abs(percent) < 0.05 else f"{percent:+.1f}%"


def _points(value: float | None, base: float | None) -> str:
    if value is None or base is None:
        return ""
    return "=" if abs(value - base) < 0.05 else f"{value - base:+.1f}pp"


def _more(value: float | None, base: float | None) -> str:
    if value is None or base is None:
        return ""
    return "=" if value == base else f"{value - base:+.0f}"


def _nothing(value: float | None, base: float | None) -> str:
    return ""


def steps_done(job: JobResult) -> str:
    """The job's steps; how many of them are done if it is not through."""
    if job.step is None or job.state is JobState.COMPLETED:
        return str(job.steps or job.step or "-")
    return f"{job.step}/{job.steps}" if job.steps else str(job.step)


def stretches(job: JobResult, arrow: str = " > ", most: int = 4) -> str:
    """GPU counts and roles over time, `3s > 4p`, `1+` on a shared one, or CPU cores, `0.3c > 0.9c`; the
    middle is left out where there are more than `most`."""
    stretches = [key for key, _ in groupby(map(_held, job.attempts))]
    if len(stretches) > most:
        stretches = [*stretches[: most - 2], "..", stretches[-1]]
    return arrow.join(stretches) or "-"


def _held(attempt: AttemptResult) -> str:
    if attempt.role is Role.CORES:
        return said_cores(attempt.cores)
    return f"{len(attempt.gpus)}{'+' if attempt.role in _TOGETHER else attempt.role[0]}"


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _render(columns: list[_Column], width: int | None) -> str:
    kept = fitting([column.width for column in columns], [column.rank for column in columns], width)
    lines = zip(*(columns[i].lines() for i in kept), strict=True)
    return "\n".join(_GAP.join(line).rstrip() for line in lines)
