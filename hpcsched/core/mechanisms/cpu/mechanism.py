"""CPU jobs: trainings and programs on cores that no GPU job needs (NEARCHUS).

Cores of CPU slots are taken on loan for them while nobody else has the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Handlers, Mechanism
from hpcsched.core.mechanisms.cpu.cores import (
    Allotment,
    Cores,
    Grant,
    fits,
    less,
    most,
    most_cores,
    of_slot,
    total,
)
from hpcsched.core.mechanisms.cpu.layout import cores_of, said_seats
from hpcsched.core.mechanisms.cpu.view import CoresView, CpuRule, Reseat, StartOnCores
from hpcsched.core.model import Attempt, HostCores, JobSpec, JobState, Role, SeatedAttempt, Usage
from hpcsched.core.parts import Parts
from hpcsched.core.reasons import Reason, Why


class Cpu(Mechanism):
    """Leases on shares of the cores of a host."""

    name = "cpu"
    role = Role.CORES
    on_gpus = False
    profiled = False
    teaches = False
    settles = True

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.cores = Cores()
        self._run, self._out, self._ledger, self._own = parts.run, parts.out, parts.ledger, parts.own
        self._deadline, self._attempts = parts.deadline, parts.attempts
        self._decisions = parts.decisions

    def handlers(self) -> Handlers:
        return {ev.UsageMeasured: self._usage_measured, ev.CoresLost: self._cores_lost}

    def needed_by(self, spec: JobSpec) -> bool:
        return spec.cpus is not None

    def waits(self, job: Job) -> bool:
        return job.spec.cpus is not None

    def waiting_reason(self, job: Job) -> Reason:
        return Reason(Why.NO_CORES if self.queue.first() == job.id else Why.CORES_PRIORITY)

    def allotment(self, job: Job) -> Allotment:
        """What a job on CPU cores has."""
        return self.cores.of.setdefault(job.id, Allotment())

    def room(self, host: str, *, lent: bool) -> dict[int, int]:
        """What could be had of the cores of a host: what is free, and if `lent` what free CPU slots could
        lend."""
        devices = self._ledger.devices
        slots = [of_slot(devices[gpu], devices.values()) for gpu in self._ledger.free.on(host) if lent]
        # Of a slot that was lost and is there again a job that still ends may have a part.
        return less(total([self.cores.there(host), *slots]), self.cores.taken(host))

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        allotment = self.allotment(job)
        allotment.host, allotment.grant, allotment.next_grant, allotment.usage = target.host, {}, None, None
        self._reserve(job, allotment, target.grant)
        self._has_next(job)

    def change(self, job: Job, target: Target) -> None:
        self._reserve(job, self.allotment(job), target.grant)

    def settle(self, job: Job, target: Target) -> None:
        self._has_next(job)
        self._return_loans()

    def keep(self, job: Job) -> None:
        self.allotment(job).next_grant = None
        self._return_loans()
        self._run.touch(job.id)

    def release(self, job: Job) -> None:
        allotment = self.allotment(job)
        allotment.seats, allotment.grant, allotment.next_grant, allotment.usage = (), {}, None, None
        self._return_loans()
        self._run.touch(job.id)

    def _reserve(self, job: Job, allotment: Allotment, grant: Grant) -> None:
        """Add to what a job has of its host's cores; slots are taken on loan for it where they must be."""
        host, devices = allotment.host, self._ledger.devices
        more = less(most(allotment.held, grant), allotment.held)
        for gpu in reversed(self._ledger.free.on(host)):  # others take the first ones first
            if fits(more, free := self.cores.free(host)):
                break
            lent = of_slot(devices[gpu], devices.values())
            if any(core in lent for core in less(more, free)):
                self._ledger.take(gpu)
                self.cores.loans[gpu] = host, lent
        if not fits(more, self.cores.free(host)):
            raise self._out.invalid(job, f"cannot have {more} of the cores of {host}")
        allotment.next_grant = dict(grant)
        self._run.touch(job.id)

    def _has_next(self, job: Job) -> None:
        """Have a job have what it was to have."""
        allotment = self.allotment(job)
        if allotment.next_grant is not None:
            allotment.grant, allotment.next_grant = allotment.next_grant, None
        allotment.usage = None

    def _return_loans(self) -> None:
        """Give back the slots that are not needed any more."""
        for gpu, (host, lent) in list(self.cores.loans.items()):
            if fits(lent, self.cores.free(host)):
                del self.cores.loans[gpu]
                self._ledger.give_back(gpu)

    def lost(self, gpu: int, why: str) -> None:
        if loan := self.cores.loans.pop(gpu, None):
            self._cores_gone(*loan, why)

    def hosts_joined(self, cores: Iterable[HostCores]) -> None:
        self.cores.hosts |= {one.host: one for one in cores}

    def host_away(self, host: str) -> None:
        if (cores := self.cores.hosts.pop(host, None)) is not None:
            self.cores.away[host] = cores

    def host_back(self, host: str) -> None:
        if (cores := self.cores.away.pop(host, None)) is not None:
            self.cores.hosts[host] = cores

    def redefined(self, job: Job) -> None:
        self.cores.of.pop(job.id, None)

    def forget(self, job: Job) -> None:
        self.cores.of.pop(job.id, None)

    # --- jobs that run ----------------------------------------------------------------------

    def began(self, job: Job, fields: Mapping[str, Any], target: Target) -> Attempt:
        self.allotment(job).seats = target.seats
        return super().began(job, fields, target)

    def changed_to(self, job: Job, target: Target) -> tuple[Why, Mapping[str, Any]]:
        return Why.RESEATED, {"seats": said_seats(target.seats)}

    def saving(self) -> Iterable[Job]:
        active = self._run.active
        return [active[job_id] for job_id in self.cores.of if job_id in active]

    # --- events -----------------------------------------------------------------------------

    def begin_life(self, event: ev.AgentStarted) -> None:
        self.cores.hosts, self.cores.loans = {cores.host: cores for cores in event.cores}, {}
        self.cores.away = {}

    def _usage_measured(self, event: ev.UsageMeasured) -> None:
        job = self._run.about(event)
        if job is None:
            return
        attempt = job.current
        counts = {len(event.cpu), len(event.net), len(attempt.seats)}
        if not isinstance(attempt, SeatedAttempt) or len(counts) > 1:
            self._run.count_stale()
            return
        if job.resizing:
            return  # those that are to join use cores too, until they have started
        usage = Usage(
            rate=event.rate, cpu=event.cpu, net=event.net, samples=event.samples, stable=event.stable
        )
        self.allotment(job).usage = usage
        attempt.usage = usage
        self._out.ask_policy()

    def _cores_lost(self, event: ev.CoresLost) -> None:
        cores = self.cores.hosts.pop(event.host, None)
        self._out.ask_policy()
        if cores is not None:
            self._cores_gone(event.host, None, event.why)

    def _cores_gone(self, host: str, gone: Grant | None, why: str) -> None:
        """End the attempts of jobs that have any of these cores (None: of all of a host's)."""
        for job_id, allotment in self.cores.of.items():
            job = self._run.active.get(job_id)
            hit = gone is None or set(gone) & set(allotment.held)
            if job is None or allotment.host != host or not hit or job.wanted not in ("", "suspend"):
                continue
            self._out.note(job, Reason(Why.CORES_LOST, {"host": host, "why": why}))
            if job.target:
                self._attempts.drop_target(job)
            job.wanted = f"the cores of host {host} were lost"
            if job.state is not JobState.SUSPENDING:
                self._attempts.terminate(job)

    # --- decisions --------------------------------------------------------------------------

    def view(self) -> CoresView:
        """The cores as a rule sees them now."""
        active, devices = self._run.active, self._ledger.devices
        running = (active[job_id] for job_id in self.cores.of if job_id in active)
        return CoresView(
            now=self._run.now,
            hosts=self.cores.hosts,
            room=self.room,
            most=lambda: most_cores(self.cores.hosts.values(), devices.values()),
            slots_wanted=len(self._own.queue) > 0,
            jobs=self._run.jobs,
            running=sorted(running, key=lambda job: (job.submit_s, job.id)),
            of=self.cores.of,
            waiting=self._waiting,
            in_time=self._deadline.in_time,
        )

    def decide(self) -> None:
        """Start those that can, have those grow that may."""
        if not self.used:
            return
        rule: CpuRule | None = self._decisions.rule(self.name)
        if rule is None:
            return
        for decision in rule.allot(self.view()):
            match decision:
                case StartOnCores():
                    self._start(decision.job, decision)
                case Reseat():
                    self._reseat(decision.job, decision)
                case _:  # a note
                    self.allotment(decision.job).memory = decision.memory
                    if decision.reason:
                        self._out.note(decision.job, decision.reason)

    def _waiting(self) -> Iterator[Job]:
        return (self._run.jobs[job_id] for job_id in self.queue.walk())

    def _start(self, job: Job, decision: StartOnCores) -> None:
        if job.id not in self.queue or decision.host not in self.cores.hosts:
            raise self._out.invalid(job, f"cannot start on the cores of {decision.host}")
        self._check(job, decision.seats, decision.grant)
        self._out.note(job, decision.reason)
        self._attempts.launch(job, self._target(decision, decision.host))
        self.allotment(job).memory = decision.memory

    def _reseat(self, job: Job, decision: Reseat) -> None:
        keep, ranks = decision.keep, len(job.current.seats)
        good = keep[:1] == (0,) and len(set(keep)) == len(keep) <= len(decision.seats)
        if not job.settled or not good or any(rank >= ranks for rank in keep):
            raise self._out.invalid(job, f"cannot go on with {len(decision.seats)} seats and ranks {keep}")
        for new, old in zip(decision.seats, (job.current.seats[rank] for rank in keep), strict=False):
            if new.server != old.server:
                raise self._out.invalid(job, "a process cannot become another kind")
        self._check(job, decision.seats, decision.grant)
        self._out.note(job, decision.reason)
        allotment = self.allotment(job)
        allotment.memory = decision.memory
        target = self._target(decision, allotment.host)
        if job.in_place:
            self._attempts.resize(job, target, keep)
        else:
            self._attempts.restart(job, target)

    def _target(self, decision: StartOnCores | Reseat, host: str) -> Target:
        return Target(
            (),
            Role.CORES,
            self._run.now,
            seats=decision.seats,
            why=decision.reason,
            host=host,
            grant=decision.grant,
        )

    def _check(self, job: Job, seats: Sequence[Seat], grant: Grant) -> None:
        workers = [seat for seat in seats if not seat.server]
        budget = job.spec.cpus or 0.0
        enough = round(100 * cores_of(seats)) <= sum(grant.values()) <= round(100 * budget)
        led = len(seats) == 1 or (len(seats) > 1 and seats[0].server)
        if not (led and workers and enough and all(seat.share > 0 for seat in seats)):
            raise self._out.invalid(job, f"cannot have seats {seats} on {grant}, of at most {budget} cores")
