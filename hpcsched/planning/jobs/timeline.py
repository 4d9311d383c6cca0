"""One possible future of a run's jobs: what a planner tries its plans on, thousands of times a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from math import ceil, floor, inf

from hpcsched.core.resources.gpus import GpusByHost
from hpcsched.planning.jobs.course import STEP_TOLERANCE
from hpcsched.planning.jobs.problem import Problem


def rooms_of(free: Mapping[str, int]) -> GpusByHost:
    """GpusByHost with these GPUs; the same whatever class they are of."""
    return _OneRoom(free) if len(free) == 1 else GpusByHost(free)


class _OneRoom(GpusByHost):
    """GpusByHost of a single host, where nothing has to be looked for."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        super().__init__(gpus)
        self._only = tuple(gpus)

    def by_host(self) -> dict[str, int]:
        return {self._only[0]: self.left}

    def most(
        self,
        nodes: int,
        own: Mapping[str, int] | None = None,
        room: Mapping[str, int] | None = None,
        *,
        uneven: bool = False,
    ) -> int:
        most = 0 if nodes > 1 else self.left + (own[self._only[0]] if own else 0)
        return most if room is None else min(most, room.get(self._only[0], 0))

    def pick(
        self,
        wanted: int,
        nodes: int,
        own: Mapping[str, int] | None = None,
        room: Mapping[str, int] | None = None,
        *,
        uneven: bool = False,
    ) -> tuple[int, tuple[str, ...]]:
        most = self.most(nodes, own, room) if own or nodes > 1 or room is not None else self.left
        return wanted if wanted < most else most, self._only

    def take(self, hosts: Iterable[str], count: int, own: Mapping[str, int] | None = None) -> None:
        self.left -= max(0, count - own[self._only[0]]) if own else count

    def give(self, hosts: Iterable[str], count: int) -> None:
        self.left += count


