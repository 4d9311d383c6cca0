"""What users ask for, and what becomes of it."""

from __future__ import annotations

from hpcsched.core import events as ev
from hpcsched.core.allotting import Allotting
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why


class Obeying(Allotting):
    """A run's state that does what users ask for."""

    def _cancel_requested(self, event: ev.CancelRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state.final or job.wanted == "cancel":
            return
        if job.state.active:
            job.wanted = "cancel"
            if job.target:
                self._drop_target(job)
            self._terminate(job)
        else:
            self._finish(job, JobState.CANCELLED, Reason(Why.CANCELLED))
        self._decide_after = True

    def _hold_requested(self, event: ev.HoldRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.PENDING:
            self._dequeue(job)
            self._to(job, JobState.HELD)
            self._note(job, Reason(Why.HELD))
            self._decide_after = True  # who came later may have waited for it
        elif job.state is JobState.SUSPENDED:
            self._dequeue(job)
            job.held = True
            self._note(job, Reason(Why.USER_SUSPENDED))
            self._decide_after = True

    def _suspend_requested(self, event: ev.SuspendRequested) -> None:
        job = self.jobs[event.job_id]
        if job.state is JobState.SUSPENDED:
            self._dequeue(job)
            job.held = True
            self._note(job, Reason(Why.USER_SUSPENDED))
            self._decide_after = True
        elif job.state.active and job.wanted != "cancel":
            # Whatever else it is leaving for, it stays away.
            job.held = True
            if job.target:
                self._drop_target(job)
                self._decide_after = True
            if job.state is not JobState.SUSPENDING and job.wanted == "":
                # A program that is not ready yet is suspended when it is; one that never is, never.
                job.wanted = "suspend"
                if job.ready:
                    self._suspend(job)

    def _resume_or_release(self, event: ev.ResumeRequested | ev.ReleaseRequested) -> None:
        """Undo a hold or a suspend: a job suspended before it had saved anything is HELD."""
        job = self.jobs[event.job_id]
        job.held = False
        if job.wanted == "suspend" and job.state is not JobState.SUSPENDING:
            job.wanted = ""
        if job.state is JobState.HELD:
            self._to(job, JobState.PENDING)
        if not any(job.id in line for line in (self.queue, self.cores.queue, self.late)):
            self._enqueue(job)
            self._decide_after = True
