"""How notebooks show a run and its jobs: HTML without scripts, in the notebook's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpcsched.durations import clock
from hpcsched.printing import printable
from hpcsched.store.status import JobStatus, Status

MOST_ROWS = 50
"""Jobs that are listed: those that are not over first (chosen)."""

_COLUMNS = ("ID", "NAME", "STATE", "GPUS", "STEP", "TIME", "LEFT", "REASON")


def run(status: Status) -> str:
    """A line about the run, and its jobs."""
    states: dict[str, int] = {}
    for job in status.jobs:
        states[job.state] = states.get(job.state, 0) + 1
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "no jobs"
    state = "its agent is gone" if status.run.stale else status.run.state
    return line(f"{status.run.dir}: {state}; {counts}") + jobs(status.jobs)


def jobs(found: Sequence[JobStatus]) -> str:
    """A table of jobs; nothing of none."""
    if not found:
        return ""
    shown = sorted(found, key=lambda job: job.state.final)[:MOST_ROWS]
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _COLUMNS)
    rows = "".join(f"<tr>{''.join(_cell(text) for text in _row(job))}</tr>" for job in shown)
    more = line(f"and {len(found) - len(shown)} more") if len(found) > len(shown) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def line(text: str) -> str:
    """A paragraph."""
    return f"<p>{_safe(text)}</p>"


def _row(job: JobStatus) -> Sequence[str]:
    steps = "-" if job.step is None else f"{job.step}/{job.steps}" if job.steps else str(job.step)
    return (
        str(job.id),
        job.name,
        job.state,
        ",".join(map(str, job.gpus)) or "-",
        steps,
        clock(job.elapsed_s),
        "-" if job.eta_s is None else clock(job.eta_s),
        job.why,
    )


def _cell(text: str) -> str:
    return f"<td style='text-align:left'>{_safe(text)}</td>"


def _safe(text: str) -> str:
    return escape(printable(text))
