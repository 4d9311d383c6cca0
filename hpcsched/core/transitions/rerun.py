"""Which jobs that have ended can run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Why
from hpcsched.core.run import Run

_BROKEN = tuple(state for state in JobState if state.failed or state is JobState.CANCELLED)


def coming_back(run: Run, ids: Iterable[int]) -> dict[int, int | None]:
    """The jobs that run again if these ones are to, in the order of ids; by each the one that brings it along
    (None: it was asked for itself).

    Who was cancelled because one of them did not complete comes back with it. Who waits for a job that has
    failed or was cancelled, and does not come back, stays as it is.
    """
    found: dict[int, int | None] = {i: None for i in ids if i in run.jobs and run.jobs[i].state.final}
    if not found:
        return {}  # without a look through all that were cancelled
    waiting: dict[str, list[Job]] = {}
    for job in run.jobs.in_state(JobState.CANCELLED):
        if job.reason and job.reason.why is Why.DEPENDENCY_NEVER_SATISFIED:
            for name in job.spec.after:
                waiting.setdefault(name, []).append(job)
    line = list(found)
    for job_id in line:
        for other in waiting.get(run.jobs[job_id].spec.name, ()):
            if other.id not in found:
                found[other.id] = job_id
                line.append(other.id)
    while stuck := [i for i in found if blocked_by(run, run.jobs[i], found)]:
        for job_id in stuck:
            del found[job_id]
    return dict(sorted(found.items()))


def blocked_by(run: Run, job: Job, back: Mapping[int, int | None]) -> str | None:
    """The name of a job that this one waits for in vain, unless that is among those that come `back`."""
    for name in job.spec.after:
        other = run.jobs[run.by_name[name]]
        if other.state in _BROKEN and other.id not in back:
            return name
    return None


def from_its_beginning(job: Job) -> bool:
    """Whether a job that is to run again has nothing left to do where it stands: it begins once more."""
    return job.state is JobState.COMPLETED and not job.remaining
