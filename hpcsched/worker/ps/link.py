"""A server's link: it may be taken to be slower than it is, and how busy it is can be asked for. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

WINDOW_S = 0.2
"""Over which the use of a link is taken."""

BUSY = 0.9
"""Of a window: with more than that it is one of a bottleneck (NEARCHUS, section IV)."""

MIB = 1 << 20

Span = tuple[float, float]
"""From when to when."""


class LinkDirection:
    """One direction: a token bucket that saves nothing up, so that one transfer begins when another ends.

    `mib_s` is its capacity in MiB/s, None if it is not known: transfers then take no time. Times are seconds
    since the epoch, as two processes compare theirs.
    """

    def __init__(self, mib_s: float | None) -> None:
        self._rate = None if mib_s is None else mib_s * MIB
        self._free = 0.0
        self._transfers: list[Span] = []
        self.bytes = 0

    def transfer(self, size: int, begin: float) -> float:
        """When a transfer of so many bytes has ended that could begin at `begin`."""
        self.bytes += size
        if self._rate is None:
            return begin
        begin = max(begin, self._free)
        self._free = begin + size / self._rate
        self._transfers.append((begin, self._free))
        return self._free

    def during(self, start: float, stop: float) -> list[Span]:
        """Its transfers in that time; what was before is forgotten."""
        self._transfers = [span for span in self._transfers if span[1] > start]
        return [(max(a, start), min(b, stop)) for a, b in self._transfers if a < stop]


class ServerLink:
    """Both directions of a server's link, and how many windows were seen, and were busy, since `now`.

    In a synchronous step the directions take turns: so what counts is when there is anything under way.
    """

    def __init__(self, mib_s: float | None, now: float) -> None:
        self.known = mib_s is not None
        self.inward = LinkDirection(mib_s)
        self.outward = LinkDirection(mib_s)
        self._next = now
        self.windows = self.busy_windows = 0

    def look(self, now: float) -> None:
        """Count the windows that have passed."""
        while self.known and self._next + WINDOW_S <= now:
            start, self._next = self._next, self._next + WINDOW_S
            spans = [*self.inward.during(start, self._next), *self.outward.during(start, self._next)]
            self.windows += 1
            self.busy_windows += covered(spans) > BUSY * WINDOW_S


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of them lasts."""
    total, end = 0.0, -inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
