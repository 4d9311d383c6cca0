"""The timers that the core has asked for; of a key only the newest counts."""

from __future__ import annotations

from collections.abc import Iterator, Set
from heapq import heapify, heappop, heappush

Key = tuple[str, int, int]


class Timers:
    """Timers by key, each due at a time of the run's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []
        self._due: dict[Key, float] = {}

    def set(self, key: Key, due: float) -> None:
        """Have the timer of this key be due then, and not when it was before."""
        self._due[key] = due
        heappush(self._heap, (due, key))

    def rings(self, now: float) -> Iterator[Key]:
        """The keys whose time has come, in order of time; each once."""
        while self._heap and self._heap[0][0] <= now:
            due, key = heappop(self._heap)
            if self._due.get(key) == due:  # else a later one has replaced it
                del self._due[key]
                yield key

    def forget(self, job_ids: Set[int]) -> None:
        """Drop the timers of these jobs, which are over."""
        if job_ids and any(key[1] in job_ids for _, key in self._heap):
            self._heap = [(due, key) for due, key in self._heap if key[1] not in job_ids]
            heapify(self._heap)
            self._due = {key: due for key, due in self._due.items() if key[1] not in job_ids}

    @property
    def first(self) -> float | None:
        """When to look again at the latest; None without a timer."""
        return self._heap[0][0] if self._heap else None
