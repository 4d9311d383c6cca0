"""What a rule for jobs that share GPUs may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.sharing.shares import Shares
from hpcsched.core.model import Device
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.view import LaunchCost, LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Start a waiting job on this GPU, beside those that have it."""

    job: Job
    gpu: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """Have a job that rides save and leave. `from_`: it is not to come to such jobs again. `moves`: it goes
    to a GPU that is free."""

    job: Job
    reason: Reason
    from_: tuple[Job, ...] = ()
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """These jobs do so much together, in shares of their speeds alone: more than one after the other."""

    jobs: tuple[Job, ...]
    total: float


ShareDecision = Join | Separate | Worth | LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareView:
    """What the rules of shared GPUs see; reading it changes nothing, and it lives for one decision.

    `holders` are the jobs that hold a GPU, by GPU, `shares` those that ride with them, and what is known.
    `others(gpu)` says whether jobs of other kinds use it too, `memory_mib(gpu)` how much memory it has (None:
    not known; that of a CPU slot is its part of main memory), `need_mib(job, gpu)` how much of that a job
    needs (None: not known), `room_mib(host)` how much main memory of a host no job has asked for. `waiting()`
    walks all jobs that wait for GPUs in FIFO order.
    `free` are the GPUs that nobody holds; `profile(job)` is what is known of its model's speed,
    `loaded(job)` the profile as it was given. The rest is as in `View`.
    """

    now: float
    shares: Shares
    devices: Mapping[int, Device]
    jobs: Mapping[int, Job]
    holders: Mapping[int, Job]
    others: Callable[[int], bool]
    memory_mib: Callable[[int], float | None]
    need_mib: Callable[[Job, int], float | None]
    room_mib: Callable[[str], float | None]
    free: Collection[int]
    left_s: float
    waiting: Callable[[], Iterator[Job]]
    in_time: Callable[[Job, Sequence[Job]], bool]
    profile: Callable[[Job], Profile | None]
    loaded: Callable[[Job], Profile | None]
    save_s: Callable[[Job], float]
    unsaved_s: Callable[[Job], float]
    launch_s: LaunchCost


class SharingRule(Protocol):
    """Says which jobs share a GPU."""

    def share(self, view: ShareView) -> list[ShareDecision]:
        """Who comes and leaves now, in the order it is to be applied: a pure function of the view."""
        ...
