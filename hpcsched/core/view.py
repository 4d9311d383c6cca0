"""What a policy may see, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpcsched.contract.seats import Seat
from hpcsched.core.jobs import Job
from hpcsched.core.model import Device, HostCores, Role
from hpcsched.core.plan import Plan
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Reason
from hpcsched.core.resources.background import Lanes
from hpcsched.core.resources.cpu import Allotment, Grant
from hpcsched.core.resources.gpus import Fits, Rooms
from hpcsched.core.resources.packing import Packs
from hpcsched.core.resources.proposals import Proposals
from hpcsched.core.resources.queue import WaitingQueue


class LaunchCost(Protocol):
    """Seconds from a launch on so many GPUs to the first step."""

    def __call__(self, job: Job, gpus: int, *, first: bool) -> float: ...


class Room(Protocol):
    """What could be had of the cores of a host, hundredths by core; `lent`: with what free CPU slots can
    lend."""

    def __call__(self, host: str, *, lent: bool) -> dict[int, int]: ...


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
    role: Role
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Start a waiting background job on the background lane of this GPU."""

    job: Job
    gpu: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
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
class Note:
    """Nothing changes for a job on CPU cores, but for what the policy remembers of it."""

    job: Job
    memory: object
    reason: Reason | None = None


Decision = Start | Resize | Preempt | Remark | LookAgain | Replan
LaneDecision = Share | Pace | Yield | LookAgain
PackDecision = Ride | Part | LookAgain
CoresDecision = StartOnCores | Reseat | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state as a policy sees it; reading it changes nothing, and it lives for one decision.

    All GPU counts of jobs, profiles and costs are counts on each host of a job.

    `rooms` are the free GPUs by host, for the policy to take from as it hands them out; `capacity` are all
    healthy ones. `running` are the jobs that hold GPUs, oldest first, and `secondaries` those of that role.
    `hosts_of(job)` says how many of a running job's GPUs lie on which host, `places(gpus)` how many of these.
    `waiting(fits)` walks the jobs that could start in FIFO order. `queue` are all that wait, in order, and
    `blocked()` those that wait for others to complete, whose names `unmet(job)` gives.
    `in_time(job, others)` says whether a waiting job can still be started, together with `others`, before
    the allocation ends.
    `profile(job)` is None for a model never measured; of one that only this run has seen it has just the
    counts that were seen, where `curve(job)` has estimates of the others.
    `launch_s(job, gpus, first=)` is the seconds from a launch to the first step, `save_s(job)` those of
    saving and leaving, `switch_s(job, gpus)` those without training that bringing the job to `gpus` GPUs
    costs: in place, which `in_place(job, gpus, hosts)` tells, or by a suspend and a resume. In place it
    stands still for `stand_s(job, old, gpus)`; if it gets more GPUs, it goes on as it is for
    `built_s(job, gpus)` before that. `resize_left_s(job)` is how much longer one under way will take.
    `start_left_s(job)` are the seconds until a job that is starting does its first step; `left_s` those
    until all jobs have to save because the allocation ends (infinite if it does not).
    `plan` is the policy's newest plan in this life of the run; `news` counts what no plan foresaw.
    `proposals` are what jobs have said of how many GPUs are good for them: `profile` and `curve` go by it.
    """

    now: float
    rooms: Rooms
    capacity: Rooms
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
    stand_s: Callable[[Job, int, int], float]
    built_s: Callable[[Job, int], float]
    resize_left_s: Callable[[Job], float]
    start_left_s: Callable[[Job], float]
    plan: Plan | None
    news: int
    proposals: Proposals

    def limits(self, job: Job) -> tuple[int, int]:
        """Fewest and most GPUs the job may have on each of its hosts, were all of them free."""
        return job.limits(self.capacity.most(job.spec.nodes))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackView:
    """What the rules of packs see; reading it changes nothing, and it lives for one decision.

    `holders` are the jobs that hold a GPU, by GPU, `packs` who rides with them, `guests` who has its
    background. `waiting()` walks all jobs that wait for GPUs in FIFO order. `in_time(job, others)` and
    `loaded(job)` are as for the lanes, `left_s`, `save_s(job)` and `launch_s(job, gpus, first=)` as for all
    others. `free` is how many GPUs nobody holds.
    """

    now: float
    packs: Packs
    devices: Mapping[int, Device]
    jobs: Mapping[int, Job]
    holders: Mapping[int, Job]
    guests: Mapping[int, int]
    free: int
    left_s: float
    waiting: Callable[[], Iterator[Job]]
    in_time: Callable[[Job, Sequence[Job]], bool]
    loaded: Callable[[Job], Profile | None]
    save_s: Callable[[Job], float]
    launch_s: LaunchCost


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


class Policy(Protocol):
    """Decides who gets GPUs: a pure function of the view."""

    name: str
    work_conserving: bool
    """No healthy GPU idles while an independent job that fits waits."""
    acts_when_full: bool
    """It is asked also while no GPU is free."""

    def decide(self, view: View) -> list[Decision]:
        """What to change now, in the order it is to be applied."""
        ...

    def watches(self, job: Job) -> bool:
        """Whether how far a running job is can change a decision; asked once for each of its attempts."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """A policy that also says who runs on the background lanes."""

    def share(self, view: LaneView) -> list[LaneDecision]:
        """What to change there now, in the order it is to be applied: a pure function of the view."""
        ...


@runtime_checkable
class Packing(Protocol):
    """A policy that also says who rides on whose GPU."""

    def ride(self, view: PackView) -> list[PackDecision]:
        """Who joins or leaves whom now, in the order it is to be applied: a pure function of the view."""
        ...


@runtime_checkable
class Reshaping(Protocol):
    """A policy that lets jobs grow and shrink by what they propose, after all else that it decides."""

    def reshape(self, view: View) -> list[Resize]:
        """Who grows or shrinks now: a pure function of the view."""
        ...


@runtime_checkable
class Allotting(Protocol):
    """A policy that also says who has which CPU cores."""

    def allot(self, view: CoresView) -> list[CoresDecision]:
        """What to change there now, in the order it is to be applied: a pure function of the view."""
        ...


@runtime_checkable
class Planning(Protocol):
    """A policy that plans ahead. Its plans are events: a replay of the journal makes none anew."""

    def plan(self, view: View) -> Plan:
        """What to do from here on: a pure function of the view."""
        ...
