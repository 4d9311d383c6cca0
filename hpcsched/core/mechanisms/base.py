"""What a mechanism adds to the core: a kind of lease, traits of the jobs that use it, its own decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job, Target
from hpcsched.core.model import Attempt, HostCores, JobSpec, SeatedAttempt
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.queue import WaitingQueue

Handlers = Mapping[type[ev.Event], Callable[[Any], None]]


class Mechanism:
    """One way to hold what a job runs on, and what follows from it while the job waits, runs and ends.

    The methods here are those of a mechanism that changes nothing: one overrides what it is about. A job that
    no mechanism `has` holds GPUs of its own (`own_gpus.OwnGpus`).
    """

    name: ClassVar[str]
    role: ClassVar[str | None] = None
    """The role of an attempt that holds by this mechanism; None: it gives no leases."""
    foreground: ClassVar[bool] = True
    """Its jobs concern the policy. With False, an event about them alone does not have the policy asked."""
    on_gpus: ClassVar[bool] = True
    """Its jobs hold GPUs, or a part of one. Else their targets have `seats`: where they are started."""
    listed: ClassVar[bool] = False
    """Its jobs stand in `Run.running`."""
    planned: ClassVar[bool] = False
    """Plans say when its jobs start."""
    profiled: ClassVar[bool] = True
    """Profiles by GPU count say how fast its jobs are."""
    teaches: ClassVar[bool] = True
    """The speed of its jobs says something of their model on that many GPUs."""
    settles: ClassVar[bool] = False
    """A change in place that fails is given up: a restart would bring nothing."""
    timer: ClassVar[tuple[str, int, int] | None] = None
    """Key of the timer with which it asks to look again."""
    rule: ClassVar[Callable[[Any], object] | None] = None
    """Of one that another package adds: makes its rule for a policy (None: that is to have none)."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        """The jobs that could start by it now."""
        self.used = False
        """There has been a job for it in this run."""

    def handlers(self) -> Handlers:
        """The events that it handles itself."""
        return {}

    # --- which jobs -------------------------------------------------------------------------

    def needed_by(self, spec: JobSpec) -> bool:
        """Whether such a job may come to use it."""
        return False

    def waits(self, job: Job) -> bool:
        """Whether the job waits in its queue."""
        return False

    def has(self, job: Job) -> bool:
        """Whether the job holds what it runs on by it; for most, jobs that wait in its queue are those."""
        return self.waits(job)

    # --- jobs that wait ---------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        """Put a job into the queue."""
        self.queue.add(job.id, arrival=job.submit_s, need=1, priority=job.spec.priority)

    def dequeue(self, job: Job) -> None:
        """Take a job out of the queue, if it is there."""
        self.queue.remove(job.id)

    def waiting_reason(self, job: Job) -> Reason:
        """Why a job in the queue waits."""
        raise NotImplementedError

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        """Have a job that starts hold `target`. Raises InvalidTransition if it cannot be had."""

    def change(self, job: Job, target: Target) -> None:
        """Have a job hold `target` too, besides what it has."""
        raise NotImplementedError

    def settle(self, job: Job, target: Target) -> None:
        """Have a job hold `target` alone, of all that it held."""
        raise NotImplementedError

    def keep(self, job: Job) -> None:
        """Have a job hold what its attempt runs on alone; what it was to change to is wanted no more."""
        raise NotImplementedError

    def release(self, job: Job) -> None:
        """Have a job whose attempt is over hold nothing."""
        raise NotImplementedError

    def inherit(self, gpu: int) -> bool:
        """Whether somebody who shared this GPU takes it over from the job that gives it back."""
        return False

    def on(self, gpu: int) -> tuple[int, ...]:
        """Ids of the jobs that use a GPU by it."""
        return ()

    def held_from_s(self, job: Job, attempt: Attempt) -> float | None:
        """Since when an attempt that holds by it has counted as the one that has its devices; None: never."""
        return attempt.start_s

    def lost(self, gpu: int, why: str) -> None:
        """A GPU is lost; jobs that are `on` it know by now."""

    def hosts_joined(self, cores: Iterable[HostCores]) -> None:
        """Hosts with these cores have joined the run."""

    def host_away(self, host: str) -> None:
        """A host is being given back, or about to end: nothing starts there any more."""

    def host_back(self, host: str) -> None:
        """It can be used again."""

    def redefined(self, job: Job) -> None:
        """A job that does not run has got another strategy."""

    def forget(self, job: Job) -> None:
        """A job is over."""

    # --- jobs that run ----------------------------------------------------------------------

    def started(self, job: Job) -> None:
        """The policy starts a job that has waited."""

    def began(self, job: Job, fields: Mapping[str, Any], target: Target) -> Attempt:
        """The attempt that begins on `target`."""
        if target.seats:
            return SeatedAttempt(**fields, seats=target.seats, why=target.why)
        return Attempt(**fields)

    def changed_to(self, job: Job, target: Target) -> tuple[Why, Mapping[str, Any]]:
        """The line of the story of a job that has gone over to `target` in place."""
        raise NotImplementedError

    def may_grow(self, job: Job) -> bool:
        """Whether a job that runs, and has got no more GPUs though some were free, may get more by it."""
        return False

    def met(self, job: Job) -> None:
        """An attempt has begun, or holds other GPUs."""

    def over(self, job: Job) -> None:
        """An attempt is over."""

    def saving(self) -> Iterable[Job]:
        """The jobs that will save when saving begins."""
        return ()

    def costs_key(self, job: Job) -> str:
        """The name under which the costs of the job's transitions are kept."""
        return job.spec.model

    def patience(self, job: Job) -> int:
        """The factor by which the job may take longer to leave than others."""
        return 1

    def disturbed(self, job: Job, gpus: Iterable[int]) -> list[Job] | None:
        """The jobs whose speed changes as `job` has changed on these GPUs; None: all on their hosts."""
        return None

    def heard(self, job: Job, step: int, at: float) -> None:
        """A job had done `step` steps at `at`, whatever is under way with it."""

    def alone(self, job: Job, step: int, at: float) -> bool:
        """The same, while nothing is under way with it: whether nobody shares its GPU."""
        return True

    def suspects(self, job: Job) -> list[tuple[Job, Job]]:
        """Who may be to blame if the job's attempt has failed, as (guest, host)."""
        return []

    def blames(self, job: Job, detail: str) -> list[tuple[Job, Job]]:
        """Likewise, where `detail`, the last line of what the job has printed, says what was wrong."""
        return []

    def separate(self, guest: Job, host: Job) -> None:
        """A job that used the host's GPU is under suspicion: it shares none any more."""

    def ran_out(self, job: Job) -> bool:
        """A job has exceeded its limit of memory: whether that was one that it had not asked for."""
        return False

    def room_mib(self, job: Job) -> float | None:
        """The most memory that a job that is launched may take of its device, in MiB; None: not limited."""
        return None

    def left_unasked(self, job: Job) -> str:
        """Why a job has saved and left unasked, if because of it; else ""."""
        return ""

    # --- the run ----------------------------------------------------------------------------

    def begin_life(self, event: ev.AgentStarted) -> None:
        """An agent has taken the run over."""

    def decide(self) -> None:
        """Carry out what the policy's rule says of it, after all else was decided."""
