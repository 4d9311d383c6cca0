"""The drain: all jobs save and leave, as the allocation ends or somebody asks for it."""

from __future__ import annotations

from hpcsched.core import events as ev
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting


class Drain:
    """Has all jobs leave in time."""

    def __init__(
        self, run: Run, out: Outcome, *, waiting: Waiting, deadline: Deadline, attempts: Attempts
    ) -> None:
        self._run, self._out, self._waiting = run, out, waiting
        self._deadline, self._attempts = deadline, attempts

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {ev.DeadlineMoved: self._deadline_moved, ev.DrainRequested: self._drain_requested}

    def _deadline_moved(self, event: ev.DeadlineMoved) -> None:
        self._deadline.move(event.deadline)
        if not self._deadline.draining:
            self._waiting.let_late_in()
            self._out.ask_policy()

    def _drain_requested(self, event: ev.DrainRequested) -> None:
        if self._deadline.draining:
            self._deadline.drained_for(event.cause)
        else:
            self._drain(event.cause)

    def due(self) -> None:
        """A timer for saving to begin has run out."""
        if self._deadline.timer_is_due:
            self._drain("deadline")

    def _drain(self, cause: str) -> None:
        self._deadline.drain(cause)
        for job in list(self._run.active.values()):
            if job.target:
                self._attempts.drop_target(job)
            if job.state is not JobState.SUSPENDING and job.wanted in ("", "suspend"):
                self._attempts.leave(job, "drain")

    def hurry(self, now: float) -> None:
        """The allocation is about to end: jobs that still save are told to end."""
        if not self._deadline.draining or self._deadline.at is None:
            return
        left = {"left": max(0.0, self._deadline.at - now)}
        for job in list(self._run.active.values()):
            if job.timers.get("term", -1.0) < now:
                self._out.note(job, Reason(Why.TIME_IS_UP, {**left, "how": "SIGTERM"}))
                self._attempts.terminate(job)
