"""This process keeps to its share of CPU cores by itself: no privilege needed, no peer stopped halfway."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from math import ceil

from hpcsched.planning.ps.bucket import MAX_REST_S, TokenBucket
from hpcsched.worker.ranks.reproducible import pin_threads

SLICE_S = 0.2
"""How long to sleep at a time: what is asked of the process may change meanwhile."""


class CpuShare:
    """`share` is how many cores' time this process may use, `cores` which ones (empty: where it is now).

    For one thread, the one that trains: torch's thread count is that thread's. What was used before this is
    made does not count. Raises ValueError for a share of 0 or less, OSError for cores that do not exist.
    """

    def __init__(self, share: float, cores: Collection[int] = ()) -> None:
        self._bucket = TokenBucket(share, time.monotonic(), self.used_s)
        self._free = False
        self.set(share, cores)

    @property
    def share(self) -> float:
        """How many cores' time it may use."""
        return self._bucket.share

    @property
    def used_s(self) -> float:
        """CPU seconds of this process so far, all its threads together, those that have ended too."""
        return time.process_time()

    def set(self, share: float, cores: Collection[int] = ()) -> None:
        """Another share from now on, on these cores. What was used too much is still to be rested for."""
        self._bucket.change(share, time.monotonic(), self.used_s)
        if cores:
            _pin(frozenset(cores))
        count = len(os.sched_getaffinity(0))
        pin_threads(min(ceil(share), count))
        self._free = share >= count

    def rest(self, stop: Callable[[], object] = lambda: False) -> None:
        """Sleep for as long as more than the share has been used: between two steps, or parts of one.

        Ends when `stop()` is true, and after LONGEST_S. Takes no time while the share is all of its cores.
        """
        if self._free:
            return
        end = time.monotonic() + MAX_REST_S
        while not stop():
            now = time.monotonic()
            sleep_s = min(self._bucket.owed_s(now, self.used_s), end - now, SLICE_S)
            if sleep_s <= 0:
                return
            time.sleep(sleep_s)


def _pin(cores: frozenset[int]) -> None:
    os.sched_setaffinity(0, cores)
    done = set[str]()
    # Until no thread is new: one that was not pinned yet may have started others.
    while new := set(os.listdir("/proc/self/task")) - done:  # noqa: PTH208 - names are all that is needed
        for thread in new:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
        done |= new
