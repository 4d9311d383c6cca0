"""Interference of jobs that share a GPU, in a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.profile import cost_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Interference that is the same for every pair of jobs.

    A background job has `background_share` of its own speed while a foreground job has the same GPU, and
    makes that job `foreground_slowdown` slower; paced down to a share of that, it costs the same share.
    Several guests of a job cost no more than the one that is paced down least: its ranks wait for each other.

    Jobs that share a GPU side by side want it for the shares of the time that their profiles say (`busy`; all
    of it where they do not): each has its share of what there is, and loses `sharing_loss` of that.
    """

    background_share: float = 0.5
    foreground_slowdown: float = 0.03
    sharing_loss: float = 0.03

    def factor(self, machine: Machine, job: Job) -> float:
        """The share of its own speed that a running job has now."""
        if machine.mechanism(Packing).used and job.gpus and (pack := pack_of(machine, job)):
            return _packed(machine, job, pack)
        if len(members := machine.mechanism(Sharing).with_it(job)) > 1:
            wanted = sum(_busy(machine, member) for member in members)
            return (1 - self.sharing_loss) / max(1.0, wanted)
        if not job.spec.background:
            shares = [guest.share for guest in machine.mechanism(Background).lanes.beside(job)]
            return 1 - self.foreground_slowdown * max(shares, default=0.0)
        guest = machine.mechanism(Background).lanes.guests[job.id]
        return guest.share * (self.background_share if guest.gpu in machine.own.holder else 1.0)


def _busy(machine: Machine, job: Job) -> float:
    profile = machine.estimates.loaded(job)
    known = cost_at(profile.busy, 1) if profile else None
    return 1.0 if known is None else known


def pack_of(machine: Machine, job: Job) -> list[Job]:
    """Who trains as one with a job, itself among them; empty if it is by itself."""
    riders = machine.mechanism(Packing).packs.on(job.gpus)
    holder = machine.own.holder.get(job.gpus[0])
    if not riders or job.spec.background or holder is None:
        return []
    return [machine.run.jobs[job_id] for job_id in (holder, *riders)]


def _packed(machine: Machine, job: Job, pack: list[Job]) -> float:
    """Its share of its own speed in a pack whose members go through the same samples in the same time.

    What a step of each adds to that is what was measured for as many models as there are of its kind, on
    average; what was not measured takes as long as one after the other, and so do models of different kinds.
    """
    kinds = Counter(member.spec.model for member in pack)
    together_s = sum(a_sample(machine, member, kinds[member.spec.model]) for member in pack)
    return min(1.0, a_sample(machine, job) / together_s)


def a_sample(machine: Machine, job: Job, packed: int | None = None) -> float:
    """What a model's part of a sample takes, alone or as one of so many in a pack, in seconds (of a step,
    where it is not known how many samples that has)."""
    profile = machine.estimates.profile(job)
    if profile is None:
        return 1.0
    known = profile.packed_step_s(packed) if packed else None
    step_s = known / packed if packed and known is not None else 1 / profile.rate(1)
    return step_s / (profile.global_batch or 1)
