"""What a rule for CPU cores may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcsched.contract.seats import Seat
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.cpu.cores import Allotment, Grant
from hpcsched.core.model import HostCores
from hpcsched.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOnCores:
    """Start a waiting job with these seats, on this much of the cores of a host.

    `memory` is what the policy wants to remember of the job.
    """

    job: Job
    host: str
    seats: tuple[Seat, ...]
    grant: Grant
    memory: object
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reseat:
    """Have a running job go on with these seats, and this much of the cores of its host, without a restart.

    `keep` are the ranks that stay, rank 0 first: they are numbered anew in this order, and those that join
    after them.
    """

    job: Job
    seats: tuple[Seat, ...]
    keep: tuple[int, ...]
    grant: Grant
    memory: object
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Nothing changes for a job on CPU cores, but for what the policy remembers of it."""

    job: Job
    memory: object
    reason: Reason | None = None


CoresDecision = StartOnCores | Reseat | Remember


class Room(Protocol):
    """What could be had of the cores of a host, hundredths by core; `lent`: with what free CPU slots can
    lend."""

    def __call__(self, host: str, *, lent: bool) -> dict[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresView:
    """What the rules of CPU cores see; reading it changes nothing, and it lives for one decision.

    `hosts` have cores for jobs. `room(host)` is what could be had of them, with what free CPU slots would
    lend: hundredths by core; `most()` cores are those of the host that has most, were all of them free.
    `slots_wanted`: a job waits for GPUs, which slots on loan would keep from it. `of` is what jobs have,
    `waiting()` walks those that could start in FIFO order, and `in_time(job, others)` says whether one can
    still be started, together with `others`, before the allocation ends.
    """

    now: float
    hosts: Mapping[str, HostCores]
    room: Room
    most: Callable[[], float]
    slots_wanted: bool
    jobs: Mapping[int, Job]
    running: list[Job]
    of: Mapping[int, Allotment]
    waiting: Callable[[], Iterator[Job]]
    in_time: Callable[[Job, Sequence[Job]], bool]


class CpuRule(Protocol):
    """Says which jobs have which CPU cores."""

    def allot(self, view: CoresView) -> list[CoresDecision]:
        """What to change there now, in the order it is to be applied: a pure function of the view."""
        ...
