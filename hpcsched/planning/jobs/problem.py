"""The scheduling problem: a run's jobs from now on, in numbers.

`Problem` is the present state; `planning.jobs.timeline.Timeline` is one possible future of it. Jobs follow
`planning.jobs.course.Course`, as they do in the simulator; here they are indices into tables, and nothing but
times is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import median

from hpcsched.core.jobs import Job
from hpcsched.core.learning import USUAL_SCALING
from hpcsched.core.model import JobState
from hpcsched.core.view import View

ASSUMED_JOB_S = 3600.0
"""A job's time on one GPU where nothing is known of it, nor of any other job (chosen)."""

MIN_LEFT_SHARE = 0.1
"""The least share of a usual job's time that a job whose steps are not known still needs (chosen)."""


@dataclass(slots=True, kw_only=True)
class Work:
    """One job: what it still needs on each GPU count, and where it stands.

    Counts are on each of its `nodes` hosts. All tables are by count g = 0..`most` (useless below `least`):
    `rate[g]` is steps per second, `resume_s[g]` seconds from a launch to the first step after a suspend,
    `whole_s[g]` seconds from its next launch to its end, of them `train_s[g]` from its first step on. A job
    that runs does its step `step` at `begin`. `fit[g]` is the largest count of at most g that it
    may have, and a count that it may not have is as fast as that one. `rigid`: whatever it starts on it
    keeps. One that is resized in place stands still for `grow_s[g]` or `shrink_s[g]` (else these are empty),
    after `built_s[g]` during which it goes on as it is if it grows.
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
    fit: Sequence[int] = ()
    rigid: bool = False
    hosts: tuple[str, ...] = ()
    busy_until: float = 0.0
    resizable: bool = False
    grow_s: Sequence[float] = ()
    shrink_s: Sequence[float] = ()
    built_s: Sequence[float] = ()

    @property
    def optimal(self) -> int:
        """The smallest count in its range with the largest rate."""
        return max(range(self.least, self.most + 1), key=lambda g: (self.rate[g], -g))

    @property
    def in_place(self) -> bool:
        """It can be resized while it goes on."""
        return bool(self.grow_s)

    def switch_s(self, old: int, gpus: int) -> float:
        """Seconds that a change from `old` GPUs costs: in place, if that can be, it has trained meanwhile."""
        if not self.in_place:
            return self.save_s + self.resume_s[gpus]
        if gpus <= old:
            return self.shrink_s[gpus]
        return self.grow_s[gpus] + self.built_s[gpus] * (1 - self.rate[old] / self.rate[gpus])


class Problem:
    """The present state of all jobs that have come and are not over, as a view shows it.

    `works` are the jobs by index: those that run first, oldest first, then those that wait, in the queue's
    order, then those that wait for others. `leaving` are GPUs that come free without a job's end: (when,
    host, count). `unplaced` are the ids of jobs that the GPUs there are do not suffice for. At most `window`
    waiting jobs are looked at; or just those in `waiting`, in this order. GPUs that are with others (slots
    whose cores are on loan) are taken to come free after a usual job's time, as nobody knows.
    """

    def __init__(self, view: View, *, window: int = 0, waiting: Iterable[Job] | None = None) -> None:
        self.view, self.now = view, view.now
        self.leaving: list[tuple[float, str, int]] = []
        self.works: list[Work] = []
        self.unplaced: list[int] = []
        self._usual_s: float | None = None
        returning: list[Job] = []
        for job in view.running:
            if self._add_running(job):
                returning.append(job)
        self.running = range(len(self.works))
        self._add_elsewhere()
        if waiting is None:
            queue = view.queue.walk()
            waiting = [*(view.jobs[job_id] for job_id in islice(queue, window)), *returning]
        for job in waiting:
            self._add(job)
        self.waiting = range(len(self.running), len(self.works))
        self._add_blocked(window)
        self.blocked = range(self.waiting.stop, len(self.works))
        self.submitted_s = sum(work.job.submit_s for work in self.works)

    def __len__(self) -> int:
        return len(self.works)

    def _add_running(self, job: Job) -> bool:
        """Take in a job that runs; whether it leaves, to wait from then on."""
        view, now = self.view, self.now
        there = view.hosts_of(job)
        hosts = tuple(there)
        leaves = job.state is JobState.SUSPENDING and job.target is None
        uneven = len(set(there.values())) > 1 and job.spec.uneven  # it began under another policy
        if job.wanted or leaves or len(hosts) != job.spec.nodes or uneven:
            began = job.current.signalled_s
            free_s = max(now, (now if began is None else began) + view.save_s(job))
            self.leaving += [(free_s, host, count) for host, count in view.places(job.gpus).items()]
            return leaves and not job.wanted and not job.held
        if not self._add(job):
            return False
        work = self.works[-1]
        work.width, work.hosts, work.step = job.width, hosts, job.step
        work.begin = now + view.start_left_s(job)
        if unsaved_s := view.unsaved_s(job):  # to be done again after a suspend
            work.resume_s = [seconds + unsaved_s for seconds in work.resume_s]
        if job.in_place:
            counts = range(1, work.most + 1)
            work.grow_s = (inf, *(view.stand_s(job, g - 1, g) for g in counts))
            work.shrink_s = (inf, *(view.stand_s(job, g + 1, g) for g in counts))
            work.built_s = (inf, *(view.built_s(job, g) for g in counts))
        if job.target is None:
            work.resizable = job.settled
            return False
        places = view.places(job.target.gpus)
        work.width, work.hosts = len(job.target.gpus) // job.spec.nodes, tuple(places)
        if job.state is JobState.RUNNING:
            work.busy_until = work.begin = now + view.resize_left_s(job)
        else:
            began = job.current.signalled_s
            work.busy_until = max(now, (now if began is None else began) + work.save_s)
            work.begin = work.busy_until + work.resume_s[work.width]
        over = view.places(set(job.gpus) - set(job.target.gpus))
        self.leaving += [(work.busy_until, host, count) for host, count in over.items()]
        return False

    def _add_elsewhere(self) -> None:
        """Take in the GPUs that are neither free nor with jobs of this problem."""
        known = Counter(self.view.free.by_host())
        for work in self.works:
            known.update(dict.fromkeys(work.hosts, work.width))
        for _, host, count in self.leaving:
            known[host] += count
        for host, count in self.view.capacity.by_host().items():
            if count > known[host]:
                self.leaving.append((self.now + self._usual(), host, count - known[host]))

    def _usual(self) -> float:
        if self._usual_s is None:
            self._usual_s = _usual_time_s(self.view)
        return self._usual_s

    def _add(self, job: Job) -> bool:
        view, nodes = self.view, job.spec.nodes
        least, most = view.limits(job)
        if least > most or nodes > len(self.view.capacity.by_host()):
            self.unplaced.append(job.id)
            return False
        profile, steps = view.curve(job), job.spec.steps
        known = profile is not None and steps is not None
        fit: Sequence[int] = range(most + 1)
        if not job.any_count:
            fit = [job.fitting(g) if g >= least else g for g in range(most + 1)]
        rate = [profile.rate(g) if profile else g**USUAL_SCALING for g in fit[1:]]
        if profile is None or steps is None:
            # Its steps are taken for seconds on one GPU of a usual job.
            usual_s = self._usual()
            done_s = sum((a.end_s or self.now) - a.start_s for a in job.attempts)
            left_s = max(usual_s - done_s, MIN_LEFT_SHARE * usual_s)
            steps = job.step + max(1, round(left_s * rate[0]))
        left = max(0, steps - job.step)
        first = job.attempt == 0
        launch = [view.launch_s(job, g, first=first) for g in fit[1:]]
        resume = [view.launch_s(job, g, first=False) for g in fit[1:]]
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
            fit=fit,
            rigid=job.keeps_batch,
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
    return median(times) if times else ASSUMED_JOB_S
