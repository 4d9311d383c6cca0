"""Who is on the background lanes: what the policy says of them, carried out."""

from __future__ import annotations

from collections.abc import Iterator

from hpcsched.core.actions import Pace as PaceAction
from hpcsched.core.actions import SetTimer, Suspend, Terminate
from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState, Role
from hpcsched.core.resources.background import Speed
from hpcsched.core.transitions.attempts import LANES
from hpcsched.core.transitions.packing import Packing
from hpcsched.core.view import LaneView, LookAgain, Pace, Share, Sharing, Yield

MOVED = "gives way"
"""What is wanted of a job on a background lane that cannot save yet, and has to leave."""


class Lending(Packing):
    """A run's state whose background lanes are lent out."""

    def lane_view(self) -> LaneView:
        """The background lanes as a policy sees them now."""
        return LaneView(
            now=self.now,
            lanes=self.lanes,
            devices=self.devices,
            jobs=self.jobs,
            foreground=lambda gpu: self.active.get(self.holder.get(gpu, -1)),
            waiting=self._waiting_for_lanes,
            until=self.background_until(),
            in_time=lambda job, others: self._too_late(job, *others) is None,
            # What a job has said of itself is a forecast: what it does is measured.
            profile=lambda job: None if job.id in self.proposals.of else self.profile(job),
            loaded=self.loaded,
        )

    def _fill_lanes(self) -> None:
        """Have those leave that are to, before all else that was decided; others start after all else."""
        if not (self.lanes.busy and isinstance(self.policy, Sharing)):
            return
        foreground, self._actions = self._actions, []
        while self._lend(self.policy):
            pass  # two models have been parted: others of them may share a GPU too
        leaving = [action for action in self._actions if isinstance(action, (Suspend, Terminate))]
        others = [action for action in self._actions if not isinstance(action, (Suspend, Terminate))]
        self._actions = [*leaving, *foreground, *others]

    def _lend(self, policy: Sharing) -> bool:
        """Do what the policy says; whether two models have been parted."""
        decisions = policy.share(self.lane_view())
        for decision in decisions:
            match decision:
                case Share():
                    self._start_beside(decision.job, decision)
                case Pace():
                    self._pace(decision.job, decision)
                case Yield():
                    self._yield(decision.job, decision)
                case LookAgain(at=at) if at != self._lanes_due:
                    self._lanes_due = at
                    self._actions.append(SetTimer(at=self.now, cause=self._cause, key=LANES, due=at))
        return any(isinstance(decision, Yield) and decision.costly for decision in decisions)

    def _waiting_for_lanes(self) -> Iterator[Job]:
        return (self.jobs[job_id] for job_id in self.lanes.queue.walk(lambda need, nodes: True))

    def _start_beside(self, job: Job, decision: Share) -> None:
        free = decision.gpu in self.devices and decision.gpu not in self.lanes.holder
        if job.id not in self.lanes.queue or not free:
            raise self._invalid(job, f"cannot start in the background of GPU {decision.gpu}")
        self._note(job, decision.reason)
        self._launch(job, (decision.gpu,), Role.BACKGROUND)

    def _pace(self, job: Job, decision: Pace) -> None:
        guest = self.lanes.guests.get(job.id)
        if guest is None or not 0 <= decision.share <= 1:
            raise self._invalid(job, f"cannot go at {decision.share} of its speed")
        if decision.share == 0:
            guest.paused_s = self.now
        else:
            if guest.paused_s is not None:
                guest.most = 1.0
            elif decision.share < guest.pace:
                guest.most = decision.share
            for speed in self._speeds_beside(job) if guest.paused_s is None else ():
                speed.anew = False
            guest.pace, guest.paused_s = decision.share, None
        if decision.reason:
            self._note(job, decision.reason)
        self._disturb(job, job.gpus)
        self._do(PaceAction, job, share=decision.share)

    def _speeds_beside(self, job: Job) -> list[Speed]:
        """What was measured of the foreground job that it shares a GPU with."""
        return [speed for host in self._beside(job) if (speed := self.lanes.speed(host))]

    def _yield(self, job: Job, decision: Yield) -> None:
        if (
            job.id not in self.lanes.guests
            or job.state is JobState.SUSPENDING
            or job.wanted not in ("", "suspend")
        ):
            raise self._invalid(job, "cannot leave its background lane")
        self._note(job, decision.reason)
        host = decision.host
        if host and decision.costly:
            self.lanes.costly[host.spec.model, job.spec.model] = decision.reason
            self._note(host, decision.reason)
        for speed in self._speeds_beside(job) if decision.unknown else ():
            speed.own, speed.measured_only = None, True
        self._leave(job, MOVED)
