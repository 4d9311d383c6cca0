"""A thread that asks the batch system for the end of the allocation; the agent never waits for it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue

from hpcsched.agent.clock import monotonic
from hpcsched.batch.base import BatchSystem, EndReason, Preemption
from hpcsched.errors import BatchError

PERIOD_S = 60.0
"""How often the batch system is asked for the end time near the end, and where none is known (chosen)."""

LONGEST_PERIOD_S, LEFT_FRACTION = 600.0, 0.05
"""How often it is asked before: after this part of the time left, at most so long (chosen). One controller
serves all runs of a site."""

JITTER = 0.1
"""By so much a period may be shorter: runs that began together do not ask together for ever (chosen)."""

PREEMPTIBLE_PERIOD_S, GRACE_FRACTION = 10.0, 0.1
"""How often it is asked in a preemptible job: after this, or this part of the time of grace (chosen)."""

MIN_PERIOD_S = 2.0
"""The shortest period (chosen)."""

KILL_WAIT_TRIES = 5
"""How often it is asked for the time from SIGTERM to SIGKILL, until it answers (chosen)."""

RETRY_S = 2.0
"""Time until it is asked again what somebody waits for, when it did not say (chosen)."""

MIN_CHANGE_S = 2.0
"""An end that is earlier than the known one by more than this may be a preemption's (chosen)."""


@dataclass(frozen=True, slots=True)
class EndTimeAnswer:
    """An answer of the batch system: the Unix time of the end (None: never), or the `error` of the question.

    `reason`: why the job is being ended, where that was asked; it may come alone (`of_end` False).
    `asked_at`: the time of the question, by the monotonic clock.
    """

    deadline: float | None = None
    error: str = ""
    reason: EndReason | None = None
    of_end: bool = True
    asked_at: float = field(default_factory=monotonic)


def period_s(
    preemption: Preemption | None, left_s: float | None = None, least_s: float | None = None
) -> float:
    """The period, in seconds, at which the end of an allocation is asked for.

    `left_s`: until the known end; None: none is known, inf: there is none. `least_s`: the shortest period
    that the site wants, which goes before all else.
    """
    if preemption is None:
        wanted = PERIOD_S if left_s is None else left_s * LEFT_FRACTION
        period = min(max(PERIOD_S, wanted), LONGEST_PERIOD_S)
    elif preemption.grace_s is None:
        period = PREEMPTIBLE_PERIOD_S
    else:
        period = max(MIN_PERIOD_S, min(PREEMPTIBLE_PERIOD_S, preemption.grace_s * GRACE_FRACTION))
    return max(period, least_s or 0.0)


class AllocationWatch:
    """Asks for the end time every `period_s`, and sets the job's comment at most as often.

    Args:
        at_once: ask the first time now.
        deadline: the end that is known already, as a Unix time.
        preemption: the rules of a preemptible job; an end that moves nearer makes it ask for the reason.
        least_s: the shortest period, see `period_s`.
    """

    def __init__(
        self,
        batch: BatchSystem,
        *,
        at_once: bool = False,
        deadline: float | None = None,
        preemption: Preemption | None = None,
        least_s: float | None = None,
    ) -> None:
        self._batch, self._preemption, self._least_s = batch, preemption, least_s
        self._deadline, self._known = deadline, deadline is not None
        self.kill_wait_s: float | None = None
        """Seconds from the first signal that ends the job to SIGKILL; None: not known (yet)."""
        self.comment = ""
        """The comment to set; assigned by the caller."""
        self._answers: SimpleQueue[EndTimeAnswer] = SimpleQueue()
        self._wake = threading.Event()
        self._why = threading.Event()
        self._stopped = False
        self._said = ""
        self._commented_at = float("-inf")
        if at_once:
            self._wake.set()
        self._thread = threading.Thread(target=self._run, name="allocation", daemon=True)
        self._thread.start()

    def ask_now(self) -> None:
        """Ask for the end at once, and again and again for a while if there is no answer; it comes through
        `take`."""
        self._wake.set()

    def ask_why(self) -> None:
        """Ask at once for the reason of the end, repeatedly until there is one, and then for the end."""
        self._why.set()
        self._wake.set()

    def take(self) -> list[EndTimeAnswer]:
        """The answers since the last call."""
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def close(self) -> None:
        """Stop asking; a question under way is left to end by itself."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        wait_s, tries, first, pressing_until = 0.0, 0, True, float("-inf")
        while True:
            self._wake.wait(wait_s)
            asked = self._wake.is_set()
            self._wake.clear()
            if self._stopped:
                return
            if asked:
                pressing_until = time.monotonic() + PERIOD_S
            if self._why.is_set():
                self._why.clear()  # first: who asks from here on means what comes from here on
                asked_at, reason = time.monotonic(), self._reason()
                if reason is EndReason.UNKNOWN:
                    self._why.set()
                self._answers.put(EndTimeAnswer(reason=reason, of_end=False, asked_at=asked_at))
            if asked or wait_s:
                self._answers.put(answer := self._end())
                if not answer.error:
                    pressing_until = float("-inf")
            if self.kill_wait_s is None and tries < KILL_WAIT_TRIES:
                tries += 1
                self.kill_wait_s = self._batch.kill_wait()
            self._tell()
            pressing = self._why.is_set() or time.monotonic() < pressing_until
            wait_s = RETRY_S if pressing else self._next_s(first)
            first = False

    def _next_s(self, first: bool) -> float:
        """The time until the next question; the first comes soon, as it brings the first comment too."""
        left_s = None
        if self._known and not first:
            left_s = inf if self._deadline is None else self._deadline - time.time()
        return period_s(self._preemption, left_s, self._least_s) * (1.0 - random.uniform(0.0, JITTER))

    def _end(self) -> EndTimeAnswer:
        known, asked_at = self._deadline, time.monotonic()
        try:
            self._deadline = self._batch.end_time()
        except BatchError as error:
            return EndTimeAnswer(error=str(error))
        except Exception as error:  # whatever a binding raises: the next question may do better
            return EndTimeAnswer(error=f"the end time cannot be had: {error!r}")
        end, self._known = self._deadline, True
        sooner = end is not None and (known is None or end < known - MIN_CHANGE_S)
        reason = self._reason() if sooner and self._preemption else None
        return EndTimeAnswer(deadline=end, reason=reason, asked_at=asked_at)

    def _reason(self) -> EndReason:
        try:
            return self._batch.reason()
        except Exception:
            return EndReason.UNKNOWN

    def _tell(self) -> None:
        text = self.comment
        if text == self._said or time.monotonic() < self._commented_at + PERIOD_S * (1.0 - JITTER):
            return
        try:
            self._batch.comment(text)
        except Exception:
            return  # nothing depends on it; the next one may get through
        self._said, self._commented_at = text, time.monotonic()
