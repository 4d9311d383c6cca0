"""The timers that the core has asked for; of a key only the newest counts."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

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

    @property
    def first(self) -> float | None:
        """When to look again at the latest; None without a timer."""
        return self._heap[0][0] if self._heap else None
