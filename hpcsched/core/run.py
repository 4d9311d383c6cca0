"""The jobs of a run and its clock: what everything else in the core is about."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

from hpcsched.core.events import AgentStarted, AttemptEvent
from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.packed import Jobs
from hpcsched.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Life:
    """One agent's time with the run: the run clock and the wall clock when it began, and its GPUs."""

    at: float
    wall: float
    gpus: int


class Run:
    """The jobs of one run, and what is known of the run as a whole.

    Everybody in the core reads it; it changes by its methods alone.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.run_id = ""
        """The name that the run's processes carry; "" where the journal does not say."""
        self.grace_s = 30.0
        self.lives: list[Life] = []
        self.rules = 1
        """The version of the rules by which the present life decides (`events.RULES`)."""
        self.epoch = 0
        """The number of the present life, as node agents know it; 0: it has none."""
        self.reads_inbox = False
        """Whether the agent has yet to carry out the commands that waited for it."""
        self.jobs = Jobs()
        self.by_name: dict[str, int] = {}
        self.arrays: dict[str, int] = {}
        """By array the id of its first job."""
        self.active: dict[int, Job] = {}
        self.running: list[Job] = []
        """The active jobs in the foreground of GPUs, by submission time and id."""
        self.secondaries: list[Job] = []
        """Of these the secondaries: the only ones that MARBLE may promote."""
        self.spawned_on: dict[int, str] = {}
        """By job the host that the processes of its attempt were started from."""
        self.unfinished = 0
        self.attempts = 0
        """The number of attempts of all jobs together."""
        self.kept: dict[int, tuple[str, ...]] = {}
        """By job: keys of which the job file last seen says otherwise than the run, which keeps its own."""
        self.updated: dict[int, tuple[str, ...]] = {}
        """By job that has ended: keys that were taken from a job file since it ran."""
        self.plan: Plan | None = None
        self.reopenings = 0
        """How often a job that was over has come back."""
        self.news = 0
        """The number of things that no plan foresaw, so that a plan can say how much of it it knows."""
        self.changed: set[int] = set()
        """Ids of jobs that changed since the snapshot last took them."""
        self.touch = self.changed.add
        """Notes that the job of this id has changed: nothing is called more often."""
        self.stale = 0
        """The number of events about attempts that were over already."""

    # --- questions --------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Every job is in a final state."""
        return self.unfinished == 0

    def lives_of(self, start_s: float, end_s: float) -> range:
        """The numbers of the lives in which an attempt ran from `start_s` to `end_s`: of one that was adopted
        several."""
        begins = [life.at for life in self.lives]
        first = max(1, bisect_right(begins, start_s))
        return range(first - 1, max(first, bisect_left(begins, end_s)))

    def job_of(self, key: str) -> Job | None:
        """The job of this id or name."""
        job = self.jobs.get(int(key)) if key.isdecimal() and len(key) < 19 else None
        return self.jobs[self.by_name[key]] if job is None and key in self.by_name else job

    def about(self, event: AttemptEvent) -> Job | None:
        """The job, if the event is about its attempt that runs; else the event is counted as stale."""
        job = self.active.get(event.job_id)
        if job is None or job.attempt != event.attempt:
            self.stale += 1
            return None
        return job

    # --- changes ----------------------------------------------------------------------------

    def advance(self, at: float) -> None:
        """Set the clock to `at`; it never goes back."""
        self.now = max(self.now, at)

    def begin_life(self, event: AgentStarted) -> None:
        """Note that another agent has taken the run over."""
        self.lives.append(Life(event.at, event.wall, len(event.devices)))
        self.grace_s, self.run_id = event.grace_s, event.run_id or self.run_id
        self.rules, self.plan, self.reads_inbox = event.rules, None, event.reads_inbox
        self.epoch = event.epoch

    def has_read_inbox(self) -> None:
        """Note that the commands that waited for the agent have been carried out."""
        self.reads_inbox = False

    def add(self, job: Job) -> None:
        """Take a submitted job in."""
        self.jobs.add(job)
        self.by_name[job.spec.name] = job.id
        if job.spec.array:
            self.arrays.setdefault(job.spec.array.name, job.id)
        self.unfinished += 1

    def enter(self, job: Job) -> None:
        """Count a job as active: an attempt of it has begun."""
        self.active[job.id] = job

    def count_attempt(self) -> None:
        """Count one more attempt of a job."""
        self.attempts += 1

    def leave(self, job: Job) -> None:
        """Count a job as active no more: its attempt is over."""
        self.spawned_on.pop(job.id, None)
        del self.active[job.id]

    def spawned(self, job: Job, host: str) -> None:
        """Note the host that started the processes of the job's attempt."""
        self.spawned_on[job.id] = host

    def list_running(self, job: Job) -> None:
        """Put a job among the running ones of the foreground."""
        for jobs in self._lists(job):
            insort(jobs, job, key=lambda j: (j.submit_s, j.id))

    def unlist_running(self, job: Job) -> None:
        """Take a job from among the running ones of the foreground."""
        for jobs in self._lists(job):
            jobs.remove(job)

    def _lists(self, job: Job) -> tuple[list[Job], ...]:
        return (self.running, self.secondaries) if job.role is Role.SECONDARY else (self.running,)

    def ended(self) -> None:
        """Count one more job that is over."""
        self.unfinished -= 1

    def reopened(self, job: Job) -> None:
        """Count a job that was over as unfinished again."""
        self.updated.pop(job.id, None)
        self.unfinished += 1
        self.reopenings += 1

    def follow(self, plan: Plan) -> None:
        """Go by this plan from now on."""
        self.plan = plan

    def count_news(self, number: int = 1) -> None:
        """Count something that no plan foresaw."""
        self.news += number

    def count_stale(self) -> None:
        """Count an event that came too late."""
        self.stale += 1

    def touch_all(self) -> None:
        """Note that all jobs may have changed."""
        self.changed.update(self.jobs)

    def take_changed(self) -> set[int]:
        """The jobs that changed since this was last called."""
        changed = set(self.changed)
        self.changed.clear()
        return changed

    def keep(self, job_id: int, keys: tuple[str, ...]) -> None:
        """Note the keys of which the job file says otherwise than the run (none: it says the same)."""
        if keys:
            self.kept[job_id] = keys
        else:
            self.kept.pop(job_id, None)
        self.changed.add(job_id)

    def update(self, job: Job, keys: Iterable[str]) -> None:
        """Note the keys that were taken from a job file for a job that is over."""
        self.updated[job.id] = tuple(dict.fromkeys((*self.updated.get(job.id, ()), *keys)))

    def agrees(self, job: Job) -> None:
        """Note that a job is as its file says."""
        self.kept.pop(job.id, None)
