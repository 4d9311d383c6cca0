"""Arrays of jobs of which only so many may be under way at once (Slurm's `--array=1-20%4`)."""

from __future__ import annotations

from heapq import heappop, heappush

from hpcsched.core.jobs import Job


class _Places:
    """The places of one array: the jobs that have one, and those that could start but for one, in order."""

    __slots__ = ("_line", "inside", "outside")

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.outside: set[int] = set()
        self._line: list[int] = []

    def wait(self, job_id: int) -> None:
        """Have a job wait for a place."""
        if job_id not in self.outside:
            self.outside.add(job_id)
            heappush(self._line, job_id)

    def take_next(self) -> int | None:
        """The first of those that wait, which does so no more."""
        while self._line:
            job_id = heappop(self._line)
            if job_id in self.outside:
                self.outside.discard(job_id)
                return job_id
        return None


class Arrays:
    """Who may start of each array: a job has a place from when it is in line until it is over.

    One that is suspended keeps its place, as its work has begun.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Places] = {}

    def enters(self, job: Job) -> bool:
        """Give a job that could start a place, if there is one; else it waits. True without a limit."""
        array = job.spec.array
        if array is None or array.at_once is None:
            return True
        places = self._of.setdefault(array.name, _Places())
        if job.id in places.inside:
            return True
        if len(places.inside) >= array.at_once:
            places.wait(job.id)
            return False
        places.outside.discard(job.id)
        places.inside.add(job.id)
        return True

    def leave(self, job: Job) -> int | None:
        """Take a job's place, or its wish for one; the id of the job that may have its place."""
        array = job.spec.array
        places = self._of.get(array.name) if array else None
        if places is None:
            return None
        places.outside.discard(job.id)
        if job.id not in places.inside:
            return None
        places.inside.discard(job.id)
        return places.take_next()

    def inside(self, job: Job) -> bool:
        """Whether a job has a place."""
        array = job.spec.array
        places = self._of.get(array.name) if array else None
        return places is not None and job.id in places.inside

    def outside(self, job: Job) -> bool:
        """Whether a job that could start waits for a place."""
        array = job.spec.array
        places = self._of.get(array.name) if array else None
        return places is not None and job.id in places.outside
