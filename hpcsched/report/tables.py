"""Plain-text tables of results for terminals and pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from hpcsched.core.model import JobState
from hpcsched.report.result import JobResult, Result

_HOUR_S = 3600
_GAP = "  "
_MOST_STRETCHES = 4


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
    through, `p` as primary and `s` as secondary; COST is what its suspends and resumes took.
    """
    jobs = result.jobs
    instants = [t for job in jobs for t in (job.submit_s, job.start_s, job.end_s) if t is not None]
    unit, clock = _time_format(instants)
    cost_unit, cost = _time_format(job.switch_s for job in jobs)
    columns = [
        _Column("JOBID", [str(job.id) for job in jobs]),
        _Column("NAME", [job.name for job in jobs], right=False),
        _Column("MODEL", [job.model for job in jobs], rank=6, right=False),
        _Column("ST", [job.state.code for job in jobs], rank=1, right=False),
        _Column(f"SUBMIT{unit}", [clock(job.submit_s) for job in jobs], rank=5),
        _Column(f"START{unit}", [clock(job.start_s) for job in jobs], rank=3),
        _Column(f"END{unit}", [clock(job.end_s) for job in jobs]),
        _Column(f"JCT{unit}", [clock(job.jct_s) for job in jobs], rank=2),
        _Column("GPUS", [_stretches(job) for job in jobs], right=False),
        _Column("STEPS", [_steps(job) for job in jobs], rank=4),
        _Column("SUSP", [str(job.suspensions) for job in jobs], rank=1),
        _Column(f"COST{cost_unit}", [cost(job.switch_s) for job in jobs], rank=2),
    ]
    for name in sorted({name for job in jobs for name in job.metrics}):
        cells = [f"{job.metrics[name]:#.4g}" if name in job.metrics else "-" for job in jobs]
        columns.append(_Column(name.upper(), cells, rank=1))
    return _render(columns, width)


def comparison_table(results: Sequence[Result], *, width: int | None = None) -> str:
    """A column per policy, a line per measure, each with its change relative to the first policy.

    Where the policies do not fit into `width` characters side by side they go on below, in blocks.
    """
    measures = [_Column("", ["makespan", "mean JCT", "p95 JCT", "lower bound"], right=False)]
    times = [[r.makespan_s, r.mean_jct_s, r.p95_jct_s, r.lower_bound_s] for r in results]
    unit, clock = _time_format(t for row in times for t in row if t is not None)
    labels = [f"{name}{unit}" for name in measures[0].cells]
    labels += ["gap to the bound(%)", "GPU-hours", "utilisation(%)", "overhead(%)"]

    blocks: list[list[_Column]] = [[]]
    head = _Column("", labels, right=False)
    first: list[float | None] = []
    for result, row in zip(results, times, strict=True):
        shares = [result.gap, result.utilisation, result.overhead_share]
        gap, utilisation, overhead = (None if share is None else 100 * share for share in shares)
        values = [*row, gap, result.gpu_hours, utilisation, overhead]
        texts = [clock(t) for t in row] + [
            _number(gap, "z.1f"),
            _number(result.gpu_hours, ".2f"),
            _number(utilisation, ".1f"),
            _number(overhead, ".1f"),
        ]
        columns = [_Column(result.policy, texts)]
        if first:
            changes = [_change(value, base) for value, base in zip(values, first, strict=True)]
            changes[len(row)] = ""  # of the gap, a share already
            columns.append(_Column("", changes))
        first = first or values
        if blocks[-1] and width is not None and _total([head, *blocks[-1], *columns]) > width:
            blocks.append([])
        blocks[-1] += columns
    return "\n\n".join(_render([head, *block], None) for block in blocks)


def headline(result: Result) -> str:
    """One line that sums a result up."""
    parts = [f"makespan {duration(result.makespan_s)}"]
    if result.mean_jct_s is not None:
        parts.append(f"mean JCT {duration(result.mean_jct_s)}")
    parts.append(f"{result.gpu_hours:.2f} GPU-hours")
    parts.append(f"utilisation {result.utilisation:.0%}")
    if result.gap is not None:
        parts.append(f"{result.gap:z.1%} above the bound")
    return f"{result.policy} on {result.gpus} GPU{'s' * (result.gpus != 1)}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """A duration with its unit, as text: `59.9 s`, from an hour on `1:02:03`."""
    return _clock(seconds) if seconds >= _HOUR_S else f"{seconds:.1f} s"


def _time_format(times: Iterable[float]) -> tuple[str, Callable[[float | None], str]]:
    """The header's unit and the formatter for times that stand together, so that they line up."""
    if max(times, default=0.0) >= _HOUR_S:
        return "", lambda t: "-" if t is None else _clock(t)
    return "(s)", lambda t: _number(t, ".1f")


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _change(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return ""
    percent = 100 * (value / base - 1)
    return "=" if abs(percent) < 0.05 else f"{percent:+.1f}%"


def _steps(job: JobResult) -> str:
    """The job's steps; how many of them are done if it is not through."""
    if job.step is None or job.state is JobState.COMPLETED:
        return str(job.steps or job.step or "-")
    return f"{job.step}/{job.steps}" if job.steps else str(job.step)


def _stretches(job: JobResult) -> str:
    """GPU counts and roles over time: `3s > 4p`; the middle is left out where there are many."""
    stretches = [key for key, _ in groupby(f"{len(a.gpus)}{a.role[0]}" for a in job.attempts)]
    if len(stretches) > _MOST_STRETCHES:
        stretches = [*stretches[: _MOST_STRETCHES - 2], "..", stretches[-1]]
    return " > ".join(stretches) or "-"


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _render(columns: list[_Column], width: int | None) -> str:
    columns = list(columns)
    while width is not None and _total(columns) > width:
        least = max(columns, key=lambda column: column.rank)
        if not least.rank:
            break
        columns.remove(least)
    return "\n".join(_GAP.join(row).rstrip() for row in zip(*(c.lines() for c in columns), strict=True))
