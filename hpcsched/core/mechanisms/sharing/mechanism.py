"""Jobs that share a GPU: each with an attempt of its own, side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import inf

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.mechanisms.riders import RiderLeases
from hpcsched.core.mechanisms.sharing.shares import (
    GROWTH,
    RESERVE,
    Shares,
    Use,
    asked_mib,
    mixture,
    share_of,
    shares_a_gpu,
)
from hpcsched.core.mechanisms.sharing.view import Join, Separate, ShareView, SharingRule, Worth
from hpcsched.core.model import MOST_JOBS, Attempt, JobSpec, Role
from hpcsched.core.parts import Parts
from hpcsched.core.profile import cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain

OUT_OF_MEMORY = re.compile(
    "out of memory|out_?of_?memory|resource_exhausted|alloc_failed|memoryallocation|memoryerror",
    re.IGNORECASE,
)
"""What frameworks and CUDA say when there is no memory."""

JUST_NOW_S = 10.0
"""Time after its end in which a job may still be to blame for the failure of one beside it (chosen)."""

TWICE = 2.0
"""How many times its limit a job is taken to need that did not ask for that limit, and exceeded it (chosen):
nobody knows how much more it would have taken, and retries are few."""

MORE = 1.25
"""So many times the memory that it ran out with is a job's need taken to be, at least (chosen)."""


