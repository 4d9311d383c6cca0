"""Sampling of the devices, in a thread of its own, so that a driver that hangs does not stop the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcsched.devices.base import Sample

STALL_S = 5.0
"""The most time between two calls of `take` that counts as silence of the driver (chosen): where it is longer
all of us were stopped, its thread too."""


class Monitor:
    """Calls `sample` every `interval_s` seconds; results are picked up by `take`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sample: Callable[[], Sequence[Sample]],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sample, self.interval_s, self._clock = sample, interval_s, clock
        self.age_s = 0.0
        """Seconds since the newest samples came, at the last `take`."""
        self._taken_at = clock()
        self._results: SimpleQueue[Sequence[Sample]] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._results.put(self._sample())
            if self._stop.wait(self.interval_s):
                return

    def take(self) -> Sequence[Sample] | None:
        """The newest samples since the last call, or None."""
        newest, now = None, self._clock()
        self.age_s += min(now - self._taken_at, STALL_S)
        self._taken_at = now
        while not self._results.empty():
            newest = self._results.get()
        if newest is not None:
            self.age_s = 0.0
        return newest

    def close(self) -> bool:
        """Stop sampling; False if the thread hangs in a driver and is left behind."""
        self._stop.set()
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()
