"""Jobs for which a file system had no room: they wait for it, and it counts as no failure."""

from __future__ import annotations

from heapq import heapify

from hpcsched.core.jobs import Job
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.run import NoSpace
from hpcsched.core.transitions.attempts import Moves

NO_ROOM_S, MOST_NO_ROOM_S = 5.0, 300.0
"""Seconds until a job for which a file system had no room is tried again, the first time and at most."""


class Crowding(Moves):
    """A run's state that knows what had no room."""

    def _no_room(self, job: Job, saved_step: int | None, where: str) -> None:
        """An attempt came to nothing as a file system is full: no fault of the job's, which is tried again
        after a while, each time a longer one. Not for a job that is being cancelled."""
        self._saved(job, saved_step)
        before = self.no_space.get(job.id)
        tries = before.tries + 1 if before else 1
        until = self.now + min(NO_ROOM_S * 2 ** min(tries - 1, 10), MOST_NO_ROOM_S)
        self.no_space[job.id] = NoSpace(where, tries, until)
        self._attempt_lost(job, None, f"no room in {where}", counts=False)
        self._note(job, Reason(Why.NO_SPACE, {"where": where, "again": until, "tries": tries}))
        self._expect(job, until)

    def _room_may_be_back(self) -> None:
        """Who takes a run up again has seen to the disks."""
        waited, self.no_space = self.no_space, {}
        left = [(at, i) for at, i in self.arrivals if i not in waited or self.jobs[i].submit_s > self.now]
        self.arrivals = left
        heapify(self.arrivals)
        for job_id in waited:
            self._enqueue(self.jobs[job_id])
