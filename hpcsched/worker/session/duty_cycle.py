"""A training in a process of its own that is to leave a part of the time to others. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

SLICE_S = 0.05
"""How long to rest at a time: what has been asked for may change meanwhile."""


def rest_s(worked_s: float, share: float) -> float:
    """How long to rest after having worked, so that work takes this share of the time; `inf` for 0."""
    return worked_s * (1.0 / share - 1.0) if share > 0 else inf


class DutyCycle:
    """To be taken between two steps."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._since = clock()

    def take(
        self,
        share: Callable[[], float],
        given_up: Callable[[], object],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Do nothing for as long as the time since the last rest asks for; not at all at a share of 1.

        `share` is asked again and again, as it may change; a true `given_up` ends the rest. `settle` waits
        for what a GPU still has to do, which counts as work.
        """
        if share() < 1:
            settle()
        began = self._clock()
        while not given_up():
            left_s = began + rest_s(began - self._since, share()) - self._clock()
            if left_s <= 0:
                break
            self._sleep(min(SLICE_S, left_s))
        self._since = self._clock()
