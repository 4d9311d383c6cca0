"""How fast a job goes alone on its GPU and beside others, by what it tells of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from hpcsched.core.jobs import Job
from hpcsched.core.learning import LEAST_S, LEAST_SAMPLES, LEAST_STEPS

MOST_RATES = 9
"""Newest samples of a speed that count: their median does."""


@dataclass(slots=True)
class Speed:
    """How fast one attempt of a job goes, in steps per second.

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


class Speeds(dict[int, Speed]):
    """The speeds of the newest attempts of jobs, by job id."""

    def of(self, job: Job) -> Speed | None:
        """What was measured of a job's newest attempt."""
        speed = self.get(job.id)
        return speed if speed and speed.attempt == job.attempt else None

    def hear(self, job: Job, step: int, at: float) -> Speed:
        """A job's newest attempt had done `step` steps at `at`, whatever is under way with it."""
        speed = self.of(job)
        if speed is None:
            speed = Speed(job.attempt, step=step, heard_s=at, since_step=step, since_s=at)
            self[job.id] = speed
        speed.hear(step, at)
        return speed

    def disturb(self, job_id: int | None, now: float) -> None:
        """It has changed who is beside this job, or how fast."""
        if job_id is not None and (speed := self.get(job_id)):
            speed.disturb(now)

    def gone(self, job_id: int) -> None:
        """A job's attempt is over."""
        self.pop(job_id, None)


def own_speed(speed: Speed | None, expected: float | None) -> float | None:
    """A foreground job's speed when nobody runs beside it: as measured, else as its profile has it."""
    if speed and (speed.own is not None or speed.measured_only):
        return speed.own
    return expected
