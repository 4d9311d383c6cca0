"""Background lanes: the jobs on them, and what sharing a GPU costs the job in its foreground.

Every GPU has a foreground lane, which the policies give away, and a background lane, which takes one
low-priority job beside it (DeepPool, Park et al., MLSys 2022, section 4). Nothing of the foreground depends
on what is here: which jobs hold background lanes, and how fast the foreground jobs go alone and beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.speed import Speed, Speeds, own_speed
from hpcsched.core.model import Kind
from hpcsched.core.reasons import Reason

PACES = (1.0, 0.5, 0.25, 0.125)
"""Shares of its own speed that a background job may be told to keep to, one after the other."""


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
class Lanes:
    """The background lanes of a run.

    `holder` says which job has the lane of a GPU, `guests` how they are there. `speeds` are those of the
    foreground jobs that run, by job id. For the rest of the run: `costly` says by (foreground model,
    background model) why these do not share a GPU any more, `quarantined` by job id why it shares none.
    """

    holder: dict[int, int] = field(default_factory=dict)
    guests: dict[int, LaneGuest] = field(default_factory=dict)
    speeds: Speeds = field(default_factory=Speeds)
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
        return self.speeds.of(job)

    def hear(self, job: Job, step: int, at: float) -> Speed:
        """A foreground job's newest attempt had done `step` steps at `at`, whatever is under way with it."""
        return self.speeds.hear(job, step, at)

    def observe(self, job: Job, step: int, at: float) -> None:
        """It did so while nothing was under way with it: its speed can be taken from that."""
        self.hear(job, step, at).observe(step, at, shared=self.shared(job))

    def disturb(self, job_id: int | None, now: float) -> None:
        """It has changed who runs beside this foreground job, or how fast."""
        self.speeds.disturb(job_id, now)

    def gone(self, job_id: int) -> None:
        """The foreground job's attempt is over."""
        self.speeds.gone(job_id)


def slowdown(speed: Speed | None, expected: float | None) -> float | None:
    """The share of its own speed that its guests cost a foreground job; None while that is not known."""
    own, contended = own_speed(speed, expected), speed.contended if speed else None
    return None if own is None or contended is None else 1 - contended / own


def can_be_paced(job: Job) -> bool:
    """Whether its program knows how to go slower: one of ours does."""
    return job.spec.kind is not Kind.COMMAND
