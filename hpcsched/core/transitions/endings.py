"""What becomes of a job when an attempt of it is over: it waits again, fails, or has come to its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcsched.contract.exits import CANNOT_SAVE, REFUSED, WRONG_CONTRACT
from hpcsched.core.jobs import Job
from hpcsched.core.model import Ended, JobState, Kind
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import TIME, Attempts, time_limit
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting

FAST_S = 10.0
"""Seconds after its launch within which a program that fails has hardly begun (chosen)."""

KILLED = 137
"""The exit code of a process that was killed (128 + SIGKILL)."""

MAX_LOSSES = 3
"""Attempts lost in a row without a new checkpoint before a job is given up (chosen)."""


class Endings:
    """Ends attempts and jobs, with what that means for checkpoints, retries and dependents."""

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        estimates: Estimates,
        waiting: Waiting,
        attempts: Attempts,
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._estimates, self._waiting, self._attempts = estimates, waiting, attempts

    # --- checkpoints ------------------------------------------------------------------------

    def saved(self, job: Job, step: int | None) -> None:
        """Note that the job's newest checkpoint holds `step` steps (None: nothing new)."""
        if step is None:
            return
        if step > (job.saved_step or 0):
            self.has_progressed(job)
        job.saved_step = step
        job.has(anew=False)
        if job.spec.restart is not None and not job.traits.saves.width:
            job.has_saved(width=job.width)
        job.step, job.reports = max(job.step, step), True

    def has_progressed(self, job: Job) -> None:
        """Note that it has a newer checkpoint than before: its failures were not all in a row."""
        job.failures = 0
        job.has(losses=0, waits=0)
        self._waiting.has_room(job)

    def fell_back(self, job: Job, step: int) -> None:
        """Note that the attempt took an older checkpoint than the one it was to go on from."""
        if job.current.in_place or job.current.again:
            return  # the checkpoint is one that was begun before, or it has said itself where it went on from
        expected = job.current.from_step
        self._out.note(job, _fell_back(job, expected, step))
        job.has(repeated=job.repeated + expected - step)
        job.current.from_step = job.step = step

    def went_back(self, job: Job, again: int, step: int) -> None:
        """Note that the attempt has lost `again` steps so far by going back without ending, and has done
        `step` now."""
        if (more := again - job.current.again) > 0:
            job.current.again = again
            job.has(repeated=job.repeated + more)
            job.step = step
            self._estimates.disturb(job, job.gpus)
            self._out.note(job, Reason(Why.WENT_BACK, {"again": more}))
            if job.saved_step is not None and step < job.saved_step:
                job.saved_step = step or None  # what was newer is not there, or cannot be read

    def never_on_disk(self, job: Job, step: int) -> None:
        """Note that what a suspended job had left in memory is gone: an earlier checkpoint (0: none) is its
        newest."""
        expected = job.saved_step or 0
        if step < expected:
            self._out.note(job, _fell_back(job, expected, step))
            job.has(repeated=job.repeated + expected - step)
            job.step, job.saved_step = step, step or None
            self._run.touch(job.id)

    def back_to_checkpoint(self, job: Job) -> None:
        """Take steps after the newest checkpoint as lost: they will be done again."""
        if (again := job.step - (job.saved_step or 0)) > 0:
            job.has(repeated=job.repeated + again)
        job.step = job.saved_step or 0

    # --- attempts ---------------------------------------------------------------------------

    def left(self, job: Job, code: int, took_s: float | None, *, not_taken: str) -> None:
        """End an attempt of a job that saves by itself, and has left as it was asked to: it goes on from its
        newest checkpoint, whether it has written one for that or not. `not_taken`: its last one does not
        count, and why."""
        saves, step = job.traits.saves, job.saved_step
        newer = step is not None and step > saves.asked
        newer = newer or (saves.at is not None and saves.at >= (job.current.signalled_s or 0.0))
        if newer:
            job.has_saved(in_vain=False)
            self.suspended(job, took_s, held=False, not_taken=not_taken)
            return
        facts: dict[str, Any] = {"code": code, "seconds": self._estimates.unsaved_s(job, handles=False)}
        if not_taken:
            by_itself = f": {code} is not among `saved_exit_codes`" if code <= 128 else ""
            facts["not_taken"] = f"; {not_taken}{by_itself}"
        if (again := job.step - (step or 0)) > 0:
            facts["again"] = f"{again} step{'s' * (again != 1)} done again, "
        if again > 0 or not job.reports:
            job.has_saved(in_vain=saves.handles)
        if step is None:
            lost = Reason(Why.NEVER_SAVED, facts)
        else:
            lost = Reason(Why.NOT_SAVED, {**facts, "step": f" of step {step}" if job.reports else ""})
        self.suspended(job, took_s, held=False, lost=lost)

    def suspended(
        self, job: Job, took_s: float | None, *, held: bool, lost: Reason | None = None, not_taken: str = ""
    ) -> None:
        """End an attempt that has saved and left: the job starts on its target, or waits. `lost`: it has not
        saved for that. `not_taken`: it has saved after that too, which does not count, and why."""
        self._estimates.learn_suspend(job, took_s)
        job.suspensions += 1
        where = " in memory, which is being written to disk," if held else f" ({not_taken})" * bool(not_taken)
        self._out.note(job, lost or Reason(Why.SAVED, {"step": job.saved_step or 0, "where": where}))
        if self._out_of_time(job):
            self.timed_out(job, Ended.SUSPENDED)
            return
        target = job.target
        self._attempts.end(job, Ended.SUSPENDED, keep=target)
        self.back_to_checkpoint(job)
        self._out.set_state(job, JobState.SUSPENDED)
        if target:
            gpus = tuple(sorted(target.gpus))
            self._attempts.launch(job, replace(target, gpus=gpus, since=self._run.now))
        else:
            self._waiting.enqueue(job)

    def completed(self, job: Job) -> None:
        """End a job whose program is done."""
        self._attempts.end(job, Ended.COMPLETED)
        self.finish(job, JobState.COMPLETED, Reason(Why.COMPLETED))

    def cancelled(self, job: Job) -> None:
        """End a job that was cancelled while it ran."""
        self._attempts.end(job, Ended.CANCELLED)
        self.finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))

    def _out_of_time(self, job: Job) -> bool:
        left_s = job.time_left_s(self._run.now)
        return job.wanted == TIME or (left_s is not None and left_s <= 0)

    def timed_out(self, job: Job, ended: Ended) -> None:
        """End a job whose time limit is over; what it has saved stays for `retry`."""
        self._attempts.end(job, ended)
        self.back_to_checkpoint(job)
        self._finish_timed_out(job)

    def _finish_timed_out(self, job: Job) -> None:
        step = job.saved_step
        saved = ": nothing is saved" if step is None else f": saved at step {step}"
        self.finish(job, JobState.TIMEOUT, time_limit(job, saved))

    def out_of_memory(self, job: Job, words: str, *, over_limit: bool) -> None:
        """End an attempt that main memory ran out under: it would again where its own limit was exceeded, or
        where that happens twice without a new checkpoint."""
        more = over_limit and any(ran_out(job) for ran_out in self._ledger.hooks("ran_out"))
        words += "; `memory` in its job file says what it needs" * more
        reason, same = Reason(Why.OUT_OF_MEMORY, {"words": words}), (KILLED, Why.OUT_OF_MEMORY)
        again = not more and (over_limit or (job.failures > 0 and job.traits.failed_fast == same))
        job.has(failed_fast=None if more else same)  # more: it has not asked for that limit
        self._attempts.end(job, Ended.FAILED)
        job.failures += 1
        if again or job.failures > job.spec.retries:
            self.back_to_checkpoint(job)
            self.finish(job, JobState.OUT_OF_MEMORY, reason)
            return
        self._out.note(job, reason)
        self.back_to_waiting(job)

    def failed(self, job: Job, code: int, detail: str, lasted_s: float | None) -> None:
        """End an attempt whose program has failed: the job is tried again, or has failed too."""
        before, now = job.traits.failed_fast, _fast(code, detail, lasted_s)
        job.has(failed_fast=now)
        suspects = [pair for suspects in self._ledger.hooks("suspects") for pair in suspects(job)]
        suspects += [pair for blames in self._ledger.hooks("blames") for pair in blames(job, detail)]
        self._attempts.end(job, Ended.FAILED)
        facts = {"code": code, "detail": f": {detail}" if detail else ""}
        self._out.note(job, Reason(Why.EXITED, facts))
        for guest, host in suspects:
            for separate in self._ledger.hooks("separate"):
                separate(guest, host)
        if guests := [guest for guest, host in suspects if host is job]:
            job.has(excuses=(*job.traits.excuses, *(guest.id for guest in guests)))
            why = Why.EXCUSED if guests[0].spec.background else Why.NOT_ITS_FAULT
            self._out.note(job, Reason(why, {"job": guests[0].id, "name": guests[0].spec.name}))
            self.back_to_waiting(job)
            return
        job.failures += 1
        refused = job.spec.kind is Kind.TRAINER and code in (REFUSED, WRONG_CONTRACT)
        if job.failures > job.spec.retries or refused:
            self.finish(job, JobState.FAILED, Reason(Why.EXITED, facts))
            return
        waited = self._run.rules < 4 or job.traits.waits > 0
        if job.failures > 1 and waited and before is not None and now == before:
            same = {"code": code, "detail": detail, "after": lasted_s, "name": job.spec.name}
            self.finish(job, JobState.FAILED, Reason(Why.SAME_FAILURE, same))
            return
        tried = {"code": code, "failures": job.failures, "retries": job.spec.retries}
        self._out.note(job, Reason(Why.RETRY, tried))
        self._try_again(job, at_once=lasted_s is not None and lasted_s <= FAST_S)

    def lost(self, job: Job, saved_step: int | None, why: str, *, counts: bool) -> None:
        """End an attempt through no fault of the job's: it goes on from its newest checkpoint.

        `counts`: too many in a row without a new checkpoint make the job FAILED.
        """
        self.saved(job, saved_step)
        if job.wanted == "cancel":
            self.cancelled(job)
            return
        if job.wanted == TIME:
            self.timed_out(job, Ended.LOST)
            return
        self._attempts.end(job, Ended.LOST)
        facts = {"attempt": job.attempt, "why": why, "step": job.saved_step or 0}
        if (again := job.step - (job.saved_step or 0)) > 0:
            facts["again"] = f"; at least {again} step{'s' * (again != 1)} done again"
        self._out.note(job, Reason(Why.LOST, facts))
        job.has(losses=job.traits.losses + counts)
        if job.traits.losses > MAX_LOSSES:
            self.finish(job, JobState.FAILED, Reason(Why.LOST, facts))
        else:
            self.back_to_waiting(job)

    def no_room(self, job: Job, saved_step: int | None, where: str) -> None:
        """End an attempt that came to nothing as a file system is full: no fault of the job's, which is tried
        again after a while. Not for a job that is being cancelled."""
        self.saved(job, saved_step)
        full = self._waiting.for_room(job, where)
        self.lost(job, None, f"no room in {where}", counts=False)
        self._out.note(job, full.reason)
        self._waiting.expect(job, full.until)

    def launch_failed(self, job: Job, error: str, *, again: bool) -> None:
        """End an attempt that could not be started; `again`: the job is tried again."""
        self._attempts.end(job, Ended.FAILED)
        if again:
            job.failures += 1
            if self._run.rules >= 4:
                job.has(failed_fast=None)
            self._try_again(job, at_once=True)
        else:
            self.finish(job, JobState.FAILED, Reason(Why.LAUNCH_FAILED, {"error": error}))

    def _try_again(self, job: Job, *, at_once: bool) -> None:
        """Have a job start again that has failed; not soon, where it has failed more than once in a row."""
        if self._run.rules >= 4 and at_once and job.failures > 1:
            delay = self._waiting.after_failures(job)
            self._out.note(job, delay.reason)
            self._waiting.expect(job, delay.until)
        self.back_to_waiting(job)

    def back_to_waiting(self, job: Job) -> None:
        """Have a job whose attempt is over wait, at its newest checkpoint."""
        self._run.count_news(self._ledger.waits_by(job).foreground)
        self.back_to_checkpoint(job)
        if self._out_of_time(job):
            self._finish_timed_out(job)
            return
        self._out.set_state(job, JobState.PENDING if job.saved_step is None else JobState.SUSPENDED)
        if job.held and job.state is JobState.PENDING:
            job.held = False
            self._out.set_state(job, JobState.HELD)
        self._waiting.enqueue(job)

    # --- jobs -------------------------------------------------------------------------------

    def finish(self, job: Job, state: JobState, reason: Reason) -> None:
        """End a job, and with one that did not complete all that wait for it."""
        self._finish(job, state, reason)
        if state is JobState.COMPLETED:
            for other_id in self._waiting.take_dependents(job):
                other = self._run.jobs[other_id]
                other.unmet -= 1
                self._run.touch(other_id)
                self._waiting.enqueue(other)
            return
        broken = [job]  # not by recursion: a chain of dependents may be of any length
        for failed in broken:
            for other_id in self._waiting.take_dependents(failed):
                other = self._run.jobs[other_id]
                if not other.state.final:
                    after = {"after": failed.spec.name}
                    self._finish(other, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, after))
                    broken.append(other)

    def never_satisfied(self, job: Job, name: str) -> None:
        """End a job that waits for one in vain."""
        self.finish(job, JobState.CANCELLED, Reason(Why.DEPENDENCY_NEVER_SATISFIED, {"after": name}))

    def _finish(self, job: Job, state: JobState, reason: Reason) -> None:
        self._waiting.dequeue(job)
        self._out.set_state(job, state)
        self._estimates.forget(job)
        for forget in self._ledger.hooks("forget"):
            forget(job)
        self._waiting.has_room(job)
        self._run.ended()
        plan = self._run.plan if self._ledger.waits_by(job).foreground else None
        if plan and not (state is JobState.COMPLETED and plan.foresaw(job.id, self._run.now)):
            self._run.count_news()
        job.ended_s = self._run.now
        job.held, job.wanted = False, ""
        job.reason = None if state is JobState.COMPLETED else reason
        self._out.note(job, reason)
        self._waiting.leave_array(job)


def _fell_back(job: Job, expected: int, step: int) -> Reason:
    facts: dict[str, Any] = {"expected": expected, "step": step}
    return Reason(Why.FELL_BACK, facts if job.reports else {**facts, "of": "", "then": "begins anew"})


def _fast(code: int, detail: str, lasted_s: float | None) -> tuple[int, str] | None:
    """What tells a failure that came at once from others; None for one that says nothing of the next time: it
    came later, without a word, by a signal, or because there was no room."""
    if lasted_s is None or lasted_s > FAST_S or not detail or code > 128 or code == CANNOT_SAVE:
        return None
    return code, detail
