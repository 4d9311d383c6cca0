"""What one event leads to: new states, notes in stories, actions to perform, timers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcsched.core.actions import Action, SetTimer
from hpcsched.core.events import Event
from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason
from hpcsched.core.run import Run
from hpcsched.errors import InvalidTransition

DRAIN, HURRY, LOOK = ("drain", 0, 0), ("hurry", 0, 0), ("look", 0, 0)
RELEASE, HOSTS = ("release", 0, 0), ("hosts", 0, 0)
"""Keys of the run's own timers: saving begins, jobs that still run are told to end, the policy is asked."""


class Outcome:
    """Collects what is to be done about the event at hand, and puts every change of a job on record.

    Args:
        stories: keep each job's story for `explain`; off saves memory in large simulations.
    """

    def __init__(self, run: Run, *, stories: bool) -> None:
        self._run = run
        self._stories = stories
        self.actions: list[Action] = []
        self.cause = ""
        self.decide = False
        """The policy is to be asked."""
        self.woken = False
        """A job of the foreground has come into a queue."""

    def begin(self, event: Event) -> None:
        """Forget the event before, and take this one."""
        self.actions, self.cause = [], type(event).__name__
        self.decide = self.woken = False

    def ask_policy(self, whether: bool = True) -> None:
        """Have the policy asked once the event is handled, if `whether`."""
        self.decide |= whether

    def only_ask_if(self, whether: bool) -> None:
        """Have the policy asked only if `whether`, whatever has been said before."""
        self.decide = whether

    def wake(self) -> None:
        """Note that a job of the foreground has come into a queue."""
        self.woken = True

    # --- jobs -------------------------------------------------------------------------------

    def set_state(self, job: Job, state: JobState) -> None:
        """Bring a job into another state. Raises InvalidTransition for one that cannot follow."""
        if state not in NEXT_STATES[job.state]:
            raise self.invalid(job, f"{job.state} -> {state}")
        job.state = state
        self._run.touch(job.id)

    def invalid(self, job: Job, what: str) -> InvalidTransition:
        """The error for what cannot be, with the job's story."""
        story = [f"{note.at:10.1f}  {note.reason}" for note in job.story]
        return InvalidTransition(f"job {job.id} ({job.spec.name}), on {self.cause}: {what}", story)

    def note(self, job: Job, reason: Reason) -> None:
        """Add a line to the job's story."""
        self._run.touch(job.id)
        if self._stories:
            job.note(self._run.now, reason)

    def note_news(self, job: Job, reason: Reason) -> None:
        """The same, unless the story ends with such a line already."""
        if not job.story or job.story[-1].reason.why is not reason.why:
            self.note(job, reason)

    # --- actions ----------------------------------------------------------------------------

    def do(self, action: type[Action], job: Job, **rest: Any) -> None:
        """Ask for an action on the job's newest attempt."""
        about: dict[str, Any] = {"job_id": job.id, "attempt": job.attempt}
        self.actions.append(action(at=self._run.now, cause=self.cause, **about, **rest))

    def ask(self, action: type[Action], **rest: Any) -> None:
        """Ask for an action on the run."""
        self.actions.append(action(at=self._run.now, cause=self.cause, **rest))

    def timer(self, kind: str, job: Job, delay_s: float) -> None:
        """Have TimerFired sent about the job's newest attempt, `delay_s` seconds from now."""
        due = self._run.now + delay_s
        job.timers = {**job.timers, kind: due}
        self.set_timer((kind, job.id, job.attempt), due)

    def set_timer(self, key: tuple[str, int, int], due: float) -> None:
        """Have TimerFired sent at `due` seconds of the run's clock."""
        self.ask(SetTimer, key=key, due=due)

    def put_first(self, act: Callable[[], None], first: tuple[type[Action], ...]) -> None:
        """Call `act`; of the actions it asks for those of these types come before all others so far."""
        before, self.actions = self.actions, []
        act()
        ahead = [action for action in self.actions if isinstance(action, first)]
        behind = [action for action in self.actions if not isinstance(action, first)]
        self.actions = [*ahead, *before, *behind]


_S = JobState
NEXT_STATES: dict[JobState, frozenset[JobState]] = {
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
    _S.TIMEOUT: frozenset({_S.PENDING, _S.SUSPENDED}),
    _S.OUT_OF_MEMORY: frozenset({_S.PENDING, _S.SUSPENDED}),
}
