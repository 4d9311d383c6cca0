"""Each job gets its whole hosts, one job after another: what the batch system alone would do.

MARBLE section VII-A calls it the LSF baseline. On several hosts jobs run side by side, each on hosts of its
own.
"""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.gpus import GpusByHost
from hpcsched.core.view import NO_RULES, Decision, Start, View


class Exclusive:
    """Strict FIFO, one job on a host, on as many of its GPUs as it may have."""

    name = "exclusive"
    work_conserving = False
    acts_when_full = False
    moves_packed = False
    reshapes = False
    spreads = True
    rules = NO_RULES

    def watches(self, job: Job) -> bool:
        return False

    def decide(self, view: View) -> list[Decision]:
        most = view.capacity.by_host()
        decisions: list[Decision] = []
        idle = {host: free for host, free in view.free.by_host().items() if free == most[host]}
        empty = GpusByHost(idle, spreads=view.free.spreads)
        if not empty.left:
            return []
        for job in view.waiting(view.capacity.fits):
            if not empty.fits(job.least, job.spec.nodes, job.spec.uneven, view.room(job, empty)):
                break
            gpus, hosts = view.pick(job, view.limits(job)[1], free=empty)
            reason = Reason(Why.EXCLUSIVE, {"gpus": gpus})
            decisions.append(Start(job=job, gpus=gpus, hosts=hosts, role=Role.PRIMARY, reason=reason))
            idle = {host: free for host, free in empty.by_host().items() if host not in hosts}
            empty = GpusByHost(idle, spreads=empty.spreads)
        return decisions
