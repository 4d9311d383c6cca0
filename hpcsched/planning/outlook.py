"""A run's jobs from now on, in numbers: what a planner tries its plans on, thousands of times a second.

`Outlook` is the present state, `Sketch` one possible future of it. Jobs follow `planning.standin.Course`,
as they do in the simulator; here they are indices into tables, and nothing but times is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import ceil, floor, inf
from statistics import median

from hpcsched.core.jobs import Job
from hpcsched.core.learning import USUAL_SCALING
from hpcsched.core.model import JobState
from hpcsched.core.rooms import Rooms
from hpcsched.core.view import View
from hpcsched.planning.standin import EPSILON

USUAL_TIME_S = 3600.0
"""Taken for a job's time on one GPU where nothing is known of it, nor of any other job."""

OVERDUE = 0.1
"""A job whose steps are not known is taken to need at least this share of a usual job's time more."""


@dataclass(slots=True, kw_only=True)
class Work:
    """One job: what it still needs on each GPU count, and where it stands.

    Counts are on each of its `nodes` hosts. All tables are by count g = 0..`most` (useless below `least`):
    `rate[g]` is steps per second, `resume_s[g]` seconds from a launch to the first step after a suspend,
    `whole_s[g]` seconds from its next launch to its end, of them `train_s[g]` from its first step on. A job
    that runs does its step `step` at `begin`.
    """

    job: Job
    least: int
    most: int
    nodes: int
    steps: int
    rate: Sequence[float]
    resume_s: Sequence[float]
    whole_s: Sequence[float]
    train_s: Sequence[float]
    save_s: float
    known: bool
    after: tuple[int, ...] = ()
    step: int = 0
    begin: float = 0.0
    width: int = 0
    hosts: tuple[str, ...] = ()
    busy_until: float = 0.0
    resizable: bool = False

    @property
    def optimal(self) -> int:
        """The smallest count in its range with the largest rate."""
        return max(range(self.least, self.most + 1), key=lambda g: (self.rate[g], -g))


class Outlook:
    """The present state of all jobs that have come and are not over, as a view shows it.

    `works` are the jobs by index: those that run first, oldest first, then those that wait, in the queue's
    order, then those that wait for others. `leaving` are GPUs that come free without a job's end: (when,
    host, count). At most `window` waiting jobs are looked at; or just those in `waiting`, in this order.
    """

    def __init__(self, view: View, *, window: int = 0, waiting: Iterable[Job] | None = None) -> None:
        self.view, self.now = view, view.now
        self.leaving: list[tuple[float, str, int]] = []
        self.works: list[Work] = []
        self._usual_s: float | None = None
        for job in view.running:
            self._add_running(job)
        self.running = range(len(self.works))
        if waiting is None:
            queue = view.queue.walk(lambda need, nodes: True)
            waiting = [view.jobs[job_id] for job_id in islice(queue, window)]
        for job in waiting:
            self._add(job)
        self.waiting = range(len(self.running), len(self.works))
        self._add_blocked(window)
        self.blocked = range(self.waiting.stop, len(self.works))
        self.submitted_s = sum(work.job.submit_s for work in self.works)

    def __len__(self) -> int:
        return len(self.works)

    def rooms(self) -> Rooms:
        """The GPUs that are free now, for one future to hand out."""
        return rooms_of(self.view.rooms.by_host())

    def _add_running(self, job: Job) -> None:
        view, now = self.view, self.now
        hosts = tuple(view.hosts_of(job))
        leaves = job.state is JobState.SUSPENDING and job.target is None
        if job.wanted or leaves or len(hosts) != job.spec.nodes:
            began = job.current.signalled_s
            free_s = max(now, (now if began is None else began) + view.save_s(job))
            self.leaving += [(free_s, host, count) for host, count in view.hosts_of(job).items()]
            if leaves and not job.wanted and not job.held:
                self._add(job)
            return
        if not self._add(job):
            return
        work = self.works[-1]
        work.width, work.hosts, work.step = job.width, hosts, job.step
        work.begin = now + view.start_left_s(job)
        if job.target is None:
            work.resizable = job.ready and job.state is JobState.RUNNING
            return
        counts = view.places(job.target.gpus)
        work.width, work.hosts = len(job.target.gpus) // job.spec.nodes, tuple(counts)
        began = job.current.signalled_s
        work.busy_until = max(now, (now if began is None else began) + work.save_s)
        work.begin = work.busy_until + work.resume_s[work.width]
        over = view.places(set(job.gpus) - set(job.target.gpus))
        self.leaving += [(work.busy_until, host, count) for host, count in over.items()]

    def _add(self, job: Job) -> bool:
        view, nodes = self.view, job.spec.nodes
        least, most = view.limits(job)
        if least > most or nodes > len(self.view.capacity.by_host()):
            return False  # not on the GPUs there are
        profile, steps = view.curve(job), job.spec.steps
        known = profile is not None and steps is not None
        rate = [profile.rate(g) if profile else g**USUAL_SCALING for g in range(1, most + 1)]
        if profile is None or steps is None:
            # Its steps are taken for seconds on one GPU of a usual job.
            if self._usual_s is None:
                self._usual_s = _usual_time_s(view)
            done_s = sum((a.end_s or self.now) - a.start_s for a in job.attempts)
            left_s = max(self._usual_s - done_s, OVERDUE * self._usual_s)
            steps = job.step + max(1, round(left_s * rate[0]))
        left = max(0, steps - job.step)
        first = job.attempt == 0
        launch = [view.launch_s(job, g, first=first) for g in range(1, most + 1)]
        resume = [view.launch_s(job, g, first=False) for g in range(1, most + 1)]
        whole = [inf if g < least else launch[g - 1] + left / rate[g - 1] for g in range(1, most + 1)]
        work = Work(
            job=job,
            least=least,
            most=most,
            nodes=nodes,
            steps=max(steps, job.step),
            rate=(0.0, *rate),
            resume_s=(inf, *resume),
            whole_s=(inf, *whole),
            train_s=(inf, *(left / r for r in rate)),
            save_s=view.save_s(job),
            known=known,
            step=job.step,
        )
        self.works.append(work)
        return True

    def _add_blocked(self, window: int) -> None:
        """Those whose turn can come within our view, each after the ones it waits for."""
        index = {work.job.spec.name: i for i, work in enumerate(self.works)}
        left = list(islice(self.view.blocked(), window))
        while left:
            later = []
            for job in left:
                unmet = self.view.unmet(job)
                if any(name not in index for name in unmet):
                    later.append(job)
                elif self._add(job):
                    self.works[-1].after = tuple(index[name] for name in unmet)
                    index[job.spec.name] = len(self.works) - 1
            if len(later) == len(left):
                return
            left = later


