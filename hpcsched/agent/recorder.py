"""The recorder: events go into the journal first, then into the machine; one that fails there is voided.

The void is journalled too, so the event counts for nothing in every replay either. No event, whatever is
wrong with it or with the code, makes a run impossible to resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch
from hpcsched.core.machine import Machine
from hpcsched.errors import HpcschedError
from hpcsched.policy import make_policy
from hpcsched.store.journal import Journal
from hpcsched.store.replay import replay, void_of

_NOT_DURABLE = (ev.StartWaited, ev.WorkersSpawned, ev.WorkersReady, ev.ProgressObserved)
"""Events that are written without fsync: they are seen again, or their attempt is lost anyway. One that has
a job launched is on disk before that: else it would begin anew beside what this attempt will have saved."""

_WAKING = (ev.WorkersExited, ev.WorkersResized, ev.ResizeFailed)
"""Events that workers announce with a SIGUSR1."""

_DECISIVE = (
    ev.JobsSubmitted,
    ev.WorkersExited,
    ev.WorkersReady,
    ev.WorkersResized,
    ev.ResizeFailed,
    ev.ScalingProposed,
    ev.UsageMeasured,
    ev.DeviceUseMeasured,
    ev.DeviceLost,
    ev.DeviceFound,
    ev.CoresLost,
    ev.DeadlineMoved,
    ev.ResumeRequested,
    ev.ReleaseRequested,
    ev.TimerFired,
)
"""Events that lead to decisions, before which the progress of running jobs is put on record."""


def lead_to_decisions(events: Sequence[ev.Event]) -> bool:
    """Whether one of these events can lead to a decision of the policy."""
    return any(isinstance(event, _DECISIVE) for event in events)


def tell_of_ends(events: Sequence[ev.Event]) -> bool:
    """Whether a worker may just have announced one of these events with a signal."""
    return any(isinstance(event, _WAKING) for event in events)


class Recorder:
    """Puts events on record and has the machine handle them."""

    def __init__(self, machine: Machine, journal: Journal) -> None:
        self._machine, self._journal = machine, journal

    def take(self, events: Sequence[ev.Event]) -> Iterator[tuple[ev.Event, list[Action]]]:
        """Each event once it is handled, with the actions that it leads to. An event that fails is replaced
        by its void, after the others.

        Raises StoreError when the journal cannot be written, HpcschedError where the run cannot go on.
        """
        durable = not all(isinstance(event, _NOT_DURABLE) for event in events)
        self._journal.append(events, sync=durable)
        first = self._journal.seq - len(events) + 1
        waiting = deque(enumerate(events, first))
        while waiting:
            record, event = waiting.popleft()
            try:
                actions = self._machine.handle(event)
            except MemoryError:
                raise  # says nothing of the event
            except Exception as error:
                void = self._void(record, event, error)
                waiting.append((self._journal.seq, void))
                continue
            if not durable and any(isinstance(action, Launch) for action in actions):
                self._journal.append([])  # what is there goes to disk
                durable = True
            yield event, actions

    def _void(self, record: int, event: ev.Event, error: Exception) -> ev.EventVoided:
        """Put on record that an event counts for nothing, and have the machine forget it."""
        if isinstance(event, ev.EventVoided):
            raise HpcschedError(f"record {record} of the journal: {said(error)}") from error
        void = void_of(record, event, said(error), at=self._machine.run.now)
        self._journal.append([void])
        self._machine.become(replay(self._journal.path, make_policy, before=record).machine)
        if isinstance(event, ev.AgentStarted):
            raise HpcschedError(f"the run cannot be taken up: {said(error)}") from error
        return void


def said(error: Exception) -> str:
    """An exception that nobody foresaw, in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
