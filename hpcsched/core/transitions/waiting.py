"""Jobs that wait, and for what: for devices, for their time, for other jobs, for room on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.arrays import Arrays
from hpcsched.core.transitions.outcome import Outcome

NO_ROOM_S, AT_ONCE_S, MAX_DELAY_S = 5.0, 10.0, 300.0
"""Seconds until a job is tried again that found no room on a disk, or has failed at once twice in a row: the
first time, and at most (chosen)."""


@dataclass(frozen=True, slots=True)
class Delay:
    """A job waits `until` then: there was no room for it in directory `where`, so many times in a row
    (`tries`); or ("") it has failed so often in a row, the last time at once; or (0 tries) processes of its
    last attempt may live until then, on a host that has not been heard of."""

    where: str
    tries: int
    until: float

    @property
    def why(self) -> Why:
        """The kind of reason."""
        if not self.tries:
            return Why.HOST_SILENT
        return Why.NO_SPACE if self.where else Why.FAILED_AT_ONCE

    @property
    def reason(self) -> Reason:
        """Why it waits, in words."""
        facts: dict[str, object] = {"again": self.until}
        if self.why is Why.NO_SPACE:
            facts |= {"where": self.where, "tries": self.tries}
        elif self.why is Why.FAILED_AT_ONCE:
            facts["failures"] = self.tries
        return Reason(self.why, facts)

    @property
    def for_processes(self) -> bool:
        """Whether processes may live until then, whatever becomes of the job."""
        return self.why is Why.HOST_SILENT


class Waiting:
    """Puts jobs into the queues of their mechanisms when nothing else keeps them from starting."""

    def __init__(self, run: Run, out: Outcome, ledger: Ledger) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self.arrivals: list[tuple[float, int]] = []
        """A heap of (time, id): the jobs that are still to come."""
        self.dependents: dict[int, list[int]] = {}
        """By job the ids of those that wait for it to complete."""
        self.late: set[int] = set()
        """Jobs that could start but for the time left: out of the queue until the deadline moves."""
        self.delays: dict[int, Delay] = {}
        """By job: why it does not start yet, and until when."""
        self.arrays = Arrays()

    # --- queues -----------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        """Put a job into its queue if it could start now."""
        ready = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        if not ready or job.submit_s > self._run.now or self._delayed(job.id):
            return
        self._run.touch(job.id)
        if (more := self.arrays.limit_by(job)) is not None:
            self._fill(more)
        if not self.arrays.enters(job):
            return
        mechanism = self._ledger.waits_by(job)
        if mechanism.foreground:
            self._out.wake()
            self.late.discard(job.id)
        if mechanism.planned and self._run.plan is not None and job.id not in self._run.plan.ends:
            self._run.count_news()
        mechanism.enqueue(job)

    def dequeue(self, job: Job) -> None:
        """Take a job out of its queue, if it is in one."""
        self._ledger.dequeue(job)
        self.late.discard(job.id)

    def leave_array(self, job: Job) -> None:
        """Take a job's place among those of its array that may be under way; the next one may start then."""
        if (name := self.arrays.leave(job)) is not None:
            self._fill(name)

    def _fill(self, name: str) -> None:
        """Let the first of an array in as long as there are places."""
        while (following := self.arrays.next_of(name)) is not None:
            self.enqueue(self._run.jobs[following])

    def set_aside(self, job: Job, reason: Reason) -> None:
        """Take a job that cannot be started any more out of its queue."""
        self._ledger.waits_by(job).dequeue(job)
        self.late.add(job.id)
        self._out.note_news(job, reason)
        self._run.touch(job.id)  # its story may say so already

    def let_late_in(self) -> None:
        """Put the jobs that were set aside back into their queues."""
        for job_id in sorted(self.late):
            self.enqueue(self._run.jobs[job_id])

    # --- time -------------------------------------------------------------------------------

    def expect(self, job: Job, at: float) -> None:
        """Have a job wait for its time."""
        heappush(self.arrivals, (at, job.id))
        self._wake_at_arrival(job, at)

    def let_arrive(self) -> bool:
        """Let the jobs start whose time has come; returns whether one is of the foreground."""
        arrived = False
        while self.arrivals and self.arrivals[0][0] <= self._run.now:
            job = self._run.jobs[heappop(self.arrivals)[1]]
            self.enqueue(job)
            arrived |= self._ledger.waits_by(job).foreground
        return arrived

    def begin_life(self, unsure: Mapping[int, float]) -> None:
        """Try all that waited for room on a disk or had failed at once, have those of `unsure` wait for their
        times (as those of earlier lives still do), and set the timers of all that wait for a time."""
        self._try_again()
        for job_id, until in unsure.items():
            self._for_silent_host(self._run.jobs[job_id], until)
        for at, job_id in sorted(self.arrivals):
            self._wake_at_arrival(self._run.jobs[job_id], at)
        self.let_late_in()

    def _wake_at_arrival(self, job: Job, at: float) -> None:
        # Exactly then: now + (then - now) may come out before it.
        if not job.state.final or self._delayed(job.id):
            self._out.set_timer(("arrival", job.id, job.attempt), at)

    # --- other jobs -------------------------------------------------------------------------

    def wait_for_others(self, job: Job) -> None:
        """Have a job wait for those named in its `after` that have not completed."""
        before = [self._run.jobs[self._run.by_name[name]] for name in job.spec.after]
        waits_for = [other for other in before if other.state is not JobState.COMPLETED]
        job.unmet = len(waits_for)
        for other in waits_for:
            self.wait_for(job, other)

    def wait_for(self, job: Job, other: Job) -> None:
        """Have a job wait for this one to complete; its `unmet` counts it already."""
        self._run.touch(job.id)
        self.dependents.setdefault(other.id, []).append(job.id)

    def wait_no_more(self, job: Job) -> None:
        """Have a job wait for no other: one that was cancelled may still be listed."""
        for name in job.spec.after:
            line = self.dependents.get(self._run.by_name[name], [])
            if job.id in line:
                line.remove(job.id)

    def take_dependents(self, job: Job) -> list[int]:
        """Ids of the jobs that have waited for this one, which is over."""
        return self.dependents.pop(job.id, [])

    def unmet(self, job: Job) -> list[str]:
        """Names of the jobs that this one waits for."""
        jobs, by_name = self._run.jobs, self._run.by_name
        return [name for name in job.spec.after if jobs[by_name[name]].state is not JobState.COMPLETED]

    def blocked(self) -> Iterator[Job]:
        """The jobs that plans are about, are here, and wait for others to complete."""
        seen = {job_id for waiting in self.dependents.values() for job_id in waiting}
        for job_id in sorted(seen):
            job = self._run.jobs[job_id]
            here = job.state is JobState.PENDING and job.submit_s <= self._run.now
            if here and self._ledger.waits_by(job).planned:
                yield job

    # --- disks, and hosts that are silent -----------------------------------------------------

    def _delayed(self, job_id: int) -> bool:
        delay = self.delays.get(job_id)
        return delay is not None and delay.until > self._run.now

    def for_room(self, job: Job, where: str) -> Delay:
        """Have a job wait for room in directory `where`, each time in a row for longer."""
        before = self.delays.get(job.id)
        tries = before.tries if before and before.why is Why.NO_SPACE else 0
        self.delays[job.id] = Delay(where, tries + 1, self._longer(NO_ROOM_S, tries))
        return self.delays[job.id]

    def after_failures(self, job: Job) -> Delay:
        """Have a job wait that has failed more than once in a row, the last time at once: what it lacks may
        be there soon, such as a file system that answers again."""
        until = self._longer(AT_ONCE_S, job.traits.waits)
        job.has(waits=job.traits.waits + 1)
        self.delays[job.id] = Delay("", job.failures, until)
        return self.delays[job.id]

    def _longer(self, first_s: float, before: int) -> float:
        """Until when to wait after so many waits in a row: each is twice as long as the one before."""
        return self._run.now + min(first_s * 2.0 ** min(before, 10), MAX_DELAY_S)

    def has_room(self, job: Job) -> None:
        """Note that there was room for a job, or that it needs none any more, nor time after failures.
        Processes that may still live do so whatever becomes of the job."""
        delay = self.delays.get(job.id)
        if delay is not None and (not delay.for_processes or delay.until <= self._run.now):
            del self.delays[job.id]

    def _try_again(self) -> None:
        """Let in those that waited for room, or had failed: who takes a run up again has seen to it."""
        waited = [job_id for job_id, delay in self.delays.items() if not delay.for_processes]
        self.delays = {job_id: delay for job_id, delay in self.delays.items() if delay.for_processes}
        jobs = self._run.jobs
        self.arrivals = [
            (at, i) for at, i in self.arrivals if i not in waited or jobs[i].submit_s > self._run.now
        ]
        heapify(self.arrivals)
        for job_id in waited:
            self.enqueue(jobs[job_id])

    def _for_silent_host(self, job: Job, until: float) -> None:
        """Have a job wait until no process of its last attempt can live any more; that may be now."""
        waited = self._delayed(job.id)
        if until > self._run.now:
            self.delays[job.id] = Delay("", 0, until)
            self.dequeue(job)
            self._out.note(job, self.delays[job.id].reason)
            heappush(self.arrivals, (until, job.id))
        elif waited:
            del self.delays[job.id]
            self.enqueue(job)
