"""Cores of this host for the processes of jobs that say how many they need for each GPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable


class CoreSets:
    """Gives out cores so that jobs which are pinned share none as long as there are enough.

    `cores`: those for jobs on GPUs, siblings of a physical core next to each other.
    """

    def __init__(self, cores: Iterable[int]) -> None:
        self._cores = tuple(cores)
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()

    def take(self, count: int, near: Collection[int] | None = None) -> frozenset[int]:
        """`count` cores (all, if there are fewer): those that the fewest have, then those near the GPU."""
        with self._lock:
            order = sorted(
                range(len(self._cores)),
                key=lambda at: (
                    self._users[self._cores[at]],
                    near is not None and self._cores[at] not in near,
                    at,
                ),
            )
            taken = frozenset(self._cores[at] for at in order[:count])
            self._users.update(taken)
            return taken

    def give_back(self, taken: Iterable[int]) -> None:
        """Have these cores free again for others."""
        with self._lock:
            self._users.subtract(taken)
