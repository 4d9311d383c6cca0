"""What a policy may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.rooms import Fits, Rooms


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
    """Suspend a running job and resume it on this many GPUs on each of these hosts.

    Its own ones count as free.
    """

    job: Job
    gpus: int
    hosts: tuple[str, ...]
    role: Role
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Nothing changes for the job; `explain` shows why."""

    job: Job
    reason: Reason


Decision = Start | Resize | Remark


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state as a policy sees it; reading it changes nothing, and it lives for one decision.

    All GPU counts of jobs, profiles and costs are counts on each host of a job.

    `rooms` are the free GPUs by host, for the policy to take from as it hands them out; `capacity` are all
    healthy ones. `running` are the jobs that hold GPUs, oldest first, `hosts_of(job)` how many of a
    running job's GPUs lie on which host; `waiting(fits)` walks the jobs that could start in FIFO order.
    `profile(job)` is None for a model never measured; `switch_s(job, gpus)` is the seconds that suspending
    the job and resuming it on `gpus` GPUs costs; `start_left_s(job)` the seconds until a job that is
    starting does its first step; `left_s` the seconds until all jobs have to save because the allocation
    ends (infinite if it does not).
    """

    now: float
    rooms: Rooms
    capacity: Rooms
    running: list[Job]
    hosts_of: Callable[[Job], Mapping[str, int]]
    waiting_count: int
    waiting: Callable[[Fits], Iterator[Job]]
    left_s: float
    profile: Callable[[Job], Profile | None]
    switch_s: Callable[[Job, int], float]
    start_left_s: Callable[[Job], float]

    def limits(self, job: Job) -> tuple[int, int]:
        """Fewest and most GPUs the job may have on each of its hosts, were all of them free."""
        return job.limits(self.capacity.most(job.spec.nodes))


class Policy(Protocol):
    """Decides who gets GPUs: a pure function of the view."""

    name: str
    work_conserving: bool
    """No healthy GPU idles while an independent job that fits waits."""

    def decide(self, view: View) -> list[Decision]:
        """What to change now, in the order it is to be applied."""
        ...
