"""The moves that jobs can make in a run: leases, launches, ends of attempts, being set aside.

Nothing here looks at events; `machine.Machine` says which event leads to which move.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from heapq import heappush
from math import floor
from typing import Any

from hpcsched.core.actions import Action, Launch, Resize, SetTimer, Suspend, Terminate
from hpcsched.core.jobs import Job, Target
from hpcsched.core.learning import contradicts, differs
from hpcsched.core.model import NOTHING, Attempt, Ended, JobState, Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.state import RunState
from hpcsched.errors import InvalidTransition

DRAIN, HURRY, LOOK = ("drain", 0, 0), ("hurry", 0, 0), ("look", 0, 0)
"""Keys of the run's own timers: when saving begins, when what has not left is told to end, and when the
policy wants to be asked again."""

MOST_LOSSES = 3
"""Attempts lost in a row without a new checkpoint before a job is given up."""


class Moves(RunState):
    """A run's state, and the ways in which it changes."""

    # --- leases and launches ----------------------------------------------------------------

    def _lease(self, job: Job, gpus: tuple[int, ...]) -> None:
        """Let the job hold exactly these devices, its own or free ones."""
        for gpu in set(job.gpus) - set(gpus):
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

    def _launch(self, job: Job, gpus: tuple[int, ...], role: Role) -> None:
        self._dequeue(job)
        self._lease(job, gpus)
        job.attempt += 1
        job.role, job.target, job.ready, job.in_place, job.wanted = role, None, False, False, ""
        job.processes, job.rate, job.timers = (), None, NOTHING
        if job.started_s is None:
            job.started_s = self.now
        attempt = Attempt(number=job.attempt, gpus=gpus, role=role, start_s=self.now, from_step=job.step)
        job.attempts = (*job.attempts, attempt)
        self._to(job, JobState.STARTING)
        self.active[job.id] = job
        self._disturb(gpus)
        self._list(job)
        self._do(Launch, job, gpus=gpus, role=role, resume=job.saved_step is not None)

    def _list(self, job: Job) -> None:
        for jobs in self._lists(job):
            insort(jobs, job, key=lambda j: (j.submit_s, j.id))

    def _unlist(self, job: Job) -> None:
        for jobs in self._lists(job):
            jobs.remove(job)

    def _lists(self, job: Job) -> tuple[list[Job], ...]:
        """Where a job stands while it runs."""
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
        self._disturb(attempt.gpus)
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
        self._disturb(job.gpus)
        self._do(Resize, job, gpus=target.gpus, role=target.role)
        gpus = len(target.gpus) // job.spec.nodes
        self._timer("resize", job, self._resize_limit_s(job, gpus))

    def _resized(self, job: Job, new: Target, step: int, stopped_s: float | None) -> None:
        """A job has gone over to the lease that it was to take in place: a new stretch, without a gap."""
        old, gpus = job.current, len(new.gpus) // job.spec.nodes
        self._disturb(job.gpus)
        old.end_s, old.ended, old.to_step = self.now, Ended.RESIZED, step
        old.stopped_s = self._stand_s(job, job.width, gpus) if stopped_s is None else stopped_s
        facts = {"old": job.width, "gpus": gpus, "step": step, "stopped_s": stopped_s}
        self._note(job, Reason(Why.RESIZED_IN_PLACE, facts))
        job.becoming = None
        self._lease(job, tuple(sorted(new.gpus)))
        self._unlist(job)
        job.role, job.rate, job.timers = new.role, None, NOTHING
        self._list(job)
        job.attempt += 1
        stretch = Attempt(number=job.attempt, gpus=new.gpus, role=new.role, start_s=self.now, from_step=step)
        stretch.ready_s, stretch.in_place = self.now, True
        job.attempts = (*job.attempts, stretch)

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
        job.saved_step = step
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
            self._launch(job, tuple(sorted(target.gpus)), target.role)
        else:
            self._enqueue(job)

    def _failed(self, job: Job, code: int, detail: str) -> None:
        self._end_attempt(job, Ended.FAILED)
        self._note(job, Reason(Why.EXITED, {"code": code, "detail": f": {detail}" if detail else ""}))
        job.failures += 1
        if job.failures > job.spec.retries:
            self._finish(job, JobState.FAILED, Reason(Why.EXITED, {"code": code, "detail": ""}))
            return
        facts = {"code": code, "failures": job.failures, "retries": job.spec.retries}
        self._note(job, Reason(Why.RETRY, facts))
        self._back_to_waiting(job)

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
        self.news += 1
        self._back_to_checkpoint(job)
        self._to(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        if job.held and job.state is JobState.PENDING:
            job.held = False
            self._to(job, JobState.HELD)
        self._enqueue(job)

    def _end_attempt(self, job: Job, ended: Ended, keep: Target | None = None) -> None:
        attempt = job.current
        attempt.end_s, attempt.ended, attempt.to_step = self.now, ended, job.step
        self._disturb(attempt.gpus)
        self.lessons.gone(job.id)
        job.target, job.becoming, job.wanted = None, None, ""
        self._lease(job, keep.gpus if keep else ())
        del self.active[job.id]
        self._unlist(job)

    def _drop_target(self, job: Job) -> None:
        """Give up the larger lease of a job, unless ranks that were to join it may live there."""
        job.target = None
        if job.resizing:
            self.changed.add(job.id)
            return
        self._lease(job, tuple(gpu for gpu in job.current.gpus if self.holder.get(gpu) == job.id))

    def _enqueue(self, job: Job) -> None:
        ready = job.state in (JobState.PENDING, JobState.SUSPENDED) and not job.held and not job.unmet
        if ready and job.submit_s <= self.now:
            self.late.discard(job.id)
            self.news += self.plan is not None and job.id not in self.plan.ends
            self.queue.add(job.id, arrival=job.submit_s, need=job.spec.gpus_min, nodes=job.spec.nodes)
            self.changed.add(job.id)

    def _dequeue(self, job: Job) -> None:
        self.queue.remove(job.id)
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
        self.unfinished -= 1
        if self.plan and not (state is JobState.COMPLETED and self.plan.foresaw(job.id, self.now)):
            self.news += 1
        job.ended_s = self.now
        job.held, job.wanted = False, ""
        job.reason = None if state is JobState.COMPLETED else reason
        self._note(job, reason)

    def _never_satisfied(self, job: Job, name: str) -> None:
        self._finish(job, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, {"after": name}))

    # --- the end of the allocation ----------------------------------------------------------

    def _set_aside(self, job: Job, reason: Reason) -> None:
        """Take a job that cannot be started any more out of the queue."""
        self.queue.remove(job.id)
        self.late.add(job.id)
        self._late_since = self._saving_begins()
        if not job.story or job.story[-1].reason.why is not reason.why:
            self._note(job, reason)

    def _let_late_ones_in(self) -> None:
        for job_id in sorted(self.late):
            self._enqueue(self.jobs[job_id])

    def _look_again_at_late_ones(self) -> bool:
        """Let them in where that may help: whether it was done.

        Saving may begin later than when they were set aside, as other jobs have ended; and when nothing
        runs, what was learnt since may let one in.
        """
        if self.active and self._saving_begins() <= self._late_since + 1.0:
            return False
        self._late_since = self._saving_begins()
        self._let_late_ones_in()
        return True

    def _watch_the_end(self) -> None:
        """Have saving begin in time, by what is known now; in whole seconds, so that it seldom changes."""
        if self.deadline is None or self.draining:
            return
        due = float(floor(self.deadline - self.margin_s()))
        if due != self._drain_due:
            self._drain_due = due
            self._actions.append(SetTimer(at=self.now, cause=self._cause, key=DRAIN, due=due))

    # --- what is learnt of models -----------------------------------------------------------

    def _load(self, profiles: Iterable[Profile]) -> None:
        loaded = {(p.model, p.nodes): p for p in profiles}
        self.profiles.update(loaded)
        # What an earlier run has learnt has the counts that were seen there.
        learned = [key for key, profile in loaded.items() if profile.source == "learned"]
        for model, nodes in dict.fromkeys([*learned, *self.lessons.seen]):
            known = self.profiles.get((model, nodes)) or self.profiles.get((model, 1))
            self.lessons.believe((model, nodes), known)

    def _learn_suspend(self, job: Job, took_s: float | None) -> None:
        """What saving and leaving took: a save that need not be durable at once says nothing of others."""
        signalled = job.current.signalled_s
        if signalled is None:
            return
        costs = self._costs(job)
        quick = job.current.quick and took_s is not None
        if not quick:
            costs.suspend_s = self.now - signalled
        costs.longest_suspend_s = max(costs.longest_suspend_s, self.now - signalled)
        (costs.quick_saves if quick else costs.durable_saves).add(took_s)

    def _learn_resize(self, job: Job, new: Target, stopped_s: float | None, built_s: float | None) -> None:
        costs, old = self._costs(job), job.current.gpus
        (costs.grows if len(new.gpus) >= len(old) else costs.shrinks).add(stopped_s)
        if set(new.gpus) - set(old):
            costs.builds.add(built_s)

    def _disturb(self, gpus: Iterable[int]) -> None:
        """Jobs on their hosts go faster or slower from now on: what they did is one sample at most."""
        self.lessons.disturb({self.devices[gpu].host for gpu in gpus if gpu in self.devices}, self.now)

    def _learn(self, job: Job, step: int, at: float) -> bool:
        """The job had done `step` steps at `at`: whether that says something new of its model."""
        if step < job.current.from_step:
            return False  # it has not yet said where it goes on
        key, gpus = (job.spec.model, job.spec.nodes), job.width
        seen = self.lessons.observe(job.id, job.attempt, key, gpus, self.hosts_of(job), step=step, at=at)
        if seen is None or not seen.enough:
            return False
        loaded, believed = self.loaded(job), self.profile(job)
        if not loaded and believed and gpus not in believed.throughput:
            believed = None  # beyond what was seen a profile of that alone says nothing
        if key in self.lessons.beliefs and seen.told:
            new = differs(seen)  # noise is no news for ever
        else:
            new = believed is None or contradicts(believed, gpus, seen)
        if not new:
            return False
        self.lessons.believe(key, loaded)
        self.news += 1
        facts = {
            "model": job.spec.model,
            "gpus": gpus,
            "rate": seen.rate,
            "spread": seen.spread,
            "samples": len(seen.rates),
            "steps": seen.steps,
            "before": f"{believed.source} profile: {believed.rate(gpus):.4g}"
            if believed
            else "not known before",
        }
        self._note(job, Reason(Why.LEARNED, facts))
        return True

    # --- small things -----------------------------------------------------------------------

    def _to(self, job: Job, state: JobState) -> None:
        if state not in _WAYS[job.state]:
            raise self._invalid(job, f"{job.state} -> {state}")
        job.state = state
        self.changed.add(job.id)

    def _invalid(self, job: Job, what: str) -> InvalidTransition:
        story = [f"{note.at:10.1f}  {note.reason}" for note in job.story]
        return InvalidTransition(f"job {job.id} ({job.spec.name}), on {self._cause}: {what}", story)

    def _note(self, job: Job, reason: Reason) -> None:
        self.changed.add(job.id)
        if self._stories:
            job.note(self.now, reason)

    def _do(self, action: type[Action], job: Job, **rest: Any) -> None:
        about: dict[str, Any] = {"job_id": job.id, "attempt": job.attempt}
        self._actions.append(action(at=self.now, cause=self._cause, **about, **rest))

    def _timer(self, kind: str, job: Job, delay_s: float) -> None:
        due = self.now + delay_s
        job.timers = {**job.timers, kind: due}
        self._set_timer(kind, job, due)

    def _set_timer(self, kind: str, job: Job, due: float) -> None:
        key = (kind, job.id, job.attempt)
        self._actions.append(SetTimer(at=self.now, cause=self._cause, key=key, due=due))

    def _expect(self, job: Job) -> None:
        """Let a job wait for its time."""
        heappush(self.arrivals, (job.submit_s, job.id))
        self._wake_at_arrival(job)

    def _wake_at_arrival(self, job: Job) -> None:
        # Exactly then: now + (then - now) may come out before it.
        if not job.state.final:
            self._set_timer("arrival", job, job.submit_s)


_S = JobState
_WAYS: dict[JobState, frozenset[JobState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.HELD, _S.CANCELLED}),
    _S.HELD: frozenset({_S.PENDING, _S.CANCELLED}),
    _S.STARTING: frozenset(set(_S) - {_S.HELD, _S.STARTING}),
    _S.RUNNING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING}),
    _S.SUSPENDING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING, _S.SUSPENDING}),
    _S.SUSPENDED: frozenset({_S.STARTING, _S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
