"""A job as the machine sees it: what was asked for, where it stands, and what it went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcsched.core.model import NOTHING, Attempt, JobSpec, JobState, Role
from hpcsched.core.reasons import Note, Reason

STORY_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Target:
    """The lease a job is being suspended for: it starts again on these GPUs."""

    gpus: tuple[int, ...]
    role: Role


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job's state. Only the machine changes it; policies and reports read it.

    `gpus` are the devices it holds, reservations for its next attempt included. `step` is the last
    step heard of, `saved_step` that of its newest checkpoint (None: it has none). `wanted` says
    what the outside wants of a running job: "suspend", "cancel", "drain", or a lost device.
    `timers` says when each kind of timer of the newest attempt is due; one that was set again
    before it ran out is void.
    """

    id: int
    spec: JobSpec
    submit_s: float
    state: JobState = JobState.PENDING
    unmet: int = 0
    held: bool = False
    gpus: tuple[int, ...] = ()
    role: Role | None = None
    target: Target | None = None
    ready: bool = False
    wanted: str = ""
    attempt: int = 0
    attempts: Sequence[Attempt] = ()
    processes: tuple[tuple[int, int], ...] = ()
    timers: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    step: int = 0
    reports: bool = False
    saved_step: int | None = None
    repeated: int = 0
    rate: float | None = None
    suspensions: int = 0
    failures: int = 0
    losses: int = 0
    exit: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    reason: Reason | None = None
    story: Sequence[Note] = ()

    @property
    def remaining(self) -> int | None:
        """Steps still to do, by the last report; None when the work is not known."""
        return None if self.spec.steps is None else max(0, self.spec.steps - self.step)

    @property
    def current(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def width(self) -> int:
        """GPUs its newest attempt has on each of its hosts."""
        return len(self.current.gpus) // self.spec.nodes

    @property
    def steps_repeated(self) -> int | None:
        """Steps done more than once so far; None for a program that reports no progress."""
        return self.repeated if self.reports else None

    def note(self, at: float, reason: Reason) -> None:
        """Add a line to the story; the oldest lines go when it grows long."""
        first, later = self.story[:1], self.story[1:]
        self.story = (*first, *later[-(STORY_LENGTH - 2) :], Note(at, reason))

    def limits(self, total: int) -> tuple[int, int]:
        """Fewest and most GPUs it may have on each of its hosts, of `total` there."""
        most = total if self.spec.gpus_max is None else min(self.spec.gpus_max, total)
        return self.spec.gpus_min, most


@dataclass(slots=True, kw_only=True)
class Costs:
    """What transitions of a model took in this run, seconds: the largest and the latest seen."""

    suspend_s: float | None = None
    longest_suspend_s: float = 0.0
    start_s: float | None = None
