"""The jobs that could start now, in FIFO order, found without walking past those that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from hpcsched.core.resources.gpus import Fits

Entry = tuple[float, int, int]
"""(arrival, job id, ticket): FIFO by arrival, then by id; the ticket tells a stale entry."""


class WaitingQueue:
    """Waiting jobs, one heap for each smallest acceptable (GPU count on each host, number of hosts).

    Adding costs O(log n), removing O(1); a walk costs O(log n) for each job it yields, whatever
    the number of jobs that are too large for the free GPUs (MARBLE section V-C: the cost of a
    decision depends on the jobs that run, not on those that wait).
    """

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, int], list[Entry]] = {}
        self._tickets: dict[int, int] = {}
        self._issued = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._tickets

    def add(self, job_id: int, *, arrival: float, need: int, nodes: int = 1) -> None:
        """Put a job in; `need` is the smallest GPU count, on each of `nodes` hosts, it can start on."""
        self._issued += 1
        self._tickets[job_id] = self._issued
        heappush(self._heaps.setdefault((need, nodes), []), (arrival, job_id, self._issued))

    def remove(self, job_id: int) -> None:
        """Take a job out if it is in; its entry goes when it reaches the top of its heap."""
        self._tickets.pop(job_id, None)

    def _head(self, heap: list[Entry]) -> Entry | None:
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heappop(heap)
        return heap[0] if heap else None

    def ids(self) -> list[int]:
        """The jobs that are in, in no order."""
        return list(self._tickets)

    def first(self) -> int | None:
        """The job that has waited longest, or None."""
        heads = [head for heap in self._heaps.values() if (head := self._head(heap))]
        return min(heads)[1] if heads else None

    def any_fits(self, fits: Fits) -> bool:
        """Whether some waiting job could start."""
        return any(fits(*key) for key, heap in self._heaps.items() if self._head(heap))

    def walk(self, fits: Fits) -> Iterator[int]:
        """Waiting jobs in order that could start; `fits` is asked anew before each."""
        passed: list[tuple[list[Entry], Entry]] = []
        try:
            while True:
                best: list[Entry] | None = None
                for key, heap in self._heaps.items():
                    if self._head(heap) and (best is None or heap[0] < best[0]) and fits(*key):
                        best = heap
                if best is None:
                    return
                entry = heappop(best)
                passed.append((best, entry))
                yield entry[1]
        finally:
            for heap, entry in passed:
                heappush(heap, entry)
