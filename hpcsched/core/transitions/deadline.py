"""The end of the allocation: when saving begins, and what can still be started before that."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

from hpcsched.core.events import AgentStarted
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.outcome import DRAIN, HURRY, Outcome
from hpcsched.core.transitions.waiting import Waiting

FROM_BATCH = "batch:"
"""Before the batch system's own word on why it ends the allocation, in the cause of a drain."""
CANCELLED = FROM_BATCH + "CANCELLED"


class Deadline:
    """How much time is left, and for what. All times are in seconds of the run's clock."""

    def __init__(
        self, run: Run, out: Outcome, ledger: Ledger, estimates: Estimates, waiting: Waiting
    ) -> None:
        self._run, self._out, self._ledger = run, out, ledger
        self._estimates, self._waiting = estimates, waiting
        self.at: float | None = None
        """When the allocation ends; None: not known, or never."""
        self.reserve_s = 60.0
        """Kept before that, besides what saving is known to take."""
        self.draining = False
        """All jobs save and leave, and nothing starts any more."""
        self.cause = ""
        """What led to the drain: a signal's name, an inbox command, "deadline", or "batch:" and the batch
        system's reason."""
        self._timer_due = -inf
        self._late_since = inf
        self._leave_window_s = 0.0

    # --- questions --------------------------------------------------------------------------

    def margin_s(self, *more: Job) -> float:
        """Seconds before the deadline at which saving begins: the reserve, and the longest saves known of
        all jobs that run (and of `more`) one after the other, as they share the file system. Those in the
        background have saved by then."""
        foreground = (one for one in self._ledger.mechanisms if one.foreground)
        saving = (*(job for one in foreground for job in one.saving()), *more)
        return self.reserve_s + sum(self._estimates.longest_save_s(job) for job in saving)

    def left_s(self, *more: Job) -> float:
        """Seconds until saving begins (with `more` running too); infinite without a deadline."""
        return inf if self.at is None else self.at - self.margin_s(*more) - self._run.now

    def saving_begins(self) -> float:
        """When saving begins; infinite without a deadline."""
        return inf if self.at is None else self.at - self.margin_s()

    def saves_before(self, mechanism: Mechanism, *more: Job) -> float:
        """When the jobs of a mechanism in the background (and `more`) have to save: before all others do."""
        saving = (*mechanism.saving(), *more)
        return self.saving_begins() - sum(self._estimates.longest_save_s(job) for job in saving)

    def too_late(self, job: Job, *others: Job) -> Reason | None:
        """Why a waiting job cannot be started any more in this allocation; None if it can.

        `others` start together with it.
        """
        mechanism = self._ledger.waits_by(job)
        if mechanism.foreground:
            left = self.left_s(job, *others)
        else:
            left = self.saves_before(mechanism, job, *others) - self._run.now
        need = self._estimates.first_checkpoint_s(job)
        facts = {"need": need, "left": max(0.0, left)}
        late = need > left or job.id in self._waiting.late
        return Reason(Why.WALLTIME_TOO_SHORT, facts) if late else None

    def in_time(self, job: Job, others: Sequence[Job]) -> bool:
        """Whether a waiting job can be started, together with `others`; one that cannot is set aside."""
        reason = None if self.at is None else self.too_late(job, *others)
        if reason:
            self._waiting.set_aside(job, reason)
            self._late_since = self.saving_begins()
        return reason is None

    def kill_in_s(self) -> float:
        """Seconds until what has not left must be killed, for us to leave in time; else infinite."""
        if self.at is None or not self.draining:
            return inf
        return max(1.0, self.at - self._leave_window_s / 3 - self._run.now)

    @property
    def leave_by(self) -> float:
        """When a drain has to be over, whoever still hangs; infinite without a deadline."""
        if self.at is None or not self.draining:
            return inf
        return self.at - self._leave_window_s / 6

    @property
    def timer_is_due(self) -> bool:
        """Whether a timer for saving to begin still counts at this time."""
        return not self.draining and self.at is not None and self._run.now >= self._timer_due

    # --- changes ----------------------------------------------------------------------------

    def begin_life(self, event: AgentStarted) -> None:
        """Begin with the allocation of another agent."""
        self.draining, self.cause = False, ""
        self.at, self.reserve_s = event.deadline, event.reserve_s
        self._timer_due = -inf

    def move(self, at: float | None) -> None:
        """Have the allocation end at this time."""
        self.at = at
        if self.draining:
            self._plan_to_leave()
        elif at is None:
            self._timer_due = inf  # no timer that was set counts any more

    def drain(self, cause: str) -> None:
        """Begin to drain."""
        self.draining, self.cause = True, cause
        self._plan_to_leave()

    def drained_for(self, cause: str) -> None:
        """Note a better word on why it drains: that a person wants it, or the batch system's reason."""
        if _wanted(cause) or (cause.startswith(FROM_BATCH) and not _wanted(self.cause)):
            self.cause = cause

    def _plan_to_leave(self) -> None:
        """A third of the time we keep is for saving, one for those that do not, one for us to leave.

        Where less than that is left, half of what there is is for saving before that.
        """
        if self.at is None:
            return
        left_s = max(0.0, self.at - self._run.now)
        self._leave_window_s = self.reserve_s if left_s >= self.reserve_s else left_s / 2
        self._out.set_timer(HURRY, self.at - self._leave_window_s * 2 / 3)

    def watch(self) -> None:
        """Have saving begin in time, by what is known now; in whole seconds, so that it seldom changes."""
        if self.at is None or self.draining:
            return
        due = float(floor(self.at - self.margin_s()))
        if due != self._timer_due:
            self._timer_due = due
            self._out.set_timer(DRAIN, due)

    def look_again_at_late(self) -> bool:
        """Let jobs that were set aside in where that may help: whether it was done.

        Saving may begin later than when they were set aside, as other jobs have ended; and when nothing
        runs, what was learnt since may let one in.
        """
        foreground = (one for one in self._ledger.mechanisms if one.foreground)
        runs = any(True for one in foreground for _ in one.saving())
        if runs and self.saving_begins() <= self._late_since + 1.0:
            return False
        self._late_since = self.saving_begins()
        self._waiting.let_late_in()
        return True


def _wanted(cause: str) -> bool:
    """Whether a person wants the run to stop."""
    return cause.startswith("inbox:") or cause in ("SIGINT", "SIGHUP", CANCELLED)