def _usual_time_s(view: View) -> float:
    """The median of the times that the known jobs have left on one GPU."""
    times = []
    for job in [*view.running, *(view.jobs[i] for i in islice(view.queue.walk(lambda *_: True), 100))]:
        profile = view.curve(job)
        if profile and job.remaining is not None:
            times.append(job.remaining / profile.rate(1))
    return median(times) if times else USUAL_TIME_S


def rooms_of(free: Mapping[str, int]) -> Rooms:
    """Rooms with these GPUs; the same whatever class they are of."""
    return _OneRoom(free) if len(free) == 1 else Rooms(free)


class _OneRoom(Rooms):
    """Rooms of a single host, where nothing has to be looked for."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        super().__init__(gpus)
        self._only = tuple(gpus)

    def by_host(self) -> dict[str, int]:
        return {self._only[0]: self.left}

    def most(self, nodes: int, own: Mapping[str, int] | None = None) -> int:
        return 0 if nodes > 1 else self.left + (own[self._only[0]] if own else 0)

    def pick(
        self, wanted: int, nodes: int, own: Mapping[str, int] | None = None
    ) -> tuple[int, tuple[str, ...]]:
        return min(wanted, self.most(nodes, own)), self._only

    def take(self, hosts: Iterable[str], count: int, own: Mapping[str, int] | None = None) -> None:
        self.left -= max(0, count - own[self._only[0]]) if own else count

    def give(self, hosts: Iterable[str], count: int) -> None:
        self.left += count


class Sketch:
    """One possible future: jobs are started and resized, and time goes on from event to event.

    `ends[i]` is when job i has ended or will end as things stand (infinite for one not started). `active` are
    the jobs that hold GPUs, in the order of their starts.
    """

    def __init__(self, outlook: Outlook) -> None:
        works = outlook.works
        self._works = works
        self.now = outlook.now
        self.rooms = outlook.rooms()
        self.ends = [inf] * len(works)
        self.width = [work.width for work in works]
        self.hosts = [work.hosts for work in works]
        self.active: dict[int, None] = dict.fromkeys(outlook.running)
        self.resizes = 0
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
        for i in outlook.running:
            work = works[i]
            self._end(i, work.begin + (work.steps - work.step) / work.rate[work.width])
            if work.busy_until > self.now:
                self._give_back(work.busy_until, work.hosts, 0)
        for free_s, host, count in outlook.leaving:
            self._give_back(free_s, (host,), count)
        for i in outlook.blocked:
            self._unmet[i] = len(works[i].after)
            for before in works[i].after:
                self._after.setdefault(before, []).append(i)

    def start(self, i: int, gpus: int, hosts: tuple[str, ...]) -> None:
        """Launch a waiting job."""
        work, now = self._works[i], self.now
        self.rooms.take(hosts, gpus)
        self.width[i], self.hosts[i] = gpus, hosts
        self.active[i] = None
        end = now + work.whole_s[gpus]
        self._begin[i] = end - work.train_s[gpus]
        self._issued += 1
        self._tickets[i] = self._issued
        self.ends[i] = end
        heappush(self._agenda, (end, self._issued, i))

    def resized_end(self, i: int, gpus: int) -> float:
        """When a running job will end if it is resized now."""
        free_s, step = self._saved(i)
        work = self._works[i]
        if step >= work.steps:
            return free_s
        return free_s + work.resume_s[gpus] + (work.steps - step) / work.rate[gpus]

    def resize(self, i: int, gpus: int, hosts: tuple[str, ...]) -> None:
        """Suspend a running job and resume it: more GPUs it takes at once, fewer it gives back later."""
        work = self._works[i]
        own = self.own(i)
        self.rooms.take(hosts, gpus, own)
        free_s, step = self._saved(i)
        if step < work.steps:
            self._step[i] = step
            self._begin[i] = free_s + work.resume_s[gpus]
            self._end(i, self._begin[i] + (work.steps - step) / work.rate[gpus])
        self._busy[i] = free_s
        self.resizes += 1
        for host in self.hosts[i]:
            left_over = self.width[i] - (gpus if host in hosts else 0)
            self._give_back(free_s, (host,), max(0, left_over))
        self.width[i], self.hosts[i] = gpus, hosts

    def own(self, i: int) -> Mapping[str, int]:
        """The GPUs that a job holds, by host."""
        return dict.fromkeys(self.hosts[i], self.width[i])

    def resizable(self, i: int) -> bool:
        """Whether a running job could be suspended now."""
        work = self._works[i]
        ready = work.resizable or not work.width
        return ready and self._busy[i] <= self.now

    def step_of(self, i: int) -> int:
        """Whole steps that a job has done."""
        work = self._works[i]
        done = floor((self.now - self._begin[i]) * work.rate[self.width[i]] + EPSILON) if self.width[i] else 0
        return min(work.steps, self._step[i] + max(0, done))

    def begin(self, i: int) -> float:
        """When a running job does its first step, or did it."""
        return self._begin[i]

    def look_at(self, at: float) -> None:
        """Let something happen then, whether anything changes or not; only the last call counts."""
        if at != self.looks_at:
            self.looks_at = at
            self._give_back(at, (), 0)

    def next(self) -> tuple[int, list[int]] | None:
        """Go on to the next event: the job that ended then (-1: none did), and those it let into the queue.

        None when nothing is left to happen.
        """
        while self._agenda:
            at, ticket, i = heappop(self._agenda)
            if i < 0:
                hosts, count = self._back.pop(ticket)
                if not hosts and at != self.looks_at:
                    continue
                self.now = at
                self.rooms.give(hosts, count)
                return -1, []
            if self._tickets[i] != ticket:
                continue
            self.now = at
            del self.active[i]
            self.rooms.give(self.hosts[i], self.width[i])
            return i, self._released(i) if i in self._after else []
        return None

    def _saved(self, i: int) -> tuple[float, int]:
        """When a running job's GPUs are free if it is suspended now, and the step it has saved then."""
        work = self._works[i]
        passed_s = self.now - self._begin[i]
        if passed_s < 0:
            return self.now + work.save_s, self._step[i]
        rate = work.rate[self.width[i]]
        begun = ceil(passed_s * rate - EPSILON)
        step = self._step[i] + max(begun, 0)
        if step >= work.steps:
            return self.ends[i], work.steps
        return max(self.now, self._begin[i] + begun / rate) + work.save_s, step

    def _end(self, i: int, at: float) -> None:
        self._issued += 1
        self._tickets[i] = self._issued
        self.ends[i] = at
        heappush(self._agenda, (at, self._issued, i))

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
