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
        if not job.spec.background:
            shares = [guest.share for guest in machine.lanes.beside(job)]
            return 1 - self.foreground_slowdown * max(shares, default=0.0)
        guest = machine.lanes.guests[job.id]
        return guest.share * (self.background_share if guest.gpu in machine.holder else 1.0)
