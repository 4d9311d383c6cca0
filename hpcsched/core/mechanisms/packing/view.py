"""What a rule for packs may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.packing.packs import Packs
from hpcsched.core.model import Device
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.view import LaunchCost, LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class Ride:
    """Start a waiting job on this GPU, together with those that train there."""

    job: Job
    gpu: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Have a job that rides save and leave its pack, to go on by itself on a GPU that is free."""

    job: Job
    reason: Reason


PackDecision = Ride | Part | LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """What the rules of packs see; reading it changes nothing, and it lives for one decision.

    `holders` are the jobs that hold a GPU, by GPU, `packs` those that ride with them; `shared(gpu)` says
    whether others use it too. `waiting()` walks all jobs that wait for GPUs in FIFO order. `in_time(job,
    others)` and `loaded(job)` are as for background lanes, `left_s`, `save_s(job)` and `launch_s(job, gpus,
    first=)` as in `View`. `free` is the number of GPUs that nobody holds, `rules` the version of the rules.
    """

    now: float
    rules: int
    packs: Packs
    devices: Mapping[int, Device]
    jobs: Mapping[int, Job]
    holders: Mapping[int, Job]
    shared: Callable[[int], bool]
    free: int
    left_s: float
    waiting: Callable[[], Iterator[Job]]
    in_time: Callable[[Job, Sequence[Job]], bool]
    loaded: Callable[[Job], Profile | None]
    save_s: Callable[[Job], float]
    launch_s: LaunchCost


class PackingRule(Protocol):
    """Says which jobs train together on a GPU."""

    def ride(self, view: PackView) -> list[PackDecision]:
        """Who joins or leaves whom now, in the order it is to be applied: a pure function of the view."""
        ...
