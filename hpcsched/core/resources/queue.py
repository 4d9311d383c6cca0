"""The jobs that could start now, by priority and in FIFO order, found without walking past those that do not
fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from hpcsched.core.needs import Needs
from hpcsched.core.resources.gpus import Fits

Entry = tuple[float, int, int]
"""(arrival, job id, ticket): FIFO by arrival, then by id; the ticket tells a stale entry."""


class Asked(NamedTuple):
    """What a waiting job asks for: so many GPUs on each of so many hosts, and what of needs matters for where
    they are. `mixes`: they may be of several types, and unequally many on its hosts."""

    gpus: int
    nodes: int
    needs: Needs | None = None
    mixes: bool = False

    @property
    def uneven(self) -> bool:
        """See `JobSpec.uneven`."""
        return self.mixes and self.nodes > 1


Meets = Callable[[Asked], bool]
"""Whether needs are met."""


def _could(asked: Asked, fits: Fits | None, meets: Meets | None) -> bool:
    there = fits is None or fits(asked.gpus, asked.nodes, asked.uneven)
    return there and (meets is None or meets(asked))


class WaitingQueue:
    """Waiting jobs, one heap for each priority and for what is asked for, with the smallest acceptable GPU
    count.

    Adding costs O(log n), removing O(1); a walk costs O(log n) for each job it yields, whatever
    the number of jobs that are too large for the free GPUs (MARBLE section V-C: the cost of a
    decision depends on the jobs that run, not on those that wait).
    """

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, Asked], list[Entry]] = {}
        """By (priority, negative; what is asked for)."""
        self._tickets: dict[int, int] = {}
        self._issued = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[int]:
        """Those that wait, in no order; `walk` has them in theirs."""
        return iter(self._tickets)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._tickets

    def add(
        self,
        job_id: int,
        *,
        arrival: float,
        need: int,
        nodes: int = 1,
        needs: Needs | None = None,
        mixes: bool = False,
        priority: int = 0,
    ) -> None:
        """Put a job in; `need` is the smallest GPU count, on each of `nodes` hosts, it can start on; `needs`
        and `mixes`: see `Asked`. A higher `priority` goes first, whenever it came."""
        self._issued += 1
        self._tickets[job_id] = self._issued
        heap = self._heaps.setdefault((-priority, Asked(need, nodes, needs, mixes)), [])
        heappush(heap, (arrival, job_id, self._issued))

    def remove(self, job_id: int) -> None:
        """Take a job out if it is in; its entry goes when it reaches the top of its heap."""
        self._tickets.pop(job_id, None)

    def _head(self, heap: list[Entry]) -> Entry | None:
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heappop(heap)
        return heap[0] if heap else None

    @property
    def changes(self) -> int:
        """A number that is another one whenever a job has come or gone."""
        return 2 * self._issued - len(self._tickets)

    def asked(self) -> list[Asked]:
        """What waiting jobs ask for, each once."""
        return list({key: None for (_, key), heap in self._heaps.items() if self._head(heap)})

    def first(self) -> int | None:
        """The job that is first in line, or None."""
        heads = [(rank, head) for (rank, _), heap in self._heaps.items() if (head := self._head(heap))]
        return min(heads)[1][1] if heads else None

    def any_fits(self, fits: Fits, meets: Meets | None = None) -> bool:
        """Whether some waiting job could start."""
        return any(_could(key, fits, meets) for (_, key), heap in self._heaps.items() if self._head(heap))

    def walk(self, fits: Fits | None = None, meets: Meets | None = None) -> Iterator[int]:
        """Waiting jobs in order that could start; `fits` is asked anew before each (None: all do). `meets`:
        whether needs are met (None: all are)."""
        passed: list[tuple[list[Entry], Entry]] = []
        try:
            while True:
                best: tuple[int, list[Entry]] | None = None
                for (rank, key), heap in self._heaps.items():
                    first = self._head(heap) and (best is None or (rank, heap[0]) < (best[0], best[1][0]))
                    if first and _could(key, fits, meets):
                        best = rank, heap
                if best is None:
                    return
                entry = heappop(best[1])
                passed.append((best[1], entry))
                yield entry[1]
        finally:
            for heap, entry in passed:
                heappush(heap, entry)
