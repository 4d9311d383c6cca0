"""Arrays of jobs in `status`: one line for each, as squeue has it for what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpcsched.core.states import JobState
from hpcsched.printing import spans
from hpcsched.store.status import JobStatus

_MOST_ALIVE = (
    *(JobState.RUNNING, JobState.STARTING, JobState.SUSPENDING, JobState.SUSPENDED),
    *(JobState.PENDING, JobState.HELD),
    *(JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.TIMEOUT, JobState.CANCELLED, JobState.COMPLETED),
)


_WAITING = (JobState.PENDING, JobState.HELD, JobState.SUSPENDED)


@dataclass(frozen=True)
class Row:
    """A line: jobs of one array, or one job. `array`: all jobs of that array, also those not shown."""

    jobs: list[JobStatus]
    array: list[JobStatus] = field(default_factory=list)


def rows(jobs: Iterable[JobStatus], everything: Iterable[JobStatus]) -> list[Row]:
    """The lines for these jobs: an array has one, where its first job would be."""
    lines: dict[object, Row] = {}
    for job in jobs:
        lines.setdefault(job.array or job.id, Row([])).jobs.append(job)
    for job in everything:
        if job.array in lines:
            lines[job.array].array.append(job)
    return list(lines.values())


def text(row: Row, key: str, of_job: Callable[[JobStatus], str]) -> str:
    """What stands in a column of a line: of several jobs what can be said of all, or "-"."""
    jobs = row.jobs
    if len(jobs) == 1:
        return of_job(jobs[0])
    match key:
        case "%i":
            return spans(job.id for job in jobs)
        case "%j":
            return jobs[0].array
        case "%t" | "%T":
            return of_job(min(jobs, key=lambda job: _MOST_ALIVE.index(job.state)))
        case "%M":
            return of_job(max(jobs, key=lambda job: job.elapsed_s))
        case "%b":
            return ",".join(sorted({of_job(job) for job in jobs if job.gpus}, key=_by_number)) or "-"
        case "%s":
            return _steps(jobs)
        case "%R":
            return _where(row)
    found = {of_job(job) for job in jobs}
    return found.pop() if len(found) == 1 else "-"


def _by_number(text: str) -> tuple[int, str]:
    return len(text), text


def _steps(jobs: list[JobStatus]) -> str:
    whole = [job.steps for job in jobs if job.steps is not None]
    done = str(sum(job.step or 0 for job in jobs)) if any(job.step is not None for job in jobs) else "-"
    return f"{done}/{sum(whole)}" if len(whole) == len(jobs) else done


def _where(row: Row) -> str:
    counts = Counter(job.state.code for job in row.array)
    codes = dict.fromkeys(state.code for state in _MOST_ALIVE)
    said = ", ".join(f"{counts[code]} {code}" for code in codes if counts[code])
    reasons = Counter(job.reason for job in row.jobs if job.reason and job.state in _WAITING)
    if reasons:
        said += f"; {reasons.most_common(1)[0][0]}"
    hosts = ",".join(sorted({host for job in row.jobs for host in job.hosts}))
    return " ".join(filter(None, [hosts, f"({len(row.array)} jobs: {said})"]))
