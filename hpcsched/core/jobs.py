"""A job as the machine sees it: what was asked for, where it stands, and what it went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core.model import NOTHING, Attempt, JobSpec, JobState
from hpcsched.core.reasons import Note, Reason

STORY_LENGTH = 60

MOST_MEASURED = 9
"""Measured values of a cost that count: older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Target:
    """A lease that a job is to go on with: resized in place, or started again on it when it has saved.

    `since` is when that was decided. On CPU cores: `seats` in place of GPUs, `grant` (hundredths by core) of
    the cores of `host`, and `why` they are to be so.
    """

    gpus: tuple[int, ...]
    role: str
    since: float
    seats: tuple[Seat, ...] = ()
    why: Reason | None = None
    host: str = ""
    grant: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is true of few jobs; apart, and shared, as a million jobs must fit into a gibibyte.

    `most_gpus` is what the program has said to be its limit on each host, `usable` the number of GPUs there
    that it can use as far as that is known (None: any), and `per_gpu` whether its newest attempt was started
    as one process on each: see `core.processes`. `failed_fast` is the exit code and the last line of its last
    attempt, if that has failed soon after its start. `anew`: it has been begun once more, and has saved
    nothing since. `untimed` is the number of its first attempts that its time limit does not count, as it was
    run again after them.
    """

    most_gpus: int | None = None
    usable: int | None = None
    per_gpu: bool = True
    failed_fast: tuple[int, str] | None = None
    anew: bool = False
    untimed: int = 0


USUAL = Traits()


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job's state. Only the machine changes it; policies and reports read it.

    `gpus` are the devices it holds, reservations for its next attempt included. `step` is the last
    step heard of, `saved_step` that of its newest checkpoint (None: it has none). `wanted` says
    what the outside wants of a running job: "suspend", "cancel", "drain", or a lost device.
    `in_place`: its program can be resized while it goes on. `becoming` is the lease that it has been told to
    take in place, until the outside has answered; `target` is the same as long as that is still wanted.
    `timers` says when each kind of timer of the newest attempt is due; one that was set again
    before it ran out is void. `excuses` are the ids of the background jobs that a failure of
    it has been put down to.
    """

    id: int
    spec: JobSpec
    submit_s: float
    state: JobState = JobState.PENDING
    unmet: int = 0
    held: bool = False
    gpus: tuple[int, ...] = ()
    role: str | None = None
    target: Target | None = None
    becoming: Target | None = None
    ready: bool = False
    in_place: bool = False
    traits: Traits = USUAL
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
    excuses: tuple[int, ...] = ()
    exit: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=lambda: NOTHING)
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
    def resizing(self) -> bool:
        """It is being resized in place: ranks that join may live on all GPUs that it holds."""
        return self.becoming is not None

    @property
    def settled(self) -> bool:
        """It runs, can be suspended, and nothing is under way: a policy may change it."""
        return self.state is JobState.RUNNING and self.ready and not self.wanted and not self.resizing

    @property
    def width(self) -> int:
        """GPUs its newest attempt has on each of its hosts."""
        return len(self.current.gpus) // self.spec.nodes

    def time_left_s(self, now: float) -> float | None:
        """Seconds that it may still run, of the run's clock; None without a limit."""
        limit = self.spec.needs.time_s if self.spec.needs else None
        if limit is None:
            return None
        timed = self.attempts[self.traits.untimed :]
        return limit - sum((now if one.end_s is None else one.end_s) - one.start_s for one in timed)

    @property
    def steps_repeated(self) -> int | None:
        """Steps done more than once so far; None for a program that reports no progress."""
        return self.repeated if self.reports else None

    def has(self, **traits: Any) -> None:
        """From now on these of its traits are so."""
        self.traits = replace(self.traits, **traits)
        if self.traits == USUAL:
            self.traits = USUAL

    def note(self, at: float, reason: Reason) -> None:
        """Add a line to the story; the oldest lines go when it grows long."""
        first, later = self.story[:1], self.story[1:]
        self.story = (*first, *later[-(STORY_LENGTH - 2) :], Note(at, reason))

    def limits(self, total: int) -> tuple[int, int]:
        """Fewest and most GPUs it may have on each of its hosts, of `total` there."""
        limits = (total, self.spec.gpus_max, self.traits.most_gpus, self.traits.usable)
        most = min(x for x in limits if x is not None)
        return self.spec.gpus_min, most


@dataclass(slots=True)
class MeasuredCost:
    """The newest measured values of a cost, in seconds; what counts is their median."""

    values: tuple[float, ...] = ()

    def add(self, seconds: float | None) -> None:
        """Take one more in; None is none."""
        if seconds is not None:
            self.values = (*self.values[1 - MOST_MEASURED :], seconds)

    @property
    def median(self) -> float | None:
        """None without values."""
        return median(self.values) if self.values else None


@dataclass(slots=True, kw_only=True)
class Costs:
    """What transitions of a model took in this run, seconds.

    `start_s` and `suspend_s` are the latest seen by the run's clock, of stand-ins too; `suspend_s` is of no
    save that was measured to be a quick one. `longest_suspend_s` is the longest of all saves. The others
    are measured: launches until ready, saves when the devices were wanted at once and
    when they had to be durable, for how long training stood still where a job grew or shrank
    in place, and how long the ranks that joined it took to start.
    """

    suspend_s: float | None = None
    longest_suspend_s: float = 0.0
    start_s: float | None = None
    starts: MeasuredCost = field(default_factory=MeasuredCost)
    quick_saves: MeasuredCost = field(default_factory=MeasuredCost)
    durable_saves: MeasuredCost = field(default_factory=MeasuredCost)
    grows: MeasuredCost = field(default_factory=MeasuredCost)
    shrinks: MeasuredCost = field(default_factory=MeasuredCost)
    builds: MeasuredCost = field(default_factory=MeasuredCost)
