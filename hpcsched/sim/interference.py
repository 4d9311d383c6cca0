"""What jobs that share a GPU cost each other, in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The same for every pair of jobs.

    A background job has `background_share` of its own speed while a foreground job has the same GPU, and
    makes that job `foreground_slowdown` slower; paced down to a share of that, it costs the same share.
    Several guests of a job cost no more than the one that is paced down least: its ranks wait for each other.
    """

    background_share: float = 0.5
    foreground_slowdown: float = 0.03

    def factor(self, machine: Machine, job: Job) -> float:
        """The share of its own speed that a running job has now."""
        if machine.packs.used and job.gpus and (pack := _pack(machine, job)):
            return _packed(machine, job, pack)
        if not job.spec.background:
            shares = [guest.share for guest in machine.lanes.beside(job)]
            return 1 - self.foreground_slowdown * max(shares, default=0.0)
        guest = machine.lanes.guests[job.id]
        return guest.share * (self.background_share if guest.gpu in machine.holder else 1.0)


def _pack(machine: Machine, job: Job) -> list[Job]:
    """Who trains as one with a job, itself among them; empty if it is by itself."""
    riders = machine.packs.on(job.gpus)
    holder = machine.holder.get(job.gpus[0])
    if not riders or job.spec.background or holder is None:
        return []
    return [machine.jobs[job_id] for job_id in (holder, *riders)]


def _packed(machine: Machine, job: Job, pack: list[Job]) -> float:
    """Its share of its own speed in a pack whose members make a step each in what these steps take as one.

    That is what was measured for so many models like each of them, on average; what was not measured takes as
    long as one after the other.
    """
    number = len(pack)
    alone = {member.id: _step_s(machine, member) for member in pack}
    together_s = 0.0
    for member in pack:
        profile = machine.profile(member)
        known = profile.packed_step_s(number) if profile else None
        together_s += known / number if known is not None else alone[member.id]
    return min(1.0, alone[job.id] / together_s)


def _step_s(machine: Machine, job: Job) -> float:
    profile = machine.profile(job)
    return 1 / profile.rate(1) if profile else 1.0
