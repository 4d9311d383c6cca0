"""The moves that jobs can make in a run: leases, launches, changes in place, ends of attempts.

Nothing here looks at events; `machine.Machine` says which event leads to which move.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from hpcsched.contract.exits import CANNOT_SAVE, REFUSED, WRONG_CONTRACT
from hpcsched.contract.seats import Seat
from hpcsched.core.actions import Launch, Resize, Suspend, Terminate
from hpcsched.core.jobs import Job, Target
from hpcsched.core.model import NOTHING, Attempt, Ended, JobState, Kind, Role, SeatedAttempt
from hpcsched.core.processes import Because
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.cpu_layout import said_seats
from hpcsched.core.transitions.cpu_leases import Seating

DRAIN, HURRY = ("drain", 0, 0), ("hurry", 0, 0)
LOOK, LANES, PACKS = ("look", 0, 0), ("lanes", 0, 0), ("packs", 0, 0)
"""Keys of the run's own timers: when saving begins, when what has not left is told to end, and when the
policy wants to be asked again, about all, about the background lanes, and about packs."""

FAST_S = 10.0
"""Seconds after its launch within which a program that fails has hardly begun."""


MOST_LOSSES = 3
"""Attempts lost in a row without a new checkpoint before a job is given up."""


class Moves(Seating):
    """A run's state, and the ways in which its jobs move."""

    # --- leases and launches ----------------------------------------------------------------

    def _lease(self, job: Job, gpus: tuple[int, ...], *, rides: bool = False) -> None:
        """Let the job hold exactly these devices, its own or free ones: their foreground or background.

        `rides`: with the job that holds it. One on CPU cores has none.
        """
        if job.spec.cpus is not None:
            assert not gpus, "a job on CPU cores holds no GPU"
            self.changed.add(job.id)
            return
        if job.spec.background:
            self.lanes.lease(job.id, gpus, self.now)
            job.gpus = gpus
            self.changed.add(job.id)
            return
        if rides:
            self.packs.ride(job.id, *gpus)
            job.gpus = gpus
            self.changed.add(job.id)
            return
        if job.id in self.packs.gpu_of:
            assert not gpus, "who rides gets off, and nowhere else"
            self.packs.get_off(job.id)
            job.gpus = ()
            self.changed.add(job.id)
            return
        for gpu in set(job.gpus) - set(gpus):
            if riders := self.packs.on((gpu,)):
                self._inherit(self.jobs[riders[0]], gpu)
                continue
            del self.holder[gpu]
            if gpu in self.devices:
                self.free.add(gpu)
        for gpu in set(gpus) - set(job.gpus):
            if gpu not in self.free:
                raise self._invalid(job, f"GPU {gpu} is not free")
            self.free.remove(gpu)
            self.holder[gpu] = job.id
        job.gpus = gpus
        self.changed.add(job.id)

    def _inherit(self, job: Job, gpu: int) -> None:
        """Who has ridden on a GPU for longest holds it from now on."""
        self.packs.get_off(job.id)
        self.holder[gpu] = job.id
        job.role = Role.PRIMARY
        self.packs.inherited_s[job.id, job.attempt] = self.now
        self.changed.add(job.id)
        self._list(job)

    def _launch(
        self,
        job: Job,
        gpus: tuple[int, ...],
        role: Role,
        *,
        seats: tuple[Seat, ...] = (),
        why: Reason | None = None,
    ) -> None:
        self._dequeue(job)
        self._lease(job, gpus, rides=role is Role.PACKED)
        job.attempt += 1
        job.role, job.target, job.ready, job.in_place, job.wanted = role, None, False, False, ""
        job.processes, job.rate, job.timers = (), None, NOTHING
        if job.started_s is None:
            job.started_s = self.now
        self._begin(job, Target(gpus, role, self.now, seats=seats, why=why), job.step)
        self._choose_processes(job, gpus)
        self._to(job, JobState.STARTING)
        self.active[job.id] = job
        self._meet(job)
        self._disturb(job, gpus)
        self._list(job)
        resume = job.saved_step is not None
        how = {"per_gpu": job.traits.per_gpu, "seats": seats, "anew": job.traits.anew}
        self._do(Launch, job, gpus=gpus, role=role, resume=resume, **how)

    def _choose_processes(self, job: Job, gpus: tuple[int, ...]) -> None:
        """How many processes the attempt is started as; said where that leaves GPUs to a program that may not
        use them."""
        shape = self.shape(job)
        job.has(per_gpu=shape.per_gpu)
        job.reason = None
        if shape.because is Because.UNKNOWN and len(gpus) > 1:
            self._note(job, Reason(Why.ONE_PROCESS, {"gpus": len(gpus)}))

    def _meet(self, job: Job) -> None:
        """Remember who shares a GPU with whom: a guest may be gone before what it did is seen."""
        hosts = self._beside(job) if job.spec.background else [job]
        for host in hosts:
            attempt = host.current
            there = [guest.job_id for guest in self.lanes.beside(host)]
            attempt.guests += tuple(job_id for job_id in there if job_id not in attempt.guests)

    def _list(self, job: Job) -> None:
        for jobs in self._lists(job):
            insort(jobs, job, key=lambda j: (j.submit_s, j.id))

    def _unlist(self, job: Job) -> None:
        for jobs in self._lists(job):
            jobs.remove(job)

    def _lists(self, job: Job) -> tuple[list[Job], ...]:
        """Where a job stands while it runs."""
        if job.spec.background or job.role in (Role.PACKED, Role.CORES):
            return ()
        return (self.running, self.secondaries) if job.role is Role.SECONDARY else (self.running,)

    def _leave(self, job: Job, wanted: str) -> None:
        """Have a running job save and leave; one that has not said that it can is told to end."""
        job.wanted = wanted
        if job.ready:
            self._suspend(job)
        else:
            self._terminate(job)

    def _suspend(self, job: Job) -> None:
        self._to(job, JobState.SUSPENDING)
        self._ask_to_save(job)

    def _ask_to_save(self, job: Job) -> None:
        attempt = job.current
        attempt.signalled_s, attempt.quick = self.now, not self.draining
        self._disturb(job, attempt.gpus)
        self._do(Suspend, job, quick=attempt.quick)
        self._timer("grace", job, self._grace(job))

    def _terminate(self, job: Job) -> None:
        self._do(Terminate, job)
        self._timer("term", job, min(self._grace(job) / 2, self._time_to_kill_s()))

    # --- changes in place -------------------------------------------------------------------

    def _resize(self, job: Job, target: Target) -> None:
        """Have a job go on with another lease without a restart; until it does, it holds both."""
        job.target = job.becoming = target
        self._lease(job, tuple(sorted({*job.gpus, *target.gpus})))
        self._meet(job)
        self._disturb(job, job.gpus)
        self._do(Resize, job, gpus=target.gpus, role=target.role)
        gpus = len(target.gpus) // job.spec.nodes
        self._timer("resize", job, self._resize_limit_s(job, gpus))

    def _resized(self, job: Job, new: Target, step: int, stopped_s: float | None) -> None:
        """A job has gone over to the lease that it was to take in place: a new stretch, without a gap."""
        old, gpus = job.current, len(new.gpus) // job.spec.nodes
        self._disturb(job, job.gpus)
        old.end_s, old.ended, old.to_step = self.now, Ended.RESIZED, step
        old.stopped_s = self._stand_s(job, job.width, gpus) if stopped_s is None else stopped_s
        facts = {"step": step, "stopped_s": stopped_s}
        job.becoming = None
        if new.seats:
            self._note(job, Reason(Why.RESEATED, {**facts, "seats": said_seats(new.seats)}))
            self._now_has_next(job)
        else:
            self._note(job, Reason(Why.RESIZED_IN_PLACE, {**facts, "old": job.width, "gpus": gpus}))
        self._lease(job, tuple(sorted(new.gpus)))
        self._unlist(job)
        job.role, job.rate, job.timers = new.role, None, NOTHING
        self._list(job)
        job.attempt += 1
        stretch = self._begin(job, new, step)
        stretch.ready_s, stretch.in_place, stretch.guests = self.now, True, old.guests

    def _begin(self, job: Job, on: Target, step: int) -> Attempt:
        """The next attempt of a job, from this step on."""
        begun: dict[str, Any] = {"number": job.attempt, "role": on.role, "start_s": self.now}
        begun |= {"gpus": on.gpus, "from_step": step}
        attempt = Attempt(**begun)
        if on.seats:
            attempt = SeatedAttempt(**begun, seats=on.seats, why=on.why)
            self.allotment(job).seats = on.seats
        job.attempts = (*job.attempts, attempt)
        return attempt

    def _stays(self, job: Job, error: str, *, in_place: bool) -> None:
        """A resize in place came to nothing; `in_place`: another one may do better."""
        job.becoming, job.in_place = None, in_place
        self._note(job, Reason(Why.RESIZE_FAILED, {"error": error}))
        self.news += 1
        if job.target is None:
            self._drop_target(job)

    # --- how attempts and jobs end ----------------------------------------------------------

    def _saved(self, job: Job, step: int | None) -> None:
        if step is None:
            return
        if step > (job.saved_step or 0):
            job.failures = job.losses = 0
            self.no_space.pop(job.id, None)
        job.saved_step = step
        job.has(anew=False)
        job.step, job.reports = max(job.step, step), True

    def _fell_back(self, job: Job, step: int) -> None:
        """The attempt could not use the checkpoint it was to go on from, and took an older one."""
        if job.current.in_place:
            return  # it has not restarted: the checkpoint is one that was begun before
        expected = job.current.from_step
        self._note(job, Reason(Why.FELL_BACK, {"expected": expected, "step": step}))
        job.repeated += expected - step
        job.current.from_step = job.step = step

    def _never_on_disk(self, job: Job, step: int) -> None:
        """What a suspended job had left in memory is gone: an earlier checkpoint (0: none) is its newest."""
        expected = job.saved_step or 0
        if step < expected:
            self._note(job, Reason(Why.FELL_BACK, {"expected": expected, "step": step}))
            job.repeated += expected - step
            job.step, job.saved_step = step, step or None
            self.changed.add(job.id)

    def _suspended(self, job: Job, took_s: float | None, *, held: bool) -> None:
        self._learn_suspend(job, took_s)
        job.suspensions += 1
        where = " in memory, which is being written to disk," if held else ""
        self._note(job, Reason(Why.SAVED, {"step": job.saved_step or 0, "where": where}))
        target = job.target
        self._end_attempt(job, Ended.SUSPENDED, keep=target)
        self._back_to_checkpoint(job)
        self._to(job, JobState.SUSPENDED)
        if target:
            self._launch(job, tuple(sorted(target.gpus)), target.role, seats=target.seats, why=target.why)
        else:
            self._enqueue(job)

    def _failed(self, job: Job, code: int, detail: str, lasted_s: float | None) -> None:
        before, now = job.traits.failed_fast, _fast(code, detail, lasted_s)
        job.has(failed_fast=now)
        hosts = self._beside(job) if job.spec.background else []
        self._end_attempt(job, Ended.FAILED)
        self._note(job, Reason(Why.EXITED, {"code": code, "detail": f": {detail}" if detail else ""}))
        if job.spec.background:
            for host in hosts:
                self._quarantine(job, host)
        elif excuses := [i for i in job.current.guests if i not in job.excuses]:
            guests = [self.jobs[job_id] for job_id in excuses]
            job.excuses += tuple(excuses)
            for guest in guests:
                self._quarantine(guest, job)
            facts = {"job": guests[0].id, "name": guests[0].spec.name}
            self._note(job, Reason(Why.EXCUSED, facts))
            self._back_to_waiting(job)
            return
        job.failures += 1
        refused = job.spec.kind is Kind.TRAINER and code in (REFUSED, WRONG_CONTRACT)
        if job.failures > job.spec.retries or refused:
            facts = {"code": code, "detail": f": {detail}" if detail else ""}
            self._finish(job, JobState.FAILED, Reason(Why.EXITED, facts))
            return
        if job.failures > 1 and before is not None and now == before:
            facts = {"code": code, "detail": detail, "after": lasted_s, "name": job.spec.name}
            self._finish(job, JobState.FAILED, Reason(Why.SAME_FAILURE, facts))
            return
        facts = {"code": code, "failures": job.failures, "retries": job.spec.retries}
        self._note(job, Reason(Why.RETRY, facts))
        self._back_to_waiting(job)

    def _beside(self, job: Job) -> list[Job]:
        """Who has the foreground of the GPU whose background the job has: one, or nobody."""
        return [self.jobs[self.holder[gpu]] for gpu in job.gpus if gpu in self.holder]

    def _quarantine(self, guest: Job, host: Job) -> None:
        """A fault when they shared a GPU: the guest shares none any more, if it is not over by now."""
        if guest.id in self.lanes.quarantined or guest.state.final:
            return
        lanes = [attempt.gpus[0] for attempt in reversed(guest.attempts)]
        gpu = next((gpu for gpu in lanes if gpu in host.current.gpus), lanes[0])
        facts = {"gpu": gpu, "job": host.id, "name": host.spec.name}
        self.lanes.quarantined[guest.id] = Reason(Why.QUARANTINED, facts)
        self._note(guest, self.lanes.quarantined[guest.id])

    def _attempt_lost(self, job: Job, saved_step: int | None, why: str, *, counts: bool) -> None:
        """An attempt ended through no fault of the job's: it goes on from its newest checkpoint.

        `counts`: too many in a row without a new checkpoint make the job FAILED.
        """
        self._saved(job, saved_step)
        if job.wanted == "cancel":
            self._end_attempt(job, Ended.CANCELLED)
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
            return
        self._end_attempt(job, Ended.LOST)
        facts = {"attempt": job.attempt, "why": why, "step": job.saved_step or 0}
        if (again := job.step - (job.saved_step or 0)) > 0:
            facts["again"] = f"; at least {again} step{'s' * (again != 1)} done again"
        self._note(job, Reason(Why.LOST, facts))
        job.losses += counts
        if job.losses > MOST_LOSSES:
            self._finish(job, JobState.FAILED, Reason(Why.LOST, facts))
        else:
            self._back_to_waiting(job)

    def _back_to_checkpoint(self, job: Job) -> None:
        """Steps after the newest checkpoint are lost and will be done again."""
        job.repeated += max(0, job.step - (job.saved_step or 0))
        job.step = job.saved_step or 0

    def _back_to_waiting(self, job: Job) -> None:
        self.news += not job.spec.background
        self._back_to_checkpoint(job)
        self._to(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        if job.held and job.state is JobState.PENDING:
            job.held = False
            self._to(job, JobState.HELD)
        self._enqueue(job)

    def _end_attempt(self, job: Job, ended: Ended, keep: Target | None = None) -> None:
        attempt = job.current
        attempt.end_s, attempt.ended, attempt.to_step = self.now, ended, job.step
        self._disturb(job, attempt.gpus)
        self.lessons.gone(job.id)
        self.lanes.gone(job.id)
        job.target, job.becoming, job.wanted = None, None, ""
        self._unlist(job)
        self._lease(job, keep.gpus if keep else ())
        if keep and keep.seats:
            self._now_has_next(job)
        elif job.spec.cpus is not None:
            self._unseat(job)
        self.spawned_on.pop(job.id, None)
        del self.active[job.id]

    def _drop_target(self, job: Job) -> None:
        """Give up the larger lease of a job, unless ranks that were to join it may live there."""
        job.target = None
        if job.resizing:
            self.changed.add(job.id)
            return
        if job.spec.cpus is not None:
            self._keeps_its_cores(job)
        self._lease(job, tuple(gpu for gpu in job.current.gpus if self.holder.get(gpu) == job.id))

    def _enqueue(self, job: Job) -> None:
        ready = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        crowded = self.no_space.get(job.id)
        if not ready or job.submit_s > self.now or (crowded and crowded.until > self.now):
            return
        self.changed.add(job.id)
        if job.spec.background:
            self.lanes.queue.add(job.id, arrival=job.submit_s, need=1)
        elif job.spec.cpus is not None:
            self._woken = True
            self.late.discard(job.id)
            self.cores.queue.add(job.id, arrival=job.submit_s, need=1)
        else:
            self._woken = True
            self.late.discard(job.id)
            self.news += self.plan is not None and job.id not in self.plan.ends
            self.queue.add(job.id, arrival=job.submit_s, need=job.spec.gpus_min, nodes=job.spec.nodes)

    def _dequeue(self, job: Job) -> None:
        self.queue.remove(job.id)
        self.lanes.queue.remove(job.id)
        self.cores.queue.remove(job.id)
        self.late.discard(job.id)

    def _finish(self, job: Job, state: JobState, reason: Reason) -> None:
        """End a job, and with one that did not complete all that wait for it."""
        self._end(job, state, reason)
        if state is JobState.COMPLETED:
            for other_id in self.dependents.pop(job.id, ()):
                other = self.jobs[other_id]
                other.unmet -= 1
                self.changed.add(other_id)
                self._enqueue(other)
            return
        broken = [job]  # not by recursion: a chain of dependents may be of any length
        for failed in broken:
            for other_id in self.dependents.pop(failed.id, ()):
                other = self.jobs[other_id]
                if not other.state.final:
                    after = {"after": failed.spec.name}
                    self._end(other, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, after))
                    broken.append(other)

    def _end(self, job: Job, state: JobState, reason: Reason) -> None:
        self._dequeue(job)
        self._to(job, state)
        self.proposals.forget(job.id)
        self.cores.of.pop(job.id, None)
        self.no_space.pop(job.id, None)
        self.unfinished -= 1
        plan = None if job.spec.background else self.plan
        if plan and not (state is JobState.COMPLETED and plan.foresaw(job.id, self.now)):
            self.news += 1
        job.ended_s = self.now
        job.held, job.wanted = False, ""
        job.reason = None if state is JobState.COMPLETED else reason
        self._note(job, reason)

    def _never_satisfied(self, job: Job, name: str) -> None:
        self._finish(job, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, {"after": name}))


def _fast(code: int, detail: str, lasted_s: float | None) -> tuple[int, str] | None:
    """What tells a failure that came at once from others; None for one that says nothing of the next time: it
    came later, without a word, by a signal, or because there was no room."""
    if lasted_s is None or lasted_s > FAST_S or not detail or code > 128 or code == CANNOT_SAVE:
        return None
    return code, detail
