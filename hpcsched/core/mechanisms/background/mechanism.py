"""Background jobs: each beside the foreground job of a GPU, at a low priority (DeepPool, section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from hpcsched.core.actions import Pace, Suspend, Terminate
from hpcsched.core.events import AgentStarted
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.background.lanes import Lanes
from hpcsched.core.mechanisms.background.view import BackgroundRule, LaneView, SetPace, Share, Yield
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.mechanisms.speed import Speed
from hpcsched.core.model import JobSpec, JobState, Role
from hpcsched.core.parts import Parts
from hpcsched.core.profile import cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain

MOVED = "gives way"
"""What is wanted of a job on a background lane that cannot save yet, and has to leave."""

PATIENCE = 10
"""Factor by which a job may take longer to leave that gets only what others leave of a CPU slot (chosen)."""


class Background(Mechanism):
    """Leases on the background lanes of GPUs."""

    name = "background"
    role = Role.BACKGROUND
    foreground = False
    teaches = False
    timer = ("lanes", 0, 0)

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.lanes = Lanes()
        self._run, self._out, self._ledger, self._own = parts.run, parts.out, parts.ledger, parts.own
        self._estimates, self._deadline = parts.estimates, parts.deadline
        self._attempts, self._decisions = parts.attempts, parts.decisions
        self._due = -inf

    @property
    def busy(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.lanes.holder) or len(self.queue) > 0

    def needed_by(self, spec: JobSpec) -> bool:
        return spec.background

    def waits(self, job: Job) -> bool:
        return job.spec.background

    def waiting_reason(self, job: Job) -> Reason:
        return self._deadline.too_late(job) or Reason(Why.NO_LANE)

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        self._lease(job, target.gpus)

    def release(self, job: Job) -> None:
        self._lease(job, ())

    def _lease(self, job: Job, gpus: tuple[int, ...]) -> None:
        self.lanes.lease(job.id, gpus, self._run.now)
        job.gpus = gpus
        self._run.touch(job.id)

    def on(self, gpu: int) -> tuple[int, ...]:
        return (self.lanes.holder[gpu],) if gpu in self.lanes.holder else ()

    # --- jobs that run ----------------------------------------------------------------------

    def hosts(self, job: Job) -> list[Job]:
        """The foreground job of the GPU whose background lane the job has: one, or none."""
        holder = self._own.holder
        return [self._run.jobs[holder[gpu]] for gpu in job.gpus if gpu in holder]

    def room_mib(self, job: Job) -> float | None:
        """What a background job may take of its GPU's memory, in MiB: all but what the profile of the
        foreground job there says; None where that is not known, or nobody is there."""
        holder = self._own.holder.get(job.gpus[0]) if job.spec.background and job.gpus else None
        device = None if holder is None else self._ledger.devices.get(job.gpus[0])
        if holder is None or device is None or device.memory_mib is None:
            return None
        host = self._run.jobs[holder]
        profile = self._estimates.loaded(host)
        need = cost_at(profile.memory_mib, host.width) if profile else None
        return None if need is None else device.memory_mib - need

    def met(self, job: Job) -> None:
        """Remember who shares a GPU with whom: a guest may be gone before what it did is seen."""
        for host in self.hosts(job) if job.spec.background else [job]:
            attempt = host.current
            there = [guest.job_id for guest in self.lanes.beside(host)]
            attempt.guests += tuple(job_id for job_id in there if job_id not in attempt.guests)

    def over(self, job: Job) -> None:
        self.lanes.gone(job.id)

    def saving(self) -> Iterable[Job]:
        return [self._run.jobs[job_id] for job_id in self.lanes.guests]

    def costs_key(self, job: Job) -> str:
        """Their own: what a job does beside another one says nothing of its model's usual costs."""
        return f"{job.spec.model} in the background"

    def patience(self, job: Job) -> int:
        """More on the lane of a CPU slot, where it hardly gets time and nobody wants its memory."""
        devices = self._ledger.devices
        slow = all(devices[gpu].kind == "cpu" for gpu in job.gpus if gpu in devices)
        return PATIENCE if slow else 1

    def disturbed(self, job: Job, gpus: Iterable[int]) -> list[Job]:
        holder = self._own.holder
        hosts = {holder[gpu] for gpu in gpus if gpu in holder}
        for host in hosts:
            self.lanes.disturb(host, self._run.now)
        return [self._run.jobs[host] for host in hosts]

    def heard(self, job: Job, step: int, at: float) -> None:
        if not job.spec.background:
            self.lanes.hear(job, step, at)

    def alone(self, job: Job, step: int, at: float) -> bool:
        self.lanes.observe(job, step, at)
        return not self.lanes.shared(job)

    # --- faults -----------------------------------------------------------------------------

    def suspects(self, job: Job) -> list[tuple[Job, Job]]:
        """A background job that fails, and the guests of a foreground job that does, but each only once."""
        if job.spec.background:
            return [(job, host) for host in self.hosts(job)]
        guests = (self._run.jobs[i] for i in job.current.guests if i not in job.traits.excuses)
        return [(guest, job) for guest in guests if guest.spec.background]

    def separate(self, guest: Job, host: Job) -> None:
        """Quarantine the guest: it shares no GPU any more, if it is not over by now."""
        if not guest.spec.background or guest.id in self.lanes.quarantined or guest.state.final:
            return
        lanes = [attempt.gpus[0] for attempt in reversed(guest.attempts) if attempt.gpus]
        gpu = next((gpu for gpu in lanes if gpu in host.current.gpus), lanes[0])
        facts = {"gpu": gpu, "job": host.id, "name": host.spec.name}
        self.lanes.quarantined[guest.id] = Reason(Why.QUARANTINED, facts)
        self._out.note(guest, self.lanes.quarantined[guest.id])

    # --- decisions --------------------------------------------------------------------------

    def begin_life(self, event: AgentStarted) -> None:
        self._due = -inf
        for job_id in event.adopted:
            self.lanes.disturb(job_id, self._run.now)

    def view(self) -> LaneView:
        """The background lanes as a rule sees them now."""
        estimates, deadline = self._estimates, self._deadline
        return LaneView(
            now=self._run.now,
            lanes=self.lanes,
            devices=self._ledger.devices,
            jobs=self._run.jobs,
            foreground=lambda gpu: self._run.active.get(self._own.holder.get(gpu, -1)),
            waiting=self._waiting,
            until=deadline.saves_before(self),
            in_time=lambda job, others: deadline.too_late(job, *others) is None,
            # What a job has said of itself is a forecast: what it does is measured.
            profile=lambda job: None if job.id in estimates.said else estimates.profile(job),
            loaded=estimates.loaded,
        )

    def decide(self) -> None:
        """Have those leave that are to, before all else that was decided; others start after all else."""
        if not self.busy:
            return
        rule: BackgroundRule | None = self._decisions.rule(self.name)
        if rule is None:
            return

        def act() -> None:
            while self._carry_out(rule):
                pass  # two models have been parted: others of them may share a GPU too

        self._out.put_first(act, (Suspend, Terminate))

    def _carry_out(self, rule: BackgroundRule) -> bool:
        """Do what the rule says; whether two models have been parted."""
        decisions = rule.share(self.view())
        for decision in decisions:
            match decision:
                case Share():
                    self._start(decision.job, decision)
                case SetPace():
                    self._pace(decision.job, decision)
                case Yield():
                    self._yield(decision.job, decision)
                case LookAgain(at=at) if at != self._due:
                    self._due = at
                    self._out.set_timer(self.timer, at)
        return any(isinstance(decision, Yield) and decision.costly for decision in decisions)

    def _waiting(self) -> Iterator[Job]:
        return (self._run.jobs[job_id] for job_id in self.queue.walk())

    def _start(self, job: Job, decision: Share) -> None:
        free = decision.gpu in self._ledger.devices and decision.gpu not in self.lanes.holder
        if job.id not in self.queue or not free:
            raise self._out.invalid(job, f"cannot start in the background of GPU {decision.gpu}")
        self._out.note(job, decision.reason)
        self._attempts.launch(job, Target((decision.gpu,), Role.BACKGROUND, self._run.now))

    def _pace(self, job: Job, decision: SetPace) -> None:
        guest = self.lanes.guests.get(job.id)
        if guest is None or not 0 <= decision.share <= 1:
            raise self._out.invalid(job, f"cannot go at {decision.share} of its speed")
        if decision.share == 0:
            guest.paused_s = self._run.now
        else:
            if guest.paused_s is not None:
                guest.most = 1.0
            elif decision.share < guest.pace:
                guest.most = decision.share
            for speed in self._speeds_beside(job) if guest.paused_s is None else ():
                speed.anew = False
            guest.pace, guest.paused_s = decision.share, None
        if decision.reason:
            self._out.note(job, decision.reason)
        self._estimates.disturb(job, job.gpus)
        self._out.do(Pace, job, share=decision.share)

    def _speeds_beside(self, job: Job) -> list[Speed]:
        """What was measured of the foreground job that it shares a GPU with."""
        return [speed for host in self.hosts(job) if (speed := self.lanes.speed(host))]

    def _yield(self, job: Job, decision: Yield) -> None:
        leaving = job.state is JobState.SUSPENDING or job.wanted not in ("", "suspend")
        if job.id not in self.lanes.guests or leaving:
            raise self._out.invalid(job, "cannot leave its background lane")
        self._out.note(job, decision.reason)
        host = decision.host
        if host and decision.costly:
            self.lanes.costly[host.spec.model, job.spec.model] = decision.reason
            self._out.note(host, decision.reason)
        for speed in self._speeds_beside(job) if decision.unknown else ():
            speed.own, speed.measured_only = None, True
        self._attempts.leave(job, MOVED)
