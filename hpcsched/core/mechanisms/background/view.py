"""What a rule for background lanes may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.background.lanes import Lanes
from hpcsched.core.model import Device
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.view import LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Start a waiting background job on the background lane of this GPU."""

    job: Job
    gpu: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPace:
    """Have a job on a background lane use this share of its own speed; 0: pause, to go on as before later."""

    job: Job
    share: float
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """Have a job leave its background lane, and wait for another one.

    `host`: the foreground job whom the reason is about. `costly`: they are not to meet again. `unknown`: the
    host's own speed is not what its profile says.
    """

    job: Job
    reason: Reason
    host: Job | None = None
    costly: bool = False
    unknown: bool = False


LaneDecision = Share | SetPace | Yield | LookAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """What the rules of the background lanes see; reading it changes nothing, and it lives for one decision.

    `lanes` are as they are; `devices` the healthy GPUs. `jobs` are all, `foreground(gpu)` is the one that has
    the foreground of a GPU. `waiting()` walks the jobs that could start in the background, in FIFO order.
    At `until` those that run in the background have to save because the allocation ends (it may be infinite),
    and `in_time(job, others)` says whether one that waits can still be started before that, together
    with `others`. `profile(job)` is what is known of its model's speed, `loaded(job)` the profile as it was
    given, memory and all.
    """

    now: float
    lanes: Lanes
    devices: Mapping[int, Device]
    jobs: Mapping[int, Job]
    foreground: Callable[[int], Job | None]
    waiting: Callable[[], Iterator[Job]]
    until: float
    in_time: Callable[[Job, Sequence[Job]], bool]
    profile: Callable[[Job], Profile | None]
    loaded: Callable[[Job], Profile | None]


class BackgroundRule(Protocol):
    """Says which jobs run on the background lanes."""

    def share(self, view: LaneView) -> list[LaneDecision]:
        """What to change there now, in the order it is to be applied: a pure function of the view."""
        ...
