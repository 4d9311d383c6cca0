"""A token bucket: the rests of a process by which it uses no more CPU time than its share. Pure."""

from __future__ import annotations

from dataclasses import field

from hpcsched.compat import dataclass

MAX_CREDIT_S = 0.1
"""An idle process saves up this much of its share's time, and of one core's time if its share is larger.

That is 2 % of a core over 5 s. It need not be more for a server that works in bursts: a burst is taken first
and paid for after, while the server would wait for its workers anyway. Only what a round takes longer than
another is to be saved up: in steps of 10 ms all of it, in steps of 1 s a tenth, and the delay of sleeps that
wake up late.
"""
MAX_REST_S = 30.0
"""The longest rest (chosen); what would still be owed after it is forgiven. The peers of a process that rests
wait for it."""


@dataclass(slots=True)
class TokenBucket:
    """Filled by `share` CPU seconds per second, emptied by those used; below zero the process is to rest.

    `now` and `used` are seconds on any clock and CPU seconds in all, both of the last look; `share` is in
    cores, more than 0. What was used may be told at any time, and late: only the balance since the last look
    is limited, so it does not matter where in between a process waited. Over any time between two looks use
    is at most share * time + credit + what the last piece of work took (if that was less than MAX_REST_S of
    its share).
    """

    share: float
    now: float
    used: float
    _level_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _check(self.share)

    def owed_s(self, now: float, used: float) -> float:
        """Seconds to sleep now; 0.0 if more may be used."""
        earned_s = self.share * (now - self.now) - (used - self.used)
        self._level_s += earned_s
        self._level_s = min(MAX_CREDIT_S * min(self.share, 1.0), max(-MAX_REST_S * self.share, self._level_s))
        self.now, self.used = now, used
        return max(0.0, -self._level_s / self.share)

    def change(self, share: float, now: float, used: float) -> None:
        """Another share from now on. What is owed, in CPU seconds, stays owed."""
        _check(share)
        self.owed_s(now, used)
        self.share = share


def _check(share: float) -> None:
    if not share > 0:
        raise ValueError(f"a share of {share} cores; it has to be more than 0")
