"""What jobs have left in memory is on its way to disk: how long the end of a run waits for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from math import inf

from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.core.machine import Machine

WITHIN_S = 1800.0
"""Time that states may take from memory to disk when nothing is left to run (chosen)."""

TOLD_TO_END_S = 10.0
"""Time that they have left once the agent is told to end (chosen)."""


class Durability:
    """Whether all states are on disk, asked again and again once nothing else is left to be done."""

    def __init__(
        self, effects: Effects, machine: Machine, clock: RunClock, tell: Callable[[str], None]
    ) -> None:
        self._effects, self._machine, self._clock, self._tell = effects, machine, clock, tell
        self._by: float | None = None

    def done(self) -> bool:
        """Whether nothing is on its way from memory to disk any more, or has been for too long."""
        if not self._effects.keeping():
            return True
        if self._by is None:
            self._by = self._in(WITHIN_S)
        late = self._clock.now() > min(self._by, self._machine.deadline.leave_by)
        if late:
            self._tell("leaving before all states were on disk: those jobs go on from older checkpoints")
        return late

    def _in(self, seconds: float) -> float:
        """When that will be, on the run's clock: it stands still while all is stopped."""
        return self._clock.now() + seconds * self._clock.speed

    def put_off(self) -> None:
        """There is something else to be done."""
        self._by = None

    def wait(self, arrived: Callable[[], bytes], between: Callable[[], None]) -> None:
        """Wait for it where nothing else can be done; `between` is called meanwhile.

        `arrived`: the numbers of signals that have come. An interrupt ends the wait, others shorten it.
        """
        self.put_off()
        if self._effects.keeping():
            self._tell("what jobs left in memory goes to disk: waiting for that (an interrupt ends it)")
        while not self.done():
            assert self._by is not None
            signals = arrived()
            if signal.SIGINT in signals:
                self._by = -inf
            elif signal.SIGTERM in signals or signal.SIGHUP in signals:
                self._by = min(self._by, self._in(TOLD_TO_END_S))
            between()
            time.sleep(0.05)
