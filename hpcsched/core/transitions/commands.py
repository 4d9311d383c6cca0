"""What users ask for, and what becomes of it."""

from __future__ import annotations

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.endings import Endings
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting


class Commands:
    """Cancels, holds, releases, suspends and resumes jobs."""

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        waiting: Waiting,
        attempts: Attempts,
        endings: Endings,
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._waiting, self._attempts, self._endings = waiting, attempts, endings

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {
            ev.CancelRequested: self._cancel,
            ev.HoldRequested: self._hold,
            ev.ReleaseRequested: self._resume_or_release,
            ev.SuspendRequested: self._suspend,
            ev.ResumeRequested: self._resume_or_release,
        }

    def _cancel(self, event: ev.CancelRequested) -> None:
        job = self._run.jobs[event.job_id]
        if job.state.final or job.wanted == "cancel":
            return
        if job.state.active:
            job.wanted = "cancel"
            if job.target:
                self._attempts.drop_target(job)
            self._attempts.terminate(job)
        else:
            self._endings.finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        self._out.ask_policy()

    def _hold(self, event: ev.HoldRequested) -> None:
        job = self._run.jobs[event.job_id]
        if job.state is JobState.PENDING:
            self._waiting.dequeue(job)
            self._out.set_state(job, JobState.HELD)
            self._out.note(job, Reason(Why.HELD))
            if not job.attempt:
                self._waiting.leave_array(job)
            self._out.ask_policy()  # jobs that came later may have waited for it
        elif job.state is JobState.SUSPENDED:
            self._stay_suspended(job)

    def _suspend(self, event: ev.SuspendRequested) -> None:
        job = self._run.jobs[event.job_id]
        if job.state is JobState.SUSPENDED:
            self._stay_suspended(job)
        elif job.state.active and job.wanted != "cancel":
            # Whatever else it is leaving for, it stays away.
            job.held = True
            if job.target:
                self._attempts.drop_target(job)
                self._out.ask_policy()
            if job.state is not JobState.SUSPENDING and job.wanted == "":
                # A program that is not ready yet is suspended when it is; one that never is, never.
                job.wanted = "suspend"
                if job.ready:
                    self._attempts.suspend(job)

    def _stay_suspended(self, job: Job) -> None:
        self._waiting.dequeue(job)
        job.held = True
        self._out.note(job, Reason(Why.USER_SUSPENDED))
        self._out.ask_policy()

    def _resume_or_release(self, event: ev.ResumeRequested | ev.ReleaseRequested) -> None:
        """Undo a hold or a suspend: a job suspended before it had saved anything is HELD."""
        job = self._run.jobs[event.job_id]
        job.held = False
        if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
            job.wanted = ""
        if job.state is JobState.HELD:
            self._out.set_state(job, JobState.PENDING)
        if not (self._ledger.queued(job) or job.id in self._waiting.late):
            self._waiting.enqueue(job)
            self._out.ask_policy()
