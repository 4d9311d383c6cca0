"""A clock that goes only while somebody waits: hours of a run in seconds of ours, the same every time."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from heapq import heappop, heappush
from itertools import count
from unittest import mock

STARTS_AT = 1_800_000_000.0
"""The Unix time at which all virtual worlds begin."""


LEAST_S = 1e-4
"""What a look at the descriptors takes, as no real one takes no time at all."""


class VirtualClock:
    """Seconds, by `monotonic`, and what is to happen when; `wall` may jump.

    Callbacks are called in order of time while somebody waits.
    """

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.jumped_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """What everything that is due happens in."""

    @property
    def wall(self) -> float:
        """The Unix time."""
        return STARTS_AT + self.monotonic + self.jumped_s

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have `what` called in so many seconds."""
        heappush(self._due, (self.monotonic + max(0.0, seconds), next(self._number), what))

    def stand_still(self, seconds: float) -> None:
        """So much time goes by in which nothing happens: what is due comes later."""
        self.monotonic += seconds
        self._due = [(at + seconds, number, what) for at, number, what in self._due]

    def step(self, until: float) -> None:
        """Go on to the next thing that is due, and have it happen; without one to `until`."""
        if self._due and self._due[0][0] <= until:
            at, _, what = heappop(self._due)
            self.monotonic = max(self.monotonic, at)
            with self.around():
                what()
        else:
            self.monotonic = max(self.monotonic, until)

    def sleep(self, seconds: float) -> None:
        """Wait, as `time.sleep` does."""
        until = self.monotonic + seconds
        while self.monotonic < until:
            self.step(until)

    @contextmanager
    def instead_of_time(self) -> Iterator[None]:
        """Within this, the clocks of the module `time` are this one."""
        clocks: Mapping[str, Callable[..., object]] = {
            "monotonic": lambda: self.monotonic,
            "time": lambda: self.wall,
            "time_ns": lambda: int(self.wall * 1e9),
            "sleep": self.sleep,
        }
        with mock.patch.multiple(time, **clocks):
            yield


class VirtualSelector(selectors.DefaultSelector):
    """Looks at real descriptors; it waits by the virtual clock."""

    clock: VirtualClock
    before_waiting: Callable[[], object] = staticmethod(lambda: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.before_waiting()
        until = self.clock.monotonic + max(LEAST_S, 60.0 if timeout is None else timeout)
        while True:
            ready = super().select(0)
            if ready or self.clock.monotonic >= until:
                return ready
            self.clock.step(until)
