"""What a user's command will do to a job, in words: also when that is nothing."""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState


def outcome(machine: Machine, command: str, job_id: int) -> tuple[bool, str]:
    """Whether the command will do something to the job as it is now, and what, or why not."""
    job = machine.jobs[job_id]
    if job.state.final:
        return False, f"is {job.state} already: nothing to {command}"
    return _OUTCOMES[command](job)


def _cancel(job: Job) -> tuple[bool, str]:
    if job.wanted == "cancel":
        return False, "is being cancelled already"
    return True, "is told to end" if job.state.active else "cancelled"


def _hold(job: Job) -> tuple[bool, str]:
    if job.state.active:
        return False, "runs, and only waiting jobs are held: suspend it instead"
    if job.held or job.state is JobState.HELD:
        return False, "is held already"
    return True, "held"


def _suspend(job: Job) -> tuple[bool, str]:
    if job.wanted == "cancel":
        return False, "is being cancelled"
    if job.held or job.state is JobState.HELD:
        return False, "stays away already until it is resumed"
    if job.state is JobState.PENDING:
        return False, "does not run yet: hold it instead"
    if job.state is JobState.SUSPENDED:
        return True, "stays suspended until it is resumed"
    if not job.ready and job.state is not JobState.SUSPENDING:
        return True, "is asked to save as soon as it says that it can"
    return True, "is asked to save and leave"


def _let_go(job: Job) -> tuple[bool, str]:
    if not job.held and job.state is not JobState.HELD:
        return False, "is neither held nor suspended by you"
    return True, "goes on as soon as GPUs are free"


_OUTCOMES = {"cancel": _cancel, "hold": _hold, "suspend": _suspend, "release": _let_go, "resume": _let_go}
