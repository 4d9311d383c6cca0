"""What a policy may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hpcsched.core.jobs import Job
from hpcsched.core.model import Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a waiting job on this many free GPUs."""

    job: Job
    gpus: int
    role: Role
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Suspend a running job and resume it on this many GPUs, its own ones counting as free."""

    job: Job
    gpus: int
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

    `total` and `free` count healthy GPUs; `running` are the jobs that hold GPUs, oldest first;
    `waiting(free)` walks the jobs that could start on `free()` GPUs in FIFO order; `profile(job)`
    is None for a model never measured; `switch_s(job, gpus)` is the seconds that suspending the job and
    resuming it on `gpus` GPUs costs; `start_left_s(job)` the seconds until a job that is
    starting does its first step.
    """

    now: float
    total: int
    free: int
    running: list[Job]
    waiting_count: int
    waiting: Callable[[Callable[[], int]], Iterator[Job]]
    profile: Callable[[Job], Profile | None]
    switch_s: Callable[[Job, int], float]
    start_left_s: Callable[[Job], float]


class Policy(Protocol):
    """Decides who gets GPUs: a pure function of the view."""

    name: str
    work_conserving: bool
    """No healthy GPU idles while an independent job that fits waits."""

    def decide(self, view: View) -> list[Decision]:
        """What to change now, in the order it is to be applied."""
        ...


@dataclass(slots=True)
class FreeCount:
    """A count of free GPUs that goes down as a policy hands them out."""

    left: int = field(default=0)

    def __call__(self) -> int:
        return self.left
