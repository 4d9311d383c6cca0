"""Who rides on whose GPU: what the policy says of it, carried out."""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.core.deciding import Deciding
from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.packs import can_ride, is_packed
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Packing as Packs
from hpcsched.core.view import PackView, Ride


class Packing(Deciding):
    """A run's state in which jobs that may be packed are."""

    def pack_view(self) -> PackView:
        """The packs as a policy sees them now."""
        return PackView(
            now=self.now,
            packs=self.packs,
            devices=self.devices,
            jobs=self.jobs,
            holders={gpu: self.jobs[job_id] for gpu, job_id in self.holder.items()},
            guests=self.lanes.holder,
            waiting=self._waiting_at_all,
            in_time=self._in_time,
            loaded=self.loaded,
        )

    def _fill_packs(self) -> None:
        """Let those that still wait ride where the policy says."""
        if not (self.packs.used and len(self.queue) and isinstance(self.policy, Packs)):
            return
        for decision in self.policy.ride(self.pack_view()):
            self._ride(decision.job, decision)

    def _leaves_pack(self, job: Job) -> bool:
        """Whether a job that has left unasked did so because its pack has no room for it; once only."""
        if not is_packed(job.spec) or job.id in self.packs.alone:
            return False
        facts = {"gpu": job.current.gpus[0], "step": job.saved_step or 0}
        self.packs.alone[job.id] = Reason(Why.LEFT_PACK, facts)
        self._note(job, self.packs.alone[job.id])
        return True

    def _waiting_at_all(self) -> Iterator[Job]:
        return (self.jobs[job_id] for job_id in self.queue.walk(lambda need, nodes: True))

    def _ride(self, job: Job, decision: Ride) -> None:
        gpu = decision.gpu
        if job.id not in self.queue or gpu not in self.holder or not can_ride(job.spec, self.devices[gpu]):
            raise self._invalid(job, f"cannot ride on GPU {gpu}")
        self._note(job, decision.reason)
        self._launch(job, (gpu,), Role.PACKED)