class Sharing(Mechanism):
    """Places on GPUs that others hold; whichever has been there longest inherits the GPU."""

    name = "sharing"
    role = Role.SHARED
    timer = ("shares", 0, 0)

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.shares = Shares()
        self._leases = RiderLeases(self.shares, parts.run, parts.own)
        self._run, self._out, self._ledger, self._own = parts.run, parts.out, parts.ledger, parts.own
        self._rooms = parts.rooms
        self._kinds: set[str] = set()
        """The kinds of devices that what is known is about."""
        self._estimates, self._deadline = parts.estimates, parts.deadline
        self._attempts, self._decisions = parts.attempts, parts.decisions
        self._due = -inf

    def handlers(self) -> Handlers:
        return {ev.DeviceUseMeasured: self._use_measured, ev.SharedUsesKnown: self._known}

    def needed_by(self, spec: JobSpec) -> bool:
        return shares_a_gpu(spec)

    def has(self, job: Job) -> bool:
        return job.id in self.shares.gpu_of

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
        return self.shares.on((gpu,))

    # --- jobs that run ----------------------------------------------------------------------

    def members(self, gpu: int) -> tuple[Job, ...]:
        """The jobs that share a GPU, its holder first; none where it is not one that does."""
        holder = self._run.jobs.get(self._own.holder.get(gpu, -1))
        if holder is None or not shares_a_gpu(holder.spec):
            return ()
        return (holder, *(self._run.jobs[job_id] for job_id in self.shares.on((gpu,))))

    def with_it(self, job: Job) -> tuple[Job, ...]:
        """Who shares a job's GPU, itself among them; none where it is not a job that does."""
        return self.members(job.gpus[0]) if job.gpus and shares_a_gpu(job.spec) else ()

    def beside(self, job: Job) -> tuple[Job, ...]:
        """Who shares a job's GPU with it."""
        return tuple(other for other in self.with_it(job) if other is not job)

    def device_mib(self, gpu: int) -> float | None:
        """The memory of a device; of a CPU slot, its part of the main memory. None: not known."""
        device = self._ledger.devices.get(gpu)
        if device is None or device.memory_mib is not None or device.kind != "cpu":
            return device.memory_mib if device else None
        host = self._ledger.host_cores.get(device.host)
        if host is None or host.memory_mib is None:
            return None
        return host.memory_mib / max(1, self._ledger.gpus_on(device.host))

    def need_mib(self, job: Job, gpu: int) -> float | None:
        """The memory that a job needs on a device, in MiB (on a CPU slot: main memory): as it asks for, else
        as measured of its model, else by its profile, else its share. None: not known."""
        device = self._ledger.devices.get(gpu)
        on_gpu = device is not None and device.kind != "cpu"
        known = self.shares.need_mib(job.spec, on_gpu=on_gpu)
        profile = self._estimates.loaded(job) if known is None and on_gpu else None
        known = cost_at(profile.memory_mib, 1) if profile else known
        if known is not None or not share_of(job.spec):
            return known
        total = self.device_mib(gpu)
        return None if total is None else share_of(job.spec) * RESERVE * total

    def room_mib(self, job: Job) -> float | None:
        """The most memory that a job that shares a device may take of it, in MiB; None: no limit is known, or
        it was there first."""
        gpus = job.gpus if shares_a_gpu(job.spec) else ()
        on_gpu = any(self._ledger.devices[gpu].kind != "cpu" for gpu in gpus if gpu in self._ledger.devices)
        asked = asked_mib(job.spec, on_gpu=on_gpu) if gpus else None
        return self.shares.limits.get(job.id) if asked is None else asked

    def _limit(self, job: Job, others: tuple[Job, ...]) -> None:
        """Note what those who are there leave to a job."""
        gpu = job.gpus[0]
        total, device = self.device_mib(gpu), self._ledger.devices[gpu]
        if total is None or asked_mib(job.spec, on_gpu=device.kind != "cpu") is not None:
            return
        limit, need = share_of(job.spec) * RESERVE * total, self.need_mib(job, gpu) or 0.0
        if limit:
            limit = max(limit, need)
        elif others:
            left = RESERVE * total - sum(self.need_mib(one, gpu) or 0.0 for one in others)
            limit = max(left, need)
        if limit > 0:
            self.shares.limits[job.id] = limit

    def ran_out(self, job: Job) -> bool:
        if job.id not in self.shares.limits:
            return False
        total, limit = self.device_mib(job.gpus[0]), self.shares.limits[job.id]
        wants = max(limit, min(TWICE * limit, RESERVE * (total or 0.0)))
        self.shares.needs_more(job.spec.model, wants / GROWTH)
        return True

    def met(self, job: Job) -> None:
        """Remember who shares a GPU with whom, and measure anew."""
        if self.with_it(job) and job.id not in self.shares.limits:
            self._limit(job, self.beside(job))
        others = self.beside(job)
        if not others:
            return
        self.shares.came_s[job.gpus[0]] = self._run.now
        for other in others:
            if job.id not in other.current.guests:
                other.current.guests += (job.id,)

    def over(self, job: Job) -> None:
        self.shares.gone(job.id)

    def saving(self) -> Iterable[Job]:
        return [self._run.jobs[job_id] for job_id in self.shares.gpu_of]

    def disturbed(self, job: Job, gpus: Iterable[int]) -> list[Job] | None:
        """Those beside it; where it is by itself, all on its host, as with any job."""
        others = self.beside(job)
        for other in others:
            self.shares.speeds.disturb(other.id, self._run.now)
        return list(others) or None

    def heard(self, job: Job, step: int, at: float) -> None:
        if shares_a_gpu(job.spec):
            self.shares.speeds.hear(job, step, at)

    def alone(self, job: Job, step: int, at: float) -> bool:
        if not shares_a_gpu(job.spec):
            return True
        shared = self.shares.shared(job)
        self.shares.speeds.hear(job, step, at).observe(step, at, shared=shared)
        return not shared

    def _use_measured(self, event: ev.DeviceUseMeasured) -> None:
        job = self._run.about(event)
        if job is not None:
            self.shares.measured(job, Use(event.memory_mib, event.busy))
            self._out.ask_policy()

    def _known(self, event: ev.SharedUsesKnown) -> None:
        self.shares.know(event.uses)

    # --- faults -----------------------------------------------------------------------------

    def blames(self, job: Job, detail: str) -> list[tuple[Job, Job]]:
        """Whoever came last to a job that has run out of memory, but each only once; it is to blame itself if
        that is the one. What else goes wrong with a job has nothing to do with others."""
        if not shares_a_gpu(job.spec) or not OUT_OF_MEMORY.search(detail):
            return []
        others = self.beside(job)
        guests = [self._run.jobs[i] for i in job.current.guests if i not in job.traits.excuses]
        guests = [guest for guest in guests if guest in others or self._left_just_now(guest)]
        if guests:
            return [(guests[-1], job)]
        return [(job, others[0])] if others and job.id in self.shares.gpu_of else []

    def _left_just_now(self, guest: Job) -> bool:
        end_s = guest.current.end_s
        return end_s is not None and end_s >= self._run.now - JUST_NOW_S

    def separate(self, guest: Job, host: Job) -> None:
        """Have two jobs whose memory, or something else, did not go together meet no more."""
        if not (shares_a_gpu(guest.spec) and shares_a_gpu(host.spec)):
            return
        facts = {"guest": guest.spec.model, "host": host.spec.model, "job": host.id, "name": host.spec.name}
        reason = Reason(Why.FAULT_TOGETHER, facts)
        self.shares.costly.setdefault(mixture([guest, host]), reason)
        known = self.shares.use.get(guest.id) or self.shares.use_of(guest.spec.model)
        total = self.device_mib(guest.current.gpus[0]) if guest.current.gpus else None
        if known.memory_mib is not None:
            most = inf if total is None else RESERVE / GROWTH * total
            self.shares.needs_more(guest.spec.model, min(most, MORE * known.memory_mib))
        self._out.note(guest, reason)

    # --- decisions --------------------------------------------------------------------------

    def begin_life(self, event: ev.AgentStarted) -> None:
        self._due = -inf
        self.shares.idle_s, self.shares.parted = None, set()
        self.shares.came_s.clear()
        for job_id in event.adopted:
            self.shares.speeds.disturb(job_id, self._run.now)
        kinds = {device.kind for device in event.devices}
        if kinds != self._kinds:  # of others nothing is known
            self.shares.models, self.shares.costly, self.shares.worth = {}, {}, {}
            self.shares.before = {}
            self._kinds = kinds

    def view(self) -> ShareView:
        """The shared GPUs as a rule sees them now."""
        return ShareView(
            now=self._run.now,
            shares=self.shares,
            devices=self._ledger.devices,
            jobs=self._run.jobs,
            holders={gpu: self._run.jobs[job_id] for gpu, job_id in self._own.holder.items()},
            others=self._others,
            memory_mib=self.device_mib,
            need_mib=self.need_mib,
            room_mib=self._rooms.memory_left_mib,
            free=self._ledger.free,
            left_s=self._deadline.left_s(),
            waiting=self._waiting,
            in_time=self._deadline.in_time,
            profile=self._estimates.profile,
            loaded=self._estimates.loaded,
            save_s=self._estimates.save_s,
            unsaved_s=self._estimates.unsaved_s,
            launch_s=self._estimates.launch_s,
        )

    def decide(self) -> None:
        """Let those that still wait join where the rule says, and part those that do not gain by it."""
        if not self.used:
            return
        waiting, free = len(self._own.queue), len(self._ledger.free)
        if waiting or not free:
            self.shares.idle_s = None
        elif self.shares.idle_s is None:
            self.shares.idle_s = self._run.now
        rule: SharingRule | None = self._decisions.rule(self.name)
        if rule is None or self._decisions.plan_asked or not (waiting or self.shares.gpu_of):
            return
        for decision in rule.share(self.view()):
            match decision:
                case Join():
                    self._join(decision.job, decision)
                case Separate():
                    self._separate(decision.job, decision)
                case Worth(jobs=jobs, total=total):
                    self.shares.worth[mixture(jobs)] = total
                case LookAgain(at=at) if at != self._due:
                    self._due = at
                    self._out.set_timer(self.timer, at)

    def _others(self, gpu: int) -> bool:
        """Whether a GPU is used by jobs that neither hold it nor share it so."""
        others = (one for one in self._ledger.mechanisms if one not in (self, self._own))
        return any(one.on(gpu) for one in others)

    def _waiting(self) -> Iterator[Job]:
        return (self._run.jobs[job_id] for job_id in self._own.queue.walk())

    def _join(self, job: Job, decision: Join) -> None:
        members = self.members(decision.gpu)
        if job.id not in self._own.queue or not members or not shares_a_gpu(job.spec):
            raise self._out.invalid(job, f"cannot share GPU {decision.gpu}")
        self._out.note(job, decision.reason)
        came = {"job": job.id, "name": job.spec.name, "gpu": decision.gpu, "what": "shares it"}
        for other in members:
            if sum(note.reason.why is Why.JOINED for note in other.story) < MOST_JOBS:  # a story is short
                self._out.note(other, Reason(Why.JOINED, came))
        self._attempts.launch(job, Target((decision.gpu,), Role.SHARED, self._run.now))

    def _separate(self, job: Job, decision: Separate) -> None:
        if job.id not in self.shares.gpu_of or not job.settled:
            raise self._out.invalid(job, "cannot leave the GPU that it shares")
        self._out.note(job, decision.reason)
        if decision.moves:
            self.shares.parted.add(job.id)
        if decision.from_:
            self.shares.costly[mixture([job, *decision.from_])] = decision.reason
            for other in decision.from_:
                self._out.note(other, decision.reason)
        self._attempts.suspend(job)
