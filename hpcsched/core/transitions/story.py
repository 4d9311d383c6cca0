"""How a change of a run is put on record: states, stories, actions to perform, timers."""

from __future__ import annotations

from heapq import heappush
from typing import Any

from hpcsched.core.actions import Action, SetTimer
from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason
from hpcsched.core.run import RunState
from hpcsched.errors import InvalidTransition


class Noting(RunState):
    """A run's state that keeps track of what happens to it."""

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

    def _expect(self, job: Job, at: float) -> None:
        """Let a job wait for its time."""
        heappush(self.arrivals, (at, job.id))
        self._wake_at_arrival(job, at)

    def _wake_at_arrival(self, job: Job, at: float) -> None:
        # Exactly then: now + (then - now) may come out before it.
        if not job.state.final:
            self._set_timer("arrival", job, at)


_S = JobState
_WAYS: dict[JobState, frozenset[JobState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.HELD, _S.CANCELLED}),
    _S.HELD: frozenset({_S.PENDING, _S.CANCELLED}),
    _S.STARTING: frozenset(set(_S) - {_S.HELD, _S.STARTING}),
    _S.RUNNING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING}),
    _S.SUSPENDING: frozenset(set(_S) - {_S.HELD, _S.STARTING, _S.RUNNING, _S.SUSPENDING}),
    _S.SUSPENDED: frozenset({_S.STARTING, _S.CANCELLED}),
    # Only when the user wants it run again.
    _S.COMPLETED: frozenset({_S.PENDING, _S.SUSPENDED}),
    _S.FAILED: frozenset({_S.PENDING, _S.SUSPENDED}),
    _S.CANCELLED: frozenset({_S.PENDING, _S.SUSPENDED}),
}
