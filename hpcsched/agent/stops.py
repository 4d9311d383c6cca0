"""Times for which all processes of the run were stopped (`scontrol suspend`): none of its jobs ran."""

from __future__ import annotations

import time
from selectors import BaseSelector, SelectorKey

NOTICED_S = 5.0
"""A wait that is longer than asked for by this much means that all processes were stopped (chosen)."""


class Stops:
    """The waits of the agent's loop, by which it notices that it was stopped."""

    def __init__(self) -> None:
        self._woke, self._worked_s, self._late_s = time.monotonic(), 0.0, 0.0

    def wait(self, selector: BaseSelector, timeout_s: float) -> list[SelectorKey]:
        """What has become ready within so many seconds."""
        began = time.monotonic()
        self._worked_s = began - self._woke
        ready = [key for key, _ in selector.select(timeout_s)]
        self._woke = time.monotonic()
        self._late_s = self._woke - began - timeout_s
        return ready

    def lasted_s(self, *, continued: bool) -> float:
        """For how many seconds all were stopped, in the last wait or just before it; 0 if they were not.

        What lies between two waits may take long, as on a slow disk: there it counts as a stop only with the
        SIGCONT that ends one (`continued`).
        """
        stopped_s = self._worked_s if continued and self._worked_s > self._late_s else self._late_s
        return stopped_s if stopped_s >= NOTICED_S else 0.0
