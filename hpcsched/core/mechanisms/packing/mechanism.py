"""Packs: several trainings on one GPU in one process (pack, sections 2.2 and 5.2).

One of them holds the GPU as any job does; the others ride: they have attempts of their own, and hold none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from hpcsched.core.events import AgentStarted
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.mechanisms.packing.packs import Packs, can_ride, is_packed
from hpcsched.core.mechanisms.packing.view import PackingRule, PackView, Part, Ride
from hpcsched.core.mechanisms.riders import RiderLeases
from hpcsched.core.model import Attempt, JobSpec, Role
from hpcsched.core.parts import Parts
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain


class Packing(Mechanism):
    """Places in packs; whichever has been there longest inherits the GPU when its holder leaves."""

    name = "packing"
    role = Role.PACKED
    timer = ("packs", 0, 0)

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.packs = Packs()
        self._leases = RiderLeases(self.packs, parts.run, parts.own)
        self._run, self._out, self._ledger, self._own = parts.run, parts.out, parts.ledger, parts.own
        self._estimates, self._deadline = parts.estimates, parts.deadline
        self._attempts, self._decisions = parts.attempts, parts.decisions
        self._due = -inf

    def needed_by(self, spec: JobSpec) -> bool:
        return is_packed(spec)

    def has(self, job: Job) -> bool:
        return job.id in self.packs.gpu_of

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        self._leases.hold(job, target)

    def release(self, job: Job) -> None:
        self._leases.release(job)

    def inherit(self, gpu: int) -> bool:
        return self._leases.inherit(gpu)

    def held_from_s(self, job: Job, attempt: Attempt) -> float | None:
        return self._leases.held_from_s(job, attempt)

    def on(self, gpu: int) -> tuple[int, ...]:
        return self.packs.on((gpu,))

    # --- jobs that run ----------------------------------------------------------------------

    def saving(self) -> Iterable[Job]:
        return [self._run.jobs[job_id] for job_id in self.packs.gpu_of]

    def alone(self, job: Job, step: int, at: float) -> bool:
        return not self.packs.shared(job)

    def left_unasked(self, job: Job) -> str:
        """Its pack has no room for it; it is not packed again."""
        if not is_packed(job.spec) or job.id in self.packs.alone:
            return ""
        facts = {"gpu": job.current.gpus[0], "step": job.saved_step or 0}
        self.packs.alone[job.id] = Reason(Why.LEFT_PACK, facts)
        self._out.note(job, self.packs.alone[job.id])
        return "its pack had no room for it"

    # --- decisions --------------------------------------------------------------------------

    def begin_life(self, event: AgentStarted) -> None:
        self._due = -inf
        self.packs.idle_s, self.packs.parted = None, set()

    def view(self) -> PackView:
        """The packs as a rule sees them now."""
        return PackView(
            now=self._run.now,
            rules=self._run.rules,
            packs=self.packs,
            devices=self._ledger.devices,
            jobs=self._run.jobs,
            holders={gpu: self._run.jobs[job_id] for gpu, job_id in self._own.holder.items()},
            shared=self._shared,
            free=len(self._ledger.free),
            left_s=self._deadline.left_s(),
            waiting=self._waiting,
            in_time=self._deadline.in_time,
            loaded=self._estimates.loaded,
            save_s=self._estimates.save_s,
            launch_s=self._estimates.launch_s,
        )

    def decide(self) -> None:
        """Let those that still wait ride where the rule says, and those that ride go to what is left."""
        if not self.used:
            return
        waiting, free = len(self._own.queue), len(self._ledger.free)
        if waiting or not free:
            self.packs.idle_s = None
        elif self.packs.idle_s is None:
            self.packs.idle_s = self._run.now
        rule: PackingRule | None = self._decisions.rule(self.name)
        # Those that are to start on what is free come first.
        if rule is None or self._decisions.plan_asked or not (waiting or (free and self.packs.riders)):
            return
        for decision in rule.ride(self.view()):
            match decision:
                case Ride():
                    self._ride(decision.job, decision)
                case Part():
                    self._part(decision.job, decision)
                case LookAgain(at=at) if at != self._due:
                    self._due = at
                    self._out.set_timer(self.timer, at)

    def _shared(self, gpu: int) -> bool:
        """Whether a GPU is used by jobs that neither hold it nor ride on it."""
        others = (one for one in self._ledger.mechanisms if one not in (self, self._own))
        return any(one.on(gpu) for one in others)

    def _waiting(self) -> Iterator[Job]:
        return (self._run.jobs[job_id] for job_id in self._own.queue.walk())

    def _ride(self, job: Job, decision: Ride) -> None:
        gpu = decision.gpu
        there = gpu in self._own.holder and can_ride(job.spec, self._ledger.devices[gpu])
        if job.id not in self._own.queue or not there:
            raise self._out.invalid(job, f"cannot ride on GPU {gpu}")
        self._out.note(job, decision.reason)
        came = {"job": job.id, "name": job.spec.name, "gpu": gpu, "what": "they train as one"}
        self._out.note_news(self._run.jobs[self._own.holder[gpu]], Reason(Why.JOINED, came))
        self._attempts.launch(job, Target((gpu,), Role.PACKED, self._run.now))

    def _part(self, job: Job, decision: Part) -> None:
        if job.id not in self.packs.gpu_of or not job.settled:
            raise self._out.invalid(job, "cannot leave its pack")
        self._out.note(job, decision.reason)
        self.packs.parted.add(job.id)
        self._attempts.suspend(job)
