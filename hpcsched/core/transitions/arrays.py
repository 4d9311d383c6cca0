"""Arrays of jobs of which only so many may be under way at once (Slurm's `--array=1-20%4`)."""

from __future__ import annotations

from heapq import heappop, heappush

from hpcsched.core.jobs import Job


class _Places:
    """The places of one array: the jobs that have one, and those that could start but for one, in order."""

    __slots__ = ("_line", "_newest", "inside", "limit", "outside")

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.outside: set[int] = set()
        self._line: list[int] = []
        self._newest, self.limit = 0, 0

    def limited(self, job_id: int, at_once: int) -> bool:
        """Go by the limit of the newest job, which may say another: whether it is higher."""
        before = self.limit
        if job_id >= self._newest:
            self._newest, self.limit = job_id, at_once
        return self.limit > before

    def has_room(self) -> bool:
        """Whether there is a place."""
        return len(self.inside) < self.limit

    def wait(self, job_id: int) -> None:
        """Have a job wait for a place."""
        if job_id not in self.outside:
            self.outside.add(job_id)
            heappush(self._line, job_id)

    def take_next(self) -> int | None:
        """The first of those that wait, which does so no more, if there is a place for it."""
        while self._line and self.has_room():
            job_id = heappop(self._line)
            if job_id in self.outside:
                self.outside.discard(job_id)
                return job_id
        return None


class Arrays:
    """Who may start of each array: a job has a place from when it is in line until it is over.

    One that is suspended keeps its place, as its work has begun. Places are known by job: what a job file
    says of its array may change meanwhile.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Places] = {}
        self._array: dict[int, str] = {}
        """By job with a place, or one that waits for it, the array."""

    def limit_by(self, job: Job) -> str | None:
        """Note how many of a job's array may be under way; the array, if these are more than before."""
        array = job.spec.array
        if array is None or array.at_once is None:
            return None
        places = self._of.setdefault(array.name, _Places())
        return array.name if places.limited(job.id, array.at_once) else None

    def enters(self, job: Job) -> bool:
        """Give a job that could start a place, if there is one; else it waits. True without a limit."""
        array = job.spec.array
        if array is None or array.at_once is None:
            return True
        places = self._of[array.name]
        if job.id in places.inside:
            return True
        self._array[job.id] = array.name
        if not places.has_room():
            places.wait(job.id)
            return False
        places.outside.discard(job.id)
        places.inside.add(job.id)
        return True

    def leave(self, job: Job) -> str | None:
        """Take a job's place, or its wish for one; the array in which a place is free now, if it had one."""
        name = self._array.pop(job.id, None)
        if name is None:
            return None
        places = self._of[name]
        places.outside.discard(job.id)
        had = job.id in places.inside
        places.inside.discard(job.id)
        return name if had else None

    def next_of(self, name: str) -> int | None:
        """The first job that waits for a place in an array, and does so no more; None without a place."""
        return self._of[name].take_next()

    def inside(self, job: Job) -> bool:
        """Whether a job has a place."""
        return job.id in self._array and job.id in self._of[self._array[job.id]].inside

    def outside(self, job: Job) -> bool:
        """Whether a job that could start waits for a place."""
        return job.id in self._array and job.id in self._of[self._array[job.id]].outside

    def limit_of(self, job: Job) -> int:
        """How many may be under way of the array in which a job has a place, or waits for one."""
        return self._of[self._array[job.id]].limit
