"""Background jobs, in words, for `explain`: the GPU that a job shares, the cost of that, why a job waits."""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.lanes import LaneGuest, slowdown
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import JobState
from hpcsched.core.nouns import reworded


def beside(machine: Machine, job: Job) -> list[str]:
    """The job's neighbours on its GPUs, or why a background job gets none."""
    from hpcsched.policy.background import why_waiting

    lanes, noun = machine.mechanism(Background).lanes, machine.ledger.noun
    if not job.spec.background:
        told = [_guest(machine, job, guest) for guest in lanes.beside(job)] if job.state.active else []
        return told + ([_cost(machine, job)] if told else [])
    lines = [lanes.quarantined[job.id].said(noun)] if job.id in lanes.quarantined else []
    if guest := lanes.guests.get(job.id):
        host = machine.run.active.get(machine.own.holder.get(guest.gpu, -1))
        where = f"beside {_name(host)}" if host else "which no other job has"
        lines.append(f"it has the background of {noun} {guest.gpu}, {where}; {_pace(guest)}")
        lines += [_cost(machine, host)] if host else []
    elif job.state in (JobState.PENDING, JobState.SUSPENDED) and not (job.held or job.unmet):
        lines += [
            f"not on {noun} {gpu}: {reworded(why, noun)}"
            for gpu, why in why_waiting(machine.mechanism(Background).view(), job)
        ]
    return lines


def _guest(machine: Machine, job: Job, guest: LaneGuest) -> str:
    where = f"{machine.ledger.noun} {guest.gpu}"
    return f"{_name(machine.run.jobs[guest.job_id])} is in the background of {where}; {_pace(guest)}"


def _pace(guest: LaneGuest) -> str:
    if guest.paused_s is not None:
        return "it pauses, for the speed without it to be measured"
    return "at its own speed" if guest.pace == 1 else f"paced to {guest.pace:.3g} of its own speed"


def _cost(machine: Machine, host: Job) -> str:
    from hpcsched.policy.background import expected

    cost = slowdown(
        machine.mechanism(Background).lanes.speed(host),
        expected(machine.mechanism(Background).view(), host),
    )
    found = "not measured yet" if cost is None else f"{cost:z.1%} slower than alone"
    return f"{_name(host)} is {found}; at most {100 * host.spec.max_foreground_slowdown:.3g}% is tolerated"


def _name(job: Job) -> str:
    return f"job {job.id} ({job.spec.name})"
