"""Each job gets its whole hosts, one job after another: what the batch system alone would do.

MARBLE section VII-A calls it the LSF baseline.
"""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Decision, Start, View


class Exclusive:
    """Strict FIFO, one job at a time, on as many GPUs as it may have."""

    name = "exclusive"
    work_conserving = False
    acts_when_full = False

    def watches(self, job: Job) -> bool:
        return False

    def decide(self, view: View) -> list[Decision]:
        if view.running or not view.rooms.left:
            return []
        for job in view.waiting(view.rooms.fits):
            gpus, hosts = view.rooms.pick(view.limits(job)[1], job.spec.nodes)
            reason = Reason(Why.EXCLUSIVE, {"gpus": gpus})
            return [Start(job=job, gpus=gpus, hosts=hosts, role=Role.PRIMARY, reason=reason)]
        return []
