"""Who has which CPU cores: what the policy says of it, carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcsched.contract.seats import Seat
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job, Target
from hpcsched.core.model import JobState, Role, SeatedAttempt, Usage
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.cpu import Grant, most_cores
from hpcsched.core.resources.cpu_layout import cores_of
from hpcsched.core.transitions.background import Lending
from hpcsched.core.view import Allotting as Allots
from hpcsched.core.view import CoresView, Reseat, StartOnCores


class Allotting(Lending):
    """A run's state whose CPU cores are given to jobs that need no GPU."""

    def cores_view(self) -> CoresView:
        """The cores as a policy sees them now."""
        return CoresView(
            now=self.now,
            hosts=self.cores.hosts,
            room=self.room,
            most=lambda: most_cores(self.cores.hosts.values(), self.devices.values()),
            slots_wanted=len(self.queue) > 0,
            jobs=self.jobs,
            running=sorted(
                (self.active[job_id] for job_id in self.cores.of if job_id in self.active),
                key=lambda job: (job.submit_s, job.id),
            ),
            of=self.cores.of,
            waiting=self._waiting_for_cores,
            in_time=self._in_time,
        )

    def _allot(self) -> None:
        """Start those that can, have those grow that may; after all else was decided."""
        if not (self.cores.used and isinstance(self.policy, Allots)):
            return
        for decision in self.policy.allot(self.cores_view()):
            match decision:
                case StartOnCores():
                    self._start_on_cores(decision.job, decision)
                case Reseat():
                    self._change_seats(decision.job, decision)
                case _:  # a note
                    self.allotment(decision.job).memory = decision.memory
                    if decision.reason:
                        self._note(decision.job, decision.reason)

    def _waiting_for_cores(self) -> Iterator[Job]:
        return (self.jobs[job_id] for job_id in self.cores.queue.walk(lambda need, nodes: True))

    def _start_on_cores(self, job: Job, decision: StartOnCores) -> None:
        if job.id not in self.cores.queue or decision.host not in self.cores.hosts:
            raise self._invalid(job, f"cannot start on the cores of {decision.host}")
        self._check_seats(job, decision.seats, decision.grant)
        self._note(job, decision.reason)
        self._seat(job, decision.host, decision.grant)
        self.allotment(job).memory = decision.memory
        self._launch(job, (), Role.CORES, seats=decision.seats, why=decision.reason)

    def _change_seats(self, job: Job, decision: Reseat) -> None:
        keep, ranks = decision.keep, len(job.current.seats)
        good = keep[:1] == (0,) and len(set(keep)) == len(keep) <= len(decision.seats)
        if not job.settled or not good or any(rank >= ranks for rank in keep):
            raise self._invalid(job, f"cannot go on with {len(decision.seats)} seats and ranks {keep}")
        for new, old in zip(decision.seats, (job.current.seats[rank] for rank in keep), strict=False):
            if new.server != old.server:
                raise self._invalid(job, "a process cannot become another kind")
        self._check_seats(job, decision.seats, decision.grant)
        self._note(job, decision.reason)
        self.allotment(job).memory = decision.memory
        target = Target((), Role.CORES, self.now, seats=decision.seats, why=decision.reason)
        if job.in_place:
            self._reseat(job, target, keep, decision.grant)
        else:
            job.target = target
            self._hold(job, self.allotment(job), decision.grant)
            self._suspend(job)

    def _check_seats(self, job: Job, seats: Sequence[Seat], grant: Grant) -> None:
        workers = [seat for seat in seats if not seat.server]
        budget = job.spec.cpus or 0.0
        enough = round(100 * cores_of(seats)) <= sum(grant.values()) <= round(100 * budget)
        led = len(seats) == 1 or (len(seats) > 1 and seats[0].server)
        if not (led and workers and enough and all(seat.share > 0 for seat in seats)):
            raise self._invalid(job, f"cannot have seats {seats} on {grant}, of at most {budget} cores")

    def _usage_measured(self, event: ev.UsageMeasured) -> None:
        job = self._running(event)
        if job is None:
            return
        attempt = job.current
        counts = {len(event.cpu), len(event.net), len(attempt.seats)}
        if not isinstance(attempt, SeatedAttempt) or len(counts) > 1:
            self.stale += 1
            return
        if job.resizing:
            return  # those that are to join use cores too, until they have started
        usage = Usage(
            rate=event.rate, cpu=event.cpu, net=event.net, samples=event.samples, stable=event.stable
        )
        self.allotment(job).usage = usage
        attempt.usage = usage
        self._decide_after = True

    def _cores_lost(self, event: ev.CoresLost) -> None:
        cores = self.cores.hosts.pop(event.host, None)
        self._decide_after = True
        if cores is not None:
            self._cores_gone(event.host, None, event.why)

    def _cores_gone(self, host: str, gone: Grant | None, why: str) -> None:
        """Jobs that have any of these cores (None: of all of a host's) lose their attempt."""
        for job_id, allotment in self.cores.of.items():
            job = self.active.get(job_id)
            hit = gone is None or set(gone) & set(allotment.held)
            if job is None or allotment.host != host or not hit or job.wanted not in ("", "suspend"):
                continue
            self._note(job, Reason(Why.CORES_LOST, {"host": host, "why": why}))
            if job.target:
                self._drop_target(job)
            job.wanted = f"the cores of host {host} were lost"
            if job.state is not JobState.SUSPENDING:
                self._terminate(job)
