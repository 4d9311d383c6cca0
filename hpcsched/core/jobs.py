"""A job as the machine sees it: what was asked for, where it stands, and what it went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core.model import NOTHING, Attempt, JobSpec, JobState, Kind
from hpcsched.core.profile import Profile
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


MOST_GPUS = 1024
"""GPUs of one host, at most, that are looked at where counts have to keep a global batch (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What is known of a job that saves by itself (`JobSpec.restart`).

    `by_contract`: its program has said itself that it can be suspended, and so does as a program of ours.
    `handles`: the attempt catches the signal that asks it to save. `at` is when its newest checkpoint was
    written, in seconds of the run's clock (None: not known, or there is none). `width` is the number of GPUs
    on each host that it ran on when it first saved (0: it has not). `asked` is the step of its newest
    checkpoint when the attempt was asked to save (-1: there was none). `in_vain`: it caught that signal the
    last time, and saved nothing.
    """

    by_contract: bool = False
    handles: bool = False
    at: float | None = None
    width: int = 0
    asked: int = -1
    in_vain: bool = False


@dataclass(frozen=True, slots=True)
class Trained:
    """What was seen of the training in an attempt of a job that saves by itself: nobody says when it begins.

    It had made `first` steps at `first_s`, when it was first seen to have made any, and `newest` at
    `newest_s`, when it was last: as many as it began with where nothing tells steps. `saved_s` is when its
    newest checkpoint was written, of a program that does not catch the signal which asks for one. Times are
    in seconds of the run's clock.
    """

    attempt: int
    first: int
    first_s: float
    newest: int
    newest_s: float
    saved_s: float | None = None

    def begun_s(self, from_step: int) -> float | None:
        """When its steps after `from_step` began, as steps of an attempt are taken to last equally long.

        None: too little was seen.
        """
        if not from_step < self.first < self.newest:
            return None
        step_s = (self.newest_s - self.first_s) / (self.newest - self.first)
        return self.first_s - (self.first - from_step) * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is true of few jobs; apart, and shared, as a million jobs must fit into a gibibyte.

    `most_gpus` is what the program has said to be its limit on each host, `usable` the number of GPUs there
    that it can use as far as that is known (None: any), and `per_gpu` whether its newest attempt was started
    as one process on each: see `core.processes`. `failed_fast` is the exit code and the last line of its last
    attempt, if that has failed soon after its start. `anew`: it has been begun once more, and has saved
    nothing since. `saves` is for a job that saves by itself, as is `trained`: those of its attempts that were
    seen to train. `untimed` is the number of its first attempts that its time limit does not count, as it was
    run again after them; nor does it count `unstarted_s` seconds of the others, before their processes were
    started. `excuses` are the ids of the background jobs that a failure of it has been put down to. `losses`
    is how many of its attempts in a row were lost that it was not to blame for. `repeated` is the number of
    steps that it has done once more. `told_steps` is the whole work in steps as its program says it. `waits`
    is how often in a row it has waited since it fails at once.
    """

    most_gpus: int | None = None
    usable: int | None = None
    per_gpu: bool = True
    failed_fast: tuple[int, str] | None = None
    anew: bool = False
    saves: Saves = Saves()
    trained: tuple[Trained, ...] = ()
    untimed: int = 0
    unstarted_s: float = 0.0
    excuses: tuple[int, ...] = ()
    losses: int = 0
    repeated: int = 0
    told_steps: int | None = None
    waits: int = 0


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
    before it ran out is void.
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
    rate: float | None = None
    suspensions: int = 0
    failures: int = 0
    exit: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=lambda: NOTHING)
    reason: Reason | None = None
    story: Sequence[Note] = ()

    @property
    def steps(self) -> int | None:
        """The whole work in steps, as the job file says it, else as its program does; None: not known."""
        return self.traits.told_steps if self.spec.steps is None else self.spec.steps

    @property
    def remaining(self) -> int | None:
        """Steps still to do, by the last report; None when the work is not known."""
        return None if self.steps is None else max(0, self.steps - self.step)

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
        spent_s = sum((now if one.end_s is None else one.end_s) - one.start_s for one in timed)
        return limit + self.traits.unstarted_s - spent_s

    @property
    def steps_repeated(self) -> int | None:
        """Steps done more than once so far; None for a program that reports no progress."""
        return self.repeated if self.reports else None

    @property
    def repeated(self) -> int:
        """The number of steps that it has done once more."""
        return self.traits.repeated

    def has(self, **traits: Any) -> None:
        """From now on these of its traits are so."""
        self.traits = replace(self.traits, **traits)
        if self.traits == USUAL:
            self.traits = USUAL

    def has_saved(self, **known: Any) -> None:
        """From now on this is known of how it saves by itself."""
        self.has(saves=replace(self.traits.saves, **known))

    def was_seen(self, step: int | None, at_s: float, *, saved: bool = False) -> None:
        """It had made `step` steps (None: nobody knows) at `at_s`. `saved`: a checkpoint is of then, and it
        does not catch the signal that asks it to write one."""
        seen, from_step = self.trained_in(self.attempt), self.current.from_step
        if at_s <= self.current.start_s or (step is not None and step <= from_step):
            return
        if seen is None:
            step = from_step if step is None else step
            seen = Trained(self.attempt, first=step, first_s=at_s, newest=step, newest_s=at_s)
        elif step is not None and step > seen.newest and at_s > seen.newest_s:
            seen = replace(seen, newest=step, newest_s=at_s)
        if saved:
            seen = replace(seen, saved_s=max(at_s, seen.saved_s or 0.0))
        earlier = (one for one in self.traits.trained if one.attempt != self.attempt)
        self.has(trained=(*earlier, seen))

    def trained_in(self, attempt: int) -> Trained | None:
        """What was seen of its training in the attempt of this number; None: nothing."""
        return next((one for one in reversed(self.traits.trained) if one.attempt == attempt), None)

    def leaves_s(self, attempt: Attempt) -> float | None:
        """Since when an attempt that was asked to leave has done nothing any more that is kept: one that does
        not catch its signal goes on until it has saved. None: it was not asked."""
        trained = self.trained_in(attempt.number)
        if attempt.signalled_s is None or trained is None or trained.saved_s is None:
            return attempt.signalled_s
        return max(attempt.signalled_s, trained.saved_s)

    @property
    def saves_by_itself(self) -> bool:
        """Whether it is suspended as a program that knows nothing of hpcsched."""
        return self.spec.restart is not None and not self.traits.saves.by_contract

    @property
    def cannot_save(self) -> bool:
        """Whether nothing says that its program can save: not the job file, and not itself in any attempt."""
        if self.spec.kind is not Kind.COMMAND or self.spec.restart is not None or self.ready:
            return False
        return self.saved_step is None and all(attempt.ready_s is None for attempt in self.attempts)

    def note(self, at: float, reason: Reason) -> None:
        """Add a line to the story; the oldest lines go when it grows long."""
        first, later = self.story[:1], self.story[1:]
        self.story = (*first, *later[-(STORY_LENGTH - 2) :], Note(at, reason))

    # --- how many GPUs it may have on each of its hosts -----------------------------------------

    def allows(self, gpus: int) -> bool:
        """Whether so many are a count that it may have at all: whoever chooses a count asks this."""
        if gpus % self.spec.gpus_multiple:
            return False
        return self.same_batch(gpus) or not any(map(self.same_batch, self._said_counts()))

    def same_batch(self, gpus: int) -> bool:
        """Whether its global batch on so many is what it is on those that it began on, as far as it has."""
        restart, first = self.spec.restart, self.traits.saves.width
        if restart is None or not self.keeps_batch:
            return True
        if not first and self.attempts and self.state.active:
            first = self.width  # it saves its first checkpoint there
        if restart.batch == "kept" and first:
            return restart.accumulation * first % gpus == 0
        return gpus == first or not first

    def _said_counts(self) -> range:
        """The counts that its job file leaves it, whatever keeps its batch."""
        step, most = self.spec.gpus_multiple, self.spec.gpus_max or MOST_GPUS
        return range(max(self.spec.gpus_min, step), min(most, MOST_GPUS) + 1, step)

    def fitting(self, gpus: int) -> int:
        """The largest count that it may have, of at most so many; 0: none."""
        if self.any_count:
            return gpus
        return next((count for count in range(gpus, 0, -1) if self.allows(count)), 0)

    def more_than(self, gpus: int) -> int:
        """The next larger count that it may have; there may be none so large."""
        if self.any_count:
            return gpus + 1
        over = range(gpus + 1, gpus + MOST_GPUS)
        return next((count for count in over if self.allows(count)), gpus + MOST_GPUS)

    def limits(self, total: int) -> tuple[int, int]:
        """Fewest and most that it may have, of `total` there; the most are fewer where there is no count."""
        limits = (total, self.spec.gpus_max, self.traits.most_gpus, self.traits.usable)
        most = min(x for x in limits if x is not None)
        return (self.spec.gpus_min, most) if self.any_count else (self.least, self.fitting(most))

    @property
    def least(self) -> int:
        """The fewest that it can start on."""
        least = self.spec.gpus_min
        return least if self.any_count or self.allows(least) else self.more_than(least)

    def fastest(self, profile: Profile, most: int, least: int) -> int:
        """The smallest count in [least, most], its `limits`, with the largest throughput."""
        if self.any_count:
            return profile.optimal(most, least)
        counts = [count for count in range(least, most + 1) if self.allows(count)] or [least]
        return max(counts, key=lambda count: (profile.rate(count), -count))

    @property
    def keeps_batch(self) -> bool:
        """Whether its global batch binds it to certain counts once it has saved: nobody could tell it."""
        restart = self.spec.restart
        return restart is not None and restart.batch != "scales" and not self.traits.saves.by_contract

    @property
    def any_count(self) -> bool:
        """Whether all counts in its `limits` are allowed."""
        spec = self.spec
        return spec.gpus_multiple == 1 and (spec.restart is None or not self.keeps_batch)


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
