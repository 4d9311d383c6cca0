"""Which parts of the foreground's step suffer from a background job, and when it must therefore wait.

The slowdown feedback of section 5: each chunk of the foreground's step has a time in isolation and one in
company; during chunks whose company costs too much nothing of the background's may be on the device. The
device does not preempt, so it is held back in time before such a chunk begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import field
from math import inf
from statistics import median

from hpcsched.compat import dataclass

MAX_KEPT_TIMES = 9
"""The latest times of a chunk whose median is taken (chosen): one odd time of a busy machine must not bar a
chunk."""
MIN_TIMES = 3
"""Times from which on a median is believed (chosen)."""
MAX_SILENCE_US = 20_000.0
"""A foreground that has said nothing for so long beyond its chunk's time does not use the device (chosen): it
waits for data, or saves. The background is not held back for it."""


@dataclass(slots=True)
class ChunkTimes:
    """The latest times of one chunk of the foreground's step."""

    isolated_us: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_TIMES))
    contended_us: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_TIMES))
    barred: bool = False
    seen: bool = False
    retry_at: int = 0
    """The step in which a barred chunk is tried again."""
    patience: int = 0

    @property
    def alone_us(self) -> float | None:
        """The chunk's time in isolation, microseconds; None while that is not known."""
        return median(self.isolated_us) if len(self.isolated_us) >= MIN_TIMES else None

    @property
    def slowdown(self) -> float | None:
        """The cost of company, as a share of the chunk's time in isolation; None while that is not known."""
        alone = self.alone_us
        if alone is None or alone <= 0 or len(self.contended_us) < MIN_TIMES:
            return None
        return median(self.contended_us) / alone - 1.0


class Feedback:
    """Follows the foreground's steps chunk by chunk, and says when the background may be launched.

    Each step goes through the same chunks in the same order, the first of which is 0. One that never comes
    does not count.

    Args:
        sensitive: for each chunk, whether it is barred from the start (all-reduces), until it is tried.
        threshold: a chunk whose slowdown is larger is barred.
        retry_after: steps after which a barred chunk is tried again; twice as many each time it fails.
        probe_every: one step in so many is the foreground's alone, for its times in isolation; 0: none.
    """

    def __init__(
        self,
        sensitive: Sequence[bool],
        *,
        threshold: float = 0.05,
        retry_after: int = 50,
        probe_every: int = 50,
    ) -> None:
        self.threshold, self.retry_after, self.probe_every = threshold, retry_after, probe_every
        self.chunks = [ChunkTimes(barred=barred) for barred in sensitive]
        for times in self.chunks:
            times.patience = times.retry_at = retry_after
        self.step = 0
        self._at, self._since_us = 0, -inf  # which chunk the device is in, or will be in next

    # -- what happens ------------------------------------------------------------------------------------

    def began(self, chunk: int, now_us: float) -> None:
        """The device has begun with a chunk of the foreground's; with 0 a step begins."""
        if chunk == 0:
            self.step += 1
        self.chunks[chunk].seen = True
        self._at, self._since_us = chunk, now_us

    def ended(self, chunk: int, now_us: float, took_us: float, *, contended: bool) -> None:
        """The device has ended a foreground chunk; `contended`: something of the background ran meanwhile."""
        times = self.chunks[chunk]
        self._at, self._since_us = (chunk + 1) % len(self.chunks), now_us
        if not contended:
            times.isolated_us.append(took_us)
            return
        times.contended_us.append(took_us)
        self._judge(times)

    def _judge(self, times: ChunkTimes) -> None:
        slowdown = times.slowdown
        if slowdown is None:
            return
        if slowdown > self.threshold:
            if times.barred:
                times.patience *= 2
            times.barred = True
            times.retry_at = self.step + times.patience
            times.contended_us.clear()  # what is measured at the next trial counts, not this
        elif times.barred:
            times.barred, times.patience = False, self.retry_after

    # -- what is asked -----------------------------------------------------------------------------------

    @property
    def probing(self) -> bool:
        """Whether this step is the foreground's alone: its times in isolation are not known, or old."""
        if any(times.seen and len(times.isolated_us) < MIN_TIMES for times in self.chunks):
            return True
        return self.probe_every > 0 and self.step % self.probe_every == 0

    def closed(self, chunk: int) -> bool:
        """Whether the background must not run during this chunk, in this step."""
        times = self.chunks[chunk]
        return times.barred and self.step < times.retry_at

    def may_launch(self, now_us: float, needs_us: float) -> bool:
        """Whether work that keeps the device busy for `needs_us` from now on meets no closed chunk."""
        alone_us = self.chunks[self._at].alone_us or 0.0
        if now_us > self._since_us + 2 * alone_us + MAX_SILENCE_US:
            return True
        if self.probing:
            return False
        chunk, until_us = self._at, self._since_us
        for _ in range(len(self.chunks)):
            if self.closed(chunk):
                return False
            until_us = max(until_us + (self.chunks[chunk].alone_us or 0.0), now_us)
            if until_us >= now_us + needs_us:
                return True
            chunk = (chunk + 1) % len(self.chunks)
        return True

    def slowdown(self) -> float | None:
        """The cost of the background to the foreground's step now, as a share; None while nothing is known.

        Chunks that it is kept out of count as not slowed down.
        """
        alone = [times.alone_us for times in self.chunks if times.seen]
        if None in alone or not sum(filter(None, alone)):
            return None
        known = [(times, times.alone_us or 0.0) for times in self.chunks]
        extra = sum(us * max(0.0, times.slowdown or 0.0) for times, us in known if not times.barred)
        return extra / sum(us for _, us in known)
