"""The run's clock: seconds since the run began, not counting the time no agent lived."""

from __future__ import annotations

import time


def monotonic() -> float:
    """`time.monotonic`, looked up each time: as a default it lets a virtual clock take its place."""
    return time.monotonic()


class RunClock:
    """Starts at `at` and goes `speed` times as fast as real time (faster than 1 for stand-ins only)."""

    def __init__(self, *, at: float = 0.0, speed: float = 1.0) -> None:
        self.speed = speed
        self._at = at
        self._since = time.monotonic()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._at + (time.monotonic() - self._since) * self.speed

    def at_wall(self, wall: float) -> float:
        """The time of this clock at a Unix time, as far as is known now."""
        return self.now() + (wall - time.time()) * self.speed

    def at_monotonic(self, at: float | None) -> float | None:
        """The time of this clock at one of `time.monotonic`; None stays None (not known)."""
        return None if at is None else self.now() + (at - time.monotonic()) * self.speed

    def skip(self, seconds: float) -> None:
        """Do not count `seconds` of real time, in which all processes of the run were stopped."""
        self._since += seconds

    def until(self, at: float) -> float:
        """Real seconds until the run's clock shows `at`; 0 if it already does."""
        return max(0.0, (at - self.now()) / self.speed)
