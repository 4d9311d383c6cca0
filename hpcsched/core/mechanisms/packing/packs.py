"""Jobs that are trained as one on a GPU (pack, sections 2.2 and 5.2), as far as the core is concerned.

One of them holds the GPU as any job does; the others ride: they have attempts of their own and no lease. When
the holder leaves, the one that has been there longest holds the GPU from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcsched.core.jobs import Job
from hpcsched.core.model import Attempt, Device, JobSpec, Kind, Role
from hpcsched.core.reasons import Reason


@dataclass(slots=True)
class Packs:
    """Who rides where, those that came first in front; `alone` says by job id who is not packed any more.

    `inherited_s` says by job and attempt since when it has held the GPU that it began to ride on. `idle_s` is
    since when a GPU has been free that no job waits for, `parted` who has left a pack for one in this life of
    the run.
    """

    riders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gpu_of: dict[int, int] = field(default_factory=dict)
    alone: dict[int, Reason] = field(default_factory=dict)
    inherited_s: dict[tuple[int, int], float] = field(default_factory=dict)
    idle_s: float | None = None
    parted: set[int] = field(default_factory=set)

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

    def held_from_s(self, job_id: int, attempt: Attempt) -> float | None:
        """Since when an attempt has counted as the one that uses its devices; None for one that only rode."""
        return (
            self.inherited_s.get((job_id, attempt.number)) if attempt.role is Role.PACKED else attempt.start_s
        )

    def on(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """The ids of those that ride on these GPUs."""
        return tuple(rider for gpu in gpus for rider in self.riders.get(gpu, ())) if self.riders else ()

    def shared(self, job: Job) -> bool:
        """Whether a job's GPU is used by others of its pack too."""
        return job.id in self.gpu_of or bool(self.on(job.gpus))


def is_packed(spec: JobSpec) -> bool:
    """Whether a job may be trained as one with others."""
    return bool(spec.strategy["kind"] == "packed")


def can_ride(spec: JobSpec, device: Device) -> bool:
    """Whether a job can ride on such a device: stand-ins of a real run have processes of their own only."""
    if device.kind == "simulated":
        return is_packed(spec)
    return is_packed(spec) and spec.kind is Kind.TRAINER and device.kind != "replay"


def key_of(spec: JobSpec) -> tuple[object, ...]:
    """What jobs have in common that may be in one process: their program, its interpreter and surroundings,
    and what their users say belongs together."""

    def sorted_items(table: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(table.items()))

    strategy = spec.strategy
    where = spec.environment, spec.workdir, sorted_items(spec.env)
    modules = spec.needs.modules if spec.needs else ()
    return spec.kind, spec.trainer, *where, modules, strategy.get("pack"), strategy.get("mode", "auto")
