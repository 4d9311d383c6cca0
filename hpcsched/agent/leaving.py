"""How an attempt is told to leave: asked to save, told to end, or killed."""

from __future__ import annotations

import signal
import time

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.clock import RunClock
from hpcsched.contract import orders
from hpcsched.core.actions import Kill, Suspend, Terminate
from hpcsched.core.jobs import Job

_SIGNALS = {Suspend: signal.SIGTSTP, Terminate: signal.SIGTERM, Kill: signal.SIGKILL}


def ask_to_leave(
    attempt: WatchedAttempt, action: Suspend | Terminate | Kill, job: Job, clock: RunClock
) -> None:
    """Do what the core asked for of an attempt of `job`, in the way that its program understands."""
    attempt.asked_to_leave = attempt.asked_to_leave or time.monotonic()
    if isinstance(action, Suspend):
        attempt.asked_to_save = time.monotonic()
        attempt.workers.tell(orders.Suspend(quick=action.quick))
    # Who has only joined half-way has no state of its own to save.
    attempt.give_up_resizing(signal.SIGKILL if isinstance(action, Kill) else signal.SIGTERM)
    if _asked_by_itself(attempt, action, job, clock):
        return
    if attempt.self_saving:
        attempt.self_saving.told = True
    for group in (attempt.workers, *attempt.joined):
        group.signal(_SIGNALS[type(action)])


def _asked_by_itself(
    attempt: WatchedAttempt, action: Suspend | Terminate | Kill, job: Job, clock: RunClock
) -> bool:
    """Whether an attempt whose program saves by itself has been asked to, as that is all there is to do.

    One that is told to end is asked first, if it has not been; not if it is cancelled.
    """
    saving = attempt.self_saving
    if saving is None or attempt.ready or isinstance(action, Kill):
        return False
    asked = saving.asked_at is not None
    if isinstance(action, Terminate) and (asked or job.wanted == "cancel"):
        return False
    timer = "grace" if isinstance(action, Suspend) else "term"
    if not asked:
        attempt.ask_to_save(clock.until(job.timers.get(timer, 0.0)))
    return True
