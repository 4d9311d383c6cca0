"""Background lanes: the jobs on them, and what sharing a GPU costs the job in its foreground.

Every GPU has a foreground lane, which the policies give away, and a background lane, which takes one
low-priority job beside it (DeepPool, Park et al., MLSys 2022, section 4). Nothing of the foreground depends
on what is here: which jobs hold background lanes, and how fast the foreground jobs go alone and beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from hpcsched.core.jobs import Job
from hpcsched.core.learning import LEAST_S, LEAST_SAMPLES, LEAST_STEPS
from hpcsched.core.model import Kind
from hpcsched.core.reasons import Reason

PACES = (1.0, 0.5, 0.25, 0.125)
"""Shares of its own speed that a background job may be told to keep to, one after the other."""

MOST_RATES = 9
"""Newest samples of a speed that count: their median does."""


@dataclass(slots=True)
class LaneGuest:
    """A job on a background lane. Times are in the run's clock.

    `pace` is the share of its own speed that it has been told to keep to, `most` the largest that it may be
    told until the foreground's own speed has been measured again; `paused_s`: it does nothing since then, for
    that to be measured.
    """

    job_id: int
    gpu: int
    since_s: float
    pace: float = 1.0
    most: float = 1.0
    paused_s: float | None = None

    @property
    def share(self) -> float:
        """Of its own speed, what it may use now."""
        return self.pace if self.paused_s is None else 0.0


@dataclass(slots=True)
class Speed:
    """How fast one attempt of a foreground job goes, in steps per second.

    `alone` and `beside` are the newest samples since it was last changed who runs beside it and how fast:
    one of them is empty. `own` is the median of the newest `alone` that were enough, known at `own_s`; None:
    not measured. `anew`: that was after its guests had last been told another pace. `measured_only`: its
    profile says nothing about it. `step` is the newest that it has told of, done at `heard_s`; `since_step`
    the one that it had told of at `since_s`, when something last changed beside it (or the first one).
    """

    attempt: int
    alone: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()
    own: float | None = None
    own_s: float = 0.0
    anew: bool = False
    measured_only: bool = False
    step: int = 0
    heard_s: float = 0.0
    since_step: int = 0
    since_s: float = 0.0
    _open: tuple[int, float] | None = None

    @property
    def contended(self) -> float | None:
        """Its speed beside its guests as they are now; None while too little is known."""
        return median(self.beside) if len(self.beside) >= LEAST_SAMPLES else None

    def disturb(self, now: float) -> None:
        """Something has changed beside it: what was measured before says nothing of now."""
        self.alone, self.beside, self._open = (), (), None
        self.since_step, self.since_s = self.step, now

    def hear(self, step: int, at: float) -> None:
        """It had done `step` steps at `at`: whoever says the same step again says nothing of progress."""
        if step != self.step:
            self.step, self.heard_s = step, at

    def observe(self, step: int, at: float, *, shared: bool) -> None:
        """It had done `step` steps at `at`: what it did since the last look is a sample if that is enough."""
        if self._open is None or step < self._open[0]:
            self._open = step, at
            return
        steps, seconds = step - self._open[0], at - self._open[1]
        if steps < LEAST_STEPS or seconds < LEAST_S:
            return
        self._open = step, at
        if shared:
            self.beside = (*self.beside[1 - MOST_RATES :], steps / seconds)
            return
        self.alone = (*self.alone[1 - MOST_RATES :], steps / seconds)
        if len(self.alone) >= LEAST_SAMPLES:
            self.own, self.own_s, self.anew = median(self.alone), at, True


@dataclass(slots=True)
class Lanes:
    """The background lanes of a run.

    `holder` says which job has the lane of a GPU, `guests` how they are there. `speeds` are those of the
    foreground jobs that run, by job id. For the rest of the run: `costly` says by (foreground model,
    background model) why these do not share a GPU any more, `quarantined` by job id why it shares none.
    """

    holder: dict[int, int] = field(default_factory=dict)
    guests: dict[int, LaneGuest] = field(default_factory=dict)
    speeds: dict[int, Speed] = field(default_factory=dict)
    costly: dict[tuple[str, str], Reason] = field(default_factory=dict)
    quarantined: dict[int, Reason] = field(default_factory=dict)

    def lease(self, job_id: int, gpus: Iterable[int], now: float) -> None:
        """Let a background job hold exactly these lanes: one, or none."""
        if guest := self.guests.pop(job_id, None):
            del self.holder[guest.gpu]
        for gpu in gpus:
            assert gpu not in self.holder, f"the background lane of GPU {gpu} is taken"
            self.holder[gpu] = job_id
            self.guests[job_id] = LaneGuest(job_id, gpu, now)

    def beside(self, job: Job) -> list[LaneGuest]:
        """Who is on the background lanes of a foreground job's GPUs, those that came first in front."""
        there = {self.holder[gpu] for gpu in job.gpus if gpu in self.holder}
        return sorted((self.guests[i] for i in there), key=lambda guest: (guest.since_s, guest.job_id))

    def shared(self, job: Job) -> bool:
        """Whether somebody does something beside a foreground job."""
        return any(guest.share > 0 for guest in self.beside(job))

    def speed(self, job: Job) -> Speed | None:
        """What was measured of a foreground job's newest attempt."""
        speed = self.speeds.get(job.id)
        return speed if speed and speed.attempt == job.attempt else None

    def hear(self, job: Job, step: int, at: float) -> Speed:
        """A foreground job's newest attempt had done `step` steps at `at`, whatever is under way with it."""
        speed = self.speed(job)
        if speed is None:
            speed = Speed(job.attempt, step=step, heard_s=at, since_step=step, since_s=at)
            self.speeds[job.id] = speed
        speed.hear(step, at)
        return speed

    def observe(self, job: Job, step: int, at: float) -> None:
        """It did so while nothing was under way with it: its speed can be taken from that."""
        self.hear(job, step, at).observe(step, at, shared=self.shared(job))

    def disturb(self, job_id: int | None, now: float) -> None:
        """It has changed who runs beside this foreground job, or how fast."""
        if job_id is not None and (speed := self.speeds.get(job_id)):
            speed.disturb(now)

    def gone(self, job_id: int) -> None:
        """The foreground job's attempt is over."""
        self.speeds.pop(job_id, None)


def own_speed(speed: Speed | None, expected: float | None) -> float | None:
    """A foreground job's speed when nobody runs beside it: as measured, else as its profile has it."""
    if speed and (speed.own is not None or speed.measured_only):
        return speed.own
    return expected


def slowdown(speed: Speed | None, expected: float | None) -> float | None:
    """The share of its own speed that its guests cost a foreground job; None while that is not known."""
    own, contended = own_speed(speed, expected), speed.contended if speed else None
    return None if own is None or contended is None else 1 - contended / own


def can_be_paced(job: Job) -> bool:
    """Whether its program knows how to go slower: one of ours does."""
    return job.spec.kind is not Kind.COMMAND
