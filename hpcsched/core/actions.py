"""Everything the core may ask the outside to do. Idempotent per (job_id, attempt)."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.contract.seats import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all actions; `at` and `cause` say when and why it was asked for."""

    at: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAction(Action):
    """Base of actions on one attempt of a job."""

    job_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(AttemptAction):
    """Start the job's workers on these devices, from its newest checkpoint if `resume`.

    `per_gpu`: one process on each GPU; else as many as the job says (`core.processes`). One on CPU cores has
    `seats` instead, a process each. `anew`: it begins once more; what an earlier attempt has saved must not
    be found by this one.
    """

    gpus: tuple[int, ...]
    role: str
    resume: bool
    per_gpu: bool = True
    seats: tuple[Seat, ...] = ()
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(AttemptAction):
    """Ask the workers to save at the next step boundary and leave (SIGTSTP).

    `quick`: their devices are wanted now; what they saved may become durable after they have left.
    """

    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(AttemptAction):
    """Have the attempt become the next one on other devices, without a restart of those ranks that stay.

    `gpus` are in the order of the ranks: those that stay, in their order, then those that join. Answered
    by WorkersResized or ResizeFailed, unless the attempt ends first. A later Suspend,
    Terminate or Kill of the same attempt calls it off. On CPU cores: `seats` instead, and which of its ranks
    stay.
    """

    gpus: tuple[int, ...]
    role: str
    seats: tuple[Seat, ...] = ()
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace(AttemptAction):
    """Have a background attempt use this share of its own speed, 0 to 1: 0 is to pause."""

    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(AttemptAction):
    """Ask the workers to leave at once (SIGTERM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(AttemptAction):
    """End the workers' process groups (SIGKILL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Action):
    """Send TimerFired(key) at `due`; a second one with the same key replaces the first."""

    key: tuple[str, int, int]
    due: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseHosts(Action):
    """Give these hosts back to the batch system: nothing of the run is on them. Answered by HostsReleased or
    ReleaseFailed."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan(Action):
    """Call `Machine.make_plan` and send PlanMade with what it gives."""
