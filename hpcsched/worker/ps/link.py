"""A server's link: it may be taken to be slower than it is, and how busy it is can be asked for. No torch."""

from __future__ import annotations

from collections import defaultdict

WINDOW_S = 0.2
"""Over which the use of a link is taken."""

BUSY = 0.9
"""Of the capacity: a window with more than that is one of a bottleneck (NEARCHUS, section IV)."""

MIB = 1 << 20


class Lane:
    """One direction: a token bucket that saves nothing up, so that one transfer begins when another ends.

    `mib_s` is its capacity in MiB/s, None if it is not known: transfers then take no time. Times are seconds
    since the epoch, as two processes compare theirs.
    """

    def __init__(self, mib_s: float | None) -> None:
        self._rate = None if mib_s is None else mib_s * MIB
        self._free = 0.0
        self.bytes = 0
        self._busy: defaultdict[int, float] = defaultdict(float)

    def transfer(self, size: int, begin: float) -> float:
        """When a transfer of so many bytes has ended that could begin at `begin`."""
        self.bytes += size
        if self._rate is None:
            return begin
        begin = max(begin, self._free)
        end = self._free = begin + size / self._rate
        while begin < end:
            window = int(begin / WINDOW_S)
            until = min(end, (window + 1) * WINDOW_S)
            # An end that rounding puts a little before the window's own would never come nearer.
            self._busy[window] += max(until - begin, 0.0)
            begin = until if until > begin else end
        return end

    def busy(self, window: int) -> float:
        """The share of the window in which it was in use; windows before it are forgotten."""
        for past in [number for number in self._busy if number < window]:
            del self._busy[past]
        return self._busy.get(window, 0.0) / WINDOW_S


class Link:
    """Both directions of a server's link, and how many windows were seen, and were busy, since `now`."""

    def __init__(self, mib_s: float | None, now: float) -> None:
        self.known = mib_s is not None
        self.inward = Lane(mib_s)
        self.outward = Lane(mib_s)
        self._next = int(now / WINDOW_S) + 1
        self.windows = self.busy_windows = 0

    def look(self, now: float) -> None:
        """Count the windows that have passed: the busier direction tells."""
        while self.known and (self._next + 1) * WINDOW_S <= now:
            self.windows += 1
            self.busy_windows += max(self.inward.busy(self._next), self.outward.busy(self._next)) > BUSY
            self._next += 1
