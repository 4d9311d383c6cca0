"""Pacing of a lane: it launches a few pieces of work at a time, and works for its share of the time only."""

from __future__ import annotations

from dataclasses import field
from math import inf

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError

MAX_CREDIT_US = 5_000.0
"""The most unused time that a duty cycle saves up, in microseconds (chosen): more would let a lane that has
waited flood the device."""


def share_of(value: object, where: str) -> float:
    """A duty cycle, 0..1, of a value in a job file. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(where=where, key="pace", got=repr(value), accepted="a share of the time, 0 to 1")
    return float(value)


@dataclass(slots=True)
class Duty:
    """Lets a lane work for `share` of the time: each microsecond of work costs 1/share of waiting.

    0 stops it, 1 never makes it wait.
    """

    share: float = 1.0
    _free_at: float = field(default=-inf, init=False)

    def worked(self, began_us: float, ended_us: float) -> None:
        """The lane has worked from then to then; stretches come in order of their ends."""
        if self.share <= 0:
            self._free_at = ended_us
            return
        credit_us = MAX_CREDIT_US if self._free_at > -inf else 0.0
        since = max(self._free_at, began_us - credit_us)
        self._free_at = since + (ended_us - began_us) / self.share

    def free_at(self) -> float:
        """From when on the next piece may be launched; `inf` while the share is 0."""
        return inf if self.share <= 0 else self._free_at


@dataclass(slots=True)
class Pacer:
    """At most `limit` launches of a lane that have not completed (section 5, "launch pacing").

    Launches complete in the order in which they were made, as on a CUDA stream. Raises ValueError when it is
    told what cannot be: a launch that it has not allowed, an end without a launch.
    """

    limit: int
    duty: Duty = field(default_factory=Duty)
    held: bool = False
    """Nothing may be launched, whatever the numbers say."""
    _launched_us: list[float] = field(default_factory=list, init=False)
    _idle_since: float = field(default=-inf, init=False)

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(where="lane", key="limit", got=f"{self.limit} launches", accepted="at least 1")

    @property
    def outstanding(self) -> int:
        """Launches that have not completed."""
        return len(self._launched_us)

    def may_launch(self, now_us: float) -> bool:
        """Whether the next piece may be launched now."""
        return not self.held and self.outstanding < self.limit and now_us >= self.duty.free_at()

    def wake_us(self) -> float:
        """The time to ask again if nothing happens before: the end of the duty cycle's pause, or `inf`."""
        return inf if self.held or self.outstanding >= self.limit else self.duty.free_at()

    def launched(self, now_us: float) -> None:
        """A piece has been launched."""
        if not self.may_launch(now_us):
            raise ValueError(f"a launch at {now_us} us that was not allowed: {self}")
        self._launched_us.append(now_us)

    def completed(self, now_us: float) -> None:
        """The oldest launched piece has completed."""
        if not self._launched_us:
            raise ValueError(f"an end at {now_us} us, but nothing had been launched")
        began = max(self._launched_us.pop(0), self._idle_since)  # it ran after the one before it
        self.duty.worked(began, now_us)
        self._idle_since = now_us
