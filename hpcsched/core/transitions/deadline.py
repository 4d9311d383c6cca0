"""The end of an allocation: when saving begins, who is not started any more, how those that hang are left."""

from __future__ import annotations

from math import floor, inf

from hpcsched.core import events as ev
from hpcsched.core.actions import SetTimer
from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.transitions.attempts import DRAIN, HURRY
from hpcsched.core.transitions.disk_space import Crowding

FROM_BATCH = "batch:"
"""Before the batch system's own word on why it ends the allocation, in the cause of a drain."""
CANCELLED = FROM_BATCH + "CANCELLED"


def _wanted(cause: str) -> bool:
    """Whether a person wants the run to stop."""
    return cause.startswith("inbox:") or cause in ("SIGINT", "SIGHUP", CANCELLED)


class Leaving(Crowding):
    """A run's state that comes to its end in time."""

    def _deadline_moved(self, event: ev.DeadlineMoved) -> None:
        self.deadline = event.deadline
        if self.draining:
            self._plan_to_leave()
            return
        if event.deadline is None:
            self._drain_due = inf  # no timer that was set counts any more
        self._let_late_ones_in()
        self._decide_after = True

    def _drain_requested(self, event: ev.DrainRequested) -> None:
        if not self.draining:
            self._drain(event.cause)
        elif _wanted(event.cause) or (event.cause.startswith(FROM_BATCH) and not _wanted(self.drain_cause)):
            # Now a person wants it to stop, whatever it was for; or the batch system has said why.
            self.drain_cause = event.cause

    def _drain(self, cause: str) -> None:
        self.draining, self.drain_cause = True, cause
        self._plan_to_leave()
        for job in list(self.active.values()):
            if job.target:
                self._drop_target(job)
            if job.state is not JobState.SUSPENDING and job.wanted in ("", "suspend"):
                self._leave(job, "drain")

    def _plan_to_leave(self) -> None:
        """A third of the time we keep is for saving, one for those that do not, one for us to leave.

        Where less than that is left, half of what there is is for saving before that.
        """
        if self.deadline is None:
            return
        left_s = max(0.0, self.deadline - self.now)
        self._leave_window_s = self.reserve_s if left_s >= self.reserve_s else left_s / 2
        due = self.deadline - self._leave_window_s * 2 / 3
        self._actions.append(SetTimer(at=self.now, cause=self._cause, key=HURRY, due=due))

    def _hurry(self, now: float) -> None:
        """The allocation is about to end: who is still saving is told to end."""
        if not self.draining or self.deadline is None:
            return
        left = {"left": max(0.0, self.deadline - now)}
        for job in list(self.active.values()):
            if job.timers.get("term", -1.0) < now:
                self._note(job, Reason(Why.TIME_IS_UP, {**left, "how": "SIGTERM"}))
                self._terminate(job)

    def _set_aside(self, job: Job, reason: Reason) -> None:
        """Take a job that cannot be started any more out of the queue."""
        self.queue.remove(job.id)
        self.cores.queue.remove(job.id)
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
        if (
            self.running or self.cores.of.keys() & self.active.keys()
        ) and self._saving_begins() <= self._late_since + 1.0:
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
