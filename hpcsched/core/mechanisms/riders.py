"""Jobs that use the GPU of another one: they have attempts of their own, and hold none.

One job holds the GPU as any job does; the others ride. When the holder leaves, the one that has been there
longest holds the GPU from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.own_gpus import OwnGpus
from hpcsched.core.model import Attempt
from hpcsched.core.run import Run


@dataclass(slots=True)
class Riders:
    """Who rides where, those that came first in front.

    `inherited_s` says by job and attempt since when it has held the GPU that it began to ride on.
    """

    riders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gpu_of: dict[int, int] = field(default_factory=dict)
    inherited_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def ride(self, job_id: int, gpu: int) -> None:
        """Let a job ride on a GPU."""
        self.riders[gpu] = (*self.riders.get(gpu, ()), job_id)
        self.gpu_of[job_id] = gpu

    def get_off(self, job_id: int) -> None:
        """A job rides no more."""
        gpu = self.gpu_of.pop(job_id)
        left = tuple(rider for rider in self.riders.pop(gpu) if rider != job_id)
        if left:
            self.riders[gpu] = left

    def on(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ids of those that ride on these GPUs."""
        return tuple(rider for gpu in gpus for rider in self.riders.get(gpu, ())) if self.riders else ()

    def shared(self, job: Job) -> bool:
        """Whether a job's GPU is used by others too, one of them riding."""
        return job.id in self.gpu_of or bool(self.on(job.gpus))


class RiderLeases:
    """What riders hold; whoever has been there longest inherits the GPU when its holder leaves."""

    def __init__(self, riders: Riders, run: Run, own: OwnGpus) -> None:
        self._riders, self._run, self._own = riders, run, own

    def hold(self, job: Job, target: Target) -> None:
        """Have a job that starts ride."""
        self._riders.ride(job.id, *target.gpus)
        job.gpus = target.gpus
        self._run.touch(job.id)

    def release(self, job: Job) -> None:
        """Have a job ride no more."""
        self._riders.get_off(job.id)
        job.gpus = ()
        self._run.touch(job.id)

    def inherit(self, gpu: int) -> bool:
        """Whether somebody takes a GPU over from the job that gives it back."""
        riders = self._riders.on((gpu,))
        if not riders:
            return False
        heir = self._run.jobs[riders[0]]
        self._riders.get_off(heir.id)
        self._riders.inherited_s[heir.id, heir.attempt] = self._run.now
        self._own.take_over(heir, gpu)
        return True

    def held_from_s(self, job: Job, attempt: Attempt) -> float | None:
        """Since when an attempt that began as a rider has held the GPU; None: never."""
        return self._riders.inherited_s.get((job.id, attempt.number))
