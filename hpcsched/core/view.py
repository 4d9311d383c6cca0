"""What a policy may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.plan import Plan
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.resources.gpus import Fits, GpusByHost
from hpcsched.core.resources.queue import WaitingQueue


class LaunchCost(Protocol):
    """Seconds from a launch on so many GPUs to the first step."""

    def __call__(self, job: Job, gpus: int, *, first: bool) -> float: ...


class SwitchCost(Protocol):
    """Seconds without training that a change to so many GPUs costs, on these hosts if they are known."""

    def __call__(self, job: Job, gpus: int, hosts: Collection[str] | None = None) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a waiting job on this many free GPUs on each of these hosts."""

    job: Job
    gpus: int
    hosts: tuple[str, ...]
    role: Role
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Have a running job go on with this many GPUs on each of these hosts.

    In place if its program can do that and its first rank stays where it is; else it is suspended and
    resumed. Its own ones count as free.
    """

    job: Job
    gpus: int
    hosts: tuple[str, ...]
    role: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Nothing changes for the job; `explain` shows why."""

    job: Job
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Suspend a running job and let it wait in the queue."""

    job: Job
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain:
    """Ask again at this time, whatever happens until then; a later answer replaces this one."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The plan is no longer good: have `Planning.plan` called, and ask again when it is made."""


NO_RULES: Mapping[str, object] = {}
"""Of a policy on its own; never written to."""

Decision = Start | Resize | Preempt | Remark | LookAgain | Replan


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state as a policy sees it; reading it changes nothing, and it lives for one decision.

    All GPU counts of jobs, profiles and costs are counts on each host of a job, in the mean if it is uneven.

    `free` are the free GPUs by host, for the policy to take from as it hands them out; `capacity` are all
    healthy ones. `running` are the jobs that hold GPUs, oldest first, and `secondaries` those of that role.
    `hosts_of(job)` says how many of a running job's GPUs lie on which host, `places(gpus)` how many of these.
    `waiting(fits)` walks the jobs that could start in FIFO order. `queue` are all that wait, in order, and
    `blocked()` those on GPUs of their own that wait for others to complete, whose names `unmet(job)` gives.
    `room(job, free)` says how many GPUs the job's needs (a kind of GPU, cores, memory) leave it on each host,
    its own ones included (None: all), which `pick` goes by, and `most_for(job)` how many they would on each
    of its hosts, were all free. Where there are several types of GPU, all is said of that which the job has
    or, if it waits, is to get of those that are `free`.
    `in_time(job, others)` says whether a waiting job can still be started, together with `others`, before
    the allocation ends.
    `profile(job)` is None for a model never measured; of one that only this run has seen it has just the
    counts that were seen, where `curve(job)` has estimates of the others.
    `launch_s(job, gpus, first=)` is the seconds from a launch to the first step, `save_s(job)` those of
    saving and leaving, `switch_s(job, gpus)` those without training that bringing the job to `gpus` GPUs
    costs: in place, which `in_place(job, gpus, hosts)` tells, or by a suspend and a resume. In place it
    stands still for `stand_s(job, old, gpus)`; if it gets more GPUs, it goes on as it is for
    `built_s(job, gpus)` before that. `unsaved_s(job)`, which `switch_s` has in it, is the work that a job
    which saves by itself would lose by a suspend now, and `worth_changing(job, gpus)` whether a change of its
    count can gain that much. `resize_left_s(job)` is how much longer one under way will take.
    `start_left_s(job)` are the seconds until a job that is starting does its first step; `left_s` those
    until all jobs have to save because the allocation ends (infinite if it does not), and `left_on(hosts)`
    those until the first of these hosts ends by itself; `time_on(hosts)` is the shorter one.
    `plan` is the policy's newest plan in this life of the run; `news` counts what no plan foresaw.
    """

    now: float
    free: GpusByHost
    capacity: GpusByHost
    running: list[Job]
    secondaries: list[Job]
    hosts_of: Callable[[Job], Mapping[str, int]]
    places: Callable[[Iterable[int]], Mapping[str, int]]
    waiting_count: int
    waiting: Callable[[Fits], Iterator[Job]]
    left_s: float
    jobs: Mapping[int, Job]
    queue: WaitingQueue
    blocked: Callable[[], Iterator[Job]]
    unmet: Callable[[Job], list[str]]
    in_time: Callable[[Job, Sequence[Job]], bool]
    profile: Callable[[Job], Profile | None]
    curve: Callable[[Job], Profile | None]
    launch_s: LaunchCost
    save_s: Callable[[Job], float]
    switch_s: SwitchCost
    in_place: Callable[[Job, int, Collection[str] | None], bool]
    unsaved_s: Callable[[Job], float]
    worth_changing: Callable[[Job, int], bool]
    stand_s: Callable[[Job, int, int], float]
    built_s: Callable[[Job, int], float]
    resize_left_s: Callable[[Job], float]
    start_left_s: Callable[[Job], float]
    plan: Plan | None
    news: int
    room: Callable[[Job, GpusByHost], Mapping[str, int] | None] = lambda job, free: None
    most_for: Callable[[Job], int] | None = None
    left_on: Callable[[Collection[str]], float] = lambda hosts: inf

    def time_on(self, hosts: Collection[str]) -> float:
        """Seconds until a job on these hosts has to save, as its allocation ends."""
        return min(self.left_s, self.left_on(hosts))

    def limits(self, job: Job) -> tuple[int, int]:
        """Fewest and most GPUs the job may have on each of its hosts, were all of them free."""
        if self.most_for:
            return job.limits(self.most_for(job))
        return job.limits(self.capacity.most(job.spec.nodes, uneven=job.spec.uneven))

    def pick(
        self, job: Job, wanted: int, own: Mapping[str, int] | None = None, free: GpusByHost | None = None
    ) -> tuple[int, tuple[str, ...]]:
        """`GpusByHost.pick` (of `free`, by default all free ones), of the counts that the job may have."""
        free, nodes, uneven = self.free if free is None else free, job.spec.nodes, job.spec.uneven
        room = self.room(job, free)
        gpus, hosts = free.pick(wanted, nodes, own, room, uneven=uneven)
        fitting = job.fitting(gpus)
        if fitting == gpus:
            return gpus, hosts
        return free.pick(fitting, nodes, own, room, uneven=uneven) if fitting else (0, ())


class Policy(Protocol):
    """Decides who gets GPUs: a pure function of the view."""

    name: str
    work_conserving: bool
    """No healthy GPU idles while an independent job that fits waits."""
    acts_when_full: bool
    """It is asked also while no GPU is free."""
    moves_packed: bool
    """A packed job moves to a GPU of its own when one stays free."""
    reshapes: bool
    """Jobs grow and shrink by what they propose."""
    spreads: bool
    """It knows of uneven jobs: their hosts may give them unequally many GPUs."""
    rules: Mapping[str, object]
    """By mechanism the rule that says which jobs use it; where there is none, no job does."""

    def decide(self, view: View) -> list[Decision]:
        """What to change now, in the order it is to be applied."""
        ...

    def watches(self, job: Job) -> bool:
        """Whether how far a running job is can change a decision; asked once for each of its attempts."""
        ...


@runtime_checkable
class Planning(Protocol):
    """A policy that plans ahead. Its plans are events: a replay of the journal makes none anew."""

    def plan(self, view: View) -> Plan:
        """What to do from here on: a pure function of the view."""
        ...

    def fallback(self, view: View) -> Plan:
        """What to do until there is news where `plan` failed."""
        ...