class Timeline:
    """One possible future of a problem: jobs are started and resized, and time goes on from event to event.

    A new one begins with the present state, and nothing is decided yet.
    `ends[i]` is when job i has ended or will end as things stand (infinite for one not started). `active` are
    the jobs that hold GPUs, in the order of their starts.
    """

    __slots__ = (
        "_after",
        "_agenda",
        "_back",
        "_begin",
        "_busy",
        "_issued",
        "_step",
        "_tickets",
        "_unmet",
        "_works",
        "active",
        "ends",
        "hosts",
        "looks_at",
        "now",
        "rooms",
        "width",
    )

    def __init__(self, problem: Problem) -> None:
        works = problem.works
        self._works = works
        self.now = problem.now
        self.rooms = rooms_of(problem.view.free.by_host())
        self.ends = [inf] * len(works)
        self.width = [work.width for work in works]
        self.hosts = [work.hosts for work in works]
        self.active: dict[int, None] = dict.fromkeys(problem.running)
        self.looks_at = -inf
        self._step = [work.step for work in works]
        self._begin = [work.begin for work in works]
        self._busy = [work.busy_until for work in works]
        self._after: dict[int, list[int]] = {}
        self._unmet: dict[int, int] = {}
        self._agenda: list[tuple[float, int, int]] = []
        self._back: dict[int, tuple[tuple[str, ...], int]] = {}
        self._tickets = [0] * len(works)
        self._issued = 0
        for i in problem.running:
            work = works[i]
            self._end(i, work.begin + (work.steps - work.step) / work.rate[work.width])
            if work.busy_until > self.now:
                self._give_back(work.busy_until, work.hosts, 0)
        for free_s, host, count in problem.leaving:
            self._give_back(free_s, (host,), count)
        for i in problem.blocked:
            self._unmet[i] = len(works[i].after)
            for before in works[i].after:
                self._after.setdefault(before, []).append(i)

    def copy(self) -> Timeline:
        """The same state, to go on from in another way."""
        new = Timeline.__new__(Timeline)
        new._works, new._after = self._works, self._after  # never changed
        new.now, new.looks_at = self.now, self.looks_at
        new.rooms, new._issued = rooms_of(self.rooms.by_host()), self._issued
        new.ends, new.width, new.hosts = self.ends.copy(), self.width.copy(), self.hosts.copy()
        new._step, new._begin, new._busy = self._step.copy(), self._begin.copy(), self._busy.copy()
        new._tickets, new._agenda = self._tickets.copy(), self._agenda.copy()
        new.active, new._unmet, new._back = self.active.copy(), self._unmet.copy(), self._back.copy()
        return new

    def start(self, i: int, gpus: int, hosts: tuple[str, ...]) -> None:
        """Launch a waiting job."""
        work, now = self._works[i], self.now
        self.rooms.take(hosts, gpus)
        self.width[i], self.hosts[i] = gpus, hosts
        self.active[i] = None
        end = now + work.whole_s[gpus]
        self._begin[i] = end - work.train_s[gpus]
        self._issued = self._tickets[i] = ticket = self._issued + 1
        self.ends[i] = end
        heappush(self._agenda, (end, ticket, i))

    def grown(self, i: int, most: int) -> tuple[int, float]:
        """The count above its own, up to `most`, that a running job would end soonest on, and when."""
        work, width = self._works[i], self.width[i]
        free_s, step = self._stopped(i) if work.in_place else self._saved(i)
        if step >= work.steps:
            return width + 1, free_s
        best, end, left = 0, inf, work.steps - step
        rate, resume_s = work.rate, work.resume_s
        if work.in_place:
            resume_s = [work.switch_s(width, gpus) for gpus in range(most + 1)]
        for gpus in range(width + 1, most + 1):
            then = free_s + resume_s[gpus] + left / rate[gpus]
            if then < end:
                best, end = gpus, then
        return work.fit[best], end

    def resized_end(self, i: int, gpus: int) -> float:
        """The end of a running job if it is resized now."""
        _, begin, step = self._changed(i, gpus)
        work = self._works[i]
        return begin if step >= work.steps else begin + (work.steps - step) / work.rate[gpus]

    def resize(self, i: int, gpus: int, hosts: tuple[str, ...]) -> None:
        """Bring a running job to another count: more GPUs it takes at once, fewer it gives back later."""
        work = self._works[i]
        own = self.own(i)
        self.rooms.take(hosts, gpus, own)
        free_s, begin, step = self._changed(i, gpus)
        if step < work.steps:
            self._step[i], self._begin[i] = step, begin
            self._end(i, begin + (work.steps - step) / work.rate[gpus])
        self._busy[i] = free_s
        width = self.width[i]
        for host in self.hosts[i]:
            kept = gpus if host in hosts else 0
            self._give_back(free_s, (host,), width - kept if width > kept else 0)
        self.width[i], self.hosts[i] = gpus, hosts

    def own(self, i: int) -> Mapping[str, int]:
        """The GPUs that a job holds, by host."""
        return dict.fromkeys(self.hosts[i], self.width[i])

    def resizable(self, i: int) -> bool:
        """Whether a running job could be suspended now."""
        if self._busy[i] > self.now:
            return False
        work = self._works[i]
        return work.resizable or not (work.width or work.rigid)

    def step_of(self, i: int) -> int:
        """Whole steps that a job has done."""
        work = self._works[i]
        done = (
            floor((self.now - self._begin[i]) * work.rate[self.width[i]] + STEP_TOLERANCE)
            if self.width[i]
            else 0
        )
        return min(work.steps, self._step[i] + max(0, done))

    def begin(self, i: int) -> float:
        """The time of a running job's first step, done or to come."""
        return self._begin[i]

    def look_at(self, at: float) -> None:
        """Let something happen then, whether anything changes or not; only the last call counts."""
        if at != self.looks_at:
            self.looks_at = at
            self._give_back(at, (), 0)

    def next(self) -> tuple[int, list[int]] | None:
        """Go on to the next event: the job that ended then, and those it let into the queue.

        -1 for GPUs that come free otherwise, -2 for a look; None when nothing is left to happen.
        """
        while self._agenda:
            at, ticket, i = heappop(self._agenda)
            if i < 0:
                hosts, count = self._back.pop(ticket)
                if not hosts and at != self.looks_at:
                    continue
                self.now = at
                self.rooms.give(hosts, count)
                return (-1 if hosts else -2), []
            if self._tickets[i] != ticket:
                continue
            self.now = at
            del self.active[i]
            self.rooms.give(self.hosts[i], self.width[i])
            return i, self._released(i) if i in self._after else []
        return None

    def _saved(self, i: int) -> tuple[float, int]:
        """When a running job's GPUs are free if it is suspended now, and the step it has saved then."""
        work, now = self._works[i], self.now
        if now < self._begin[i]:
            return now + work.save_s, self._step[i]
        at, step = self._stopped(i)
        return at if step >= work.steps else at + work.save_s, step

    def _stopped(self, i: int) -> tuple[float, int]:
        """When a running job has done the step that it is at, and which one; for the last one its end."""
        work, now, begin = self._works[i], self.now, self._begin[i]
        if now < begin:
            return begin, self._step[i]
        rate = work.rate[self.width[i]]
        begun = ceil((now - begin) * rate - STEP_TOLERANCE)
        step = self._step[i] + (begun if begun > 0 else 0)
        if step >= work.steps:
            return self.ends[i], work.steps
        stopped = begin + begun / rate
        return (stopped if stopped > now else now), step

    def _changed(self, i: int, gpus: int) -> tuple[float, float, int]:
        """If a running job is resized now: when GPUs it gives up are free, when it goes on, and after which
        step; three times its end if that is its last."""
        work = self._works[i]
        free_s, step = self._stopped(i) if work.in_place else self._saved(i)
        if step >= work.steps:
            return free_s, free_s, step
        if not work.in_place:
            return free_s, free_s + work.resume_s[gpus], step
        begin = free_s + work.switch_s(self.width[i], gpus)
        return begin, begin, step

    def _end(self, i: int, at: float) -> None:
        self._issued = self._tickets[i] = ticket = self._issued + 1
        self.ends[i] = at
        heappush(self._agenda, (at, ticket, i))

    def _give_back(self, at: float, hosts: tuple[str, ...], count: int) -> None:
        self._issued += 1
        self._back[self._issued] = (hosts, count)
        heappush(self._agenda, (at, self._issued, -1))

    def _released(self, i: int) -> list[int]:
        free = []
        for other in self._after[i]:
            self._unmet[other] -= 1
            if not self._unmet[other]:
                free.append(other)
        return free
