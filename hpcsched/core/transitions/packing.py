"""Who rides on whose GPU: what the policy says of it, carried out."""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.core.actions import SetTimer
from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.packing import can_ride, is_packed
from hpcsched.core.transitions.attempts import PACKS
from hpcsched.core.transitions.elastic import Elastic
from hpcsched.core.view import LookAgain, PackView, Part, Ride
from hpcsched.core.view import Packing as Packs


class Packing(Elastic):
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
            free=len(self.free),
            left_s=self.left_s(),
            waiting=self._waiting_at_all,
            in_time=self._in_time,
            loaded=self.loaded,
            save_s=self._save_s,
            launch_s=self._launch_s,
        )

    def _fill_packs(self) -> None:
        """Let those that still wait ride where the policy says, and those that ride go to what is left."""
        if not self.packs.used:
            return
        if len(self.queue) or not self.free:
            self.packs.idle_s = None
        elif self.packs.idle_s is None:
            self.packs.idle_s = self.now
        if self._plan_asked:
            return  # who is to start on what is free comes first
        anything = len(self.queue) or (self.free and self.packs.riders)
        if not (anything and isinstance(self.policy, Packs)):
            return
        for decision in self.policy.ride(self.pack_view()):
            match decision:
                case Ride():
                    self._ride(decision.job, decision)
                case Part():
                    self._part(decision.job, decision)
                case LookAgain(at=at) if at != self._packs_due:
                    self._packs_due = at
                    self._actions.append(SetTimer(at=self.now, cause=self._cause, key=PACKS, due=at))

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

    def _part(self, job: Job, decision: Part) -> None:
        if job.id not in self.packs.gpu_of or not job.settled:
            raise self._invalid(job, "cannot leave its pack")
        self._note(job, decision.reason)
        self.packs.parted.add(job.id)
        self._suspend(job)
