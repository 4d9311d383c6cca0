"""Jobs that share GPUs, and what was measured of them: what they use, and how fast they go together.

One of them holds the GPU as any job does; the others ride. Each is a program by itself, which knows nothing
of the others. (CARMA places trainings so, by memory and utilisation.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.riders import Riders
from hpcsched.core.mechanisms.speed import Speeds
from hpcsched.core.model import JobSpec
from hpcsched.core.reasons import Reason
from hpcsched.core.shared_use import SharedUse

GROWTH = 1.1
"""How many times the memory that was measured of a model a job of it may come to use (chosen)."""

RESERVE = 0.95
"""Of a device's memory, what may be planned with (chosen): contexts and fragments take some."""

Mixture = tuple[str, ...]
"""The models of jobs that share a device, in order of their names."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a job uses of its GPU (or CPU slot): the most memory so far, in MiB, and the share of the time for
    which it had it busy, 0 to 1. None: not known."""

    memory_mib: float | None = None
    busy: float | None = None


@dataclass(slots=True)
class Shares(Riders):
    """Who shares which GPU, and what is known of that.

    By job id: `speeds` of the newest attempts that run, what those were measured to use (`use`), and the
    memory that they may use at most, where they did not ask for it (`limits`, MiB). By model: what one that
    was alone used (`models`; of memory the most that any had). By mixture of models: why these are to
    share no GPU any more (`costly`), and what all of them did together, in shares of their speeds alone,
    where that was worth it (`worth`). `before` is the same as `models`, of earlier runs.
    `came_s` is when the last one came to a GPU, `idle_s` since when a GPU has been free that no job waits
    for, `parted` who has left a GPU for one in this life of the run.
    """

    speeds: Speeds = field(default_factory=Speeds)
    use: dict[int, Use] = field(default_factory=dict)
    limits: dict[int, float] = field(default_factory=dict)
    models: dict[str, Use] = field(default_factory=dict)
    before: dict[str, Use] = field(default_factory=dict)
    costly: dict[Mixture, Reason] = field(default_factory=dict)
    worth: dict[Mixture, float] = field(default_factory=dict)
    came_s: dict[int, float] = field(default_factory=dict)
    idle_s: float | None = None
    parted: set[int] = field(default_factory=set)

    def measured(self, job: Job, use: Use) -> None:
        """The job's newest attempt uses this much; of memory the most that it ever had counts."""
        self.use[job.id] = _more(self.use.get(job.id, Use()), use)
        known = self.models.get(job.spec.model, Use())
        # What it gets of a core beside others is no more than what it wants, but better than nothing.
        busy = None if self.shared(job) and known.busy is not None else use.busy
        self.models[job.spec.model] = _more(known, Use(use.memory_mib, busy))

    def need_mib(self, spec: JobSpec, *, on_gpu: bool) -> float | None:
        """The memory that a job needs on its device: as it asks for, else as measured of its model; None: not
        known. On a CPU slot that is main memory."""
        asked = asked_mib(spec, on_gpu=on_gpu)
        measured = self.use_of(spec.model).memory_mib
        return asked if asked is not None or measured is None else GROWTH * measured

    def use_of(self, model: str) -> Use:
        """What a job of this model uses, as measured in this run, else in an earlier one."""
        now, before = self.models.get(model, Use()), self.before.get(model, Use())
        memory_mib = before.memory_mib if now.memory_mib is None else now.memory_mib
        return Use(memory_mib, before.busy if now.busy is None else now.busy)

    def know(self, uses: Iterable[SharedUse]) -> None:
        """Go by what earlier runs have seen where this one has not."""
        for use in uses:
            if len(use.models) == 1:
                self.before.setdefault(use.models[0], Use(use.memory_mib, use.busy))
            elif use.together is not None:
                self.worth.setdefault(use.models, use.together)

    def seen(self) -> Iterator[SharedUse]:
        """What this run has seen, for later ones."""
        for model, use in self.models.items():
            yield SharedUse(models=(model,), memory_mib=use.memory_mib, busy=use.busy)
        for models in sorted(self.worth.keys() | self.costly.keys()):
            yield SharedUse(models=models, together=None if models in self.costly else self.worth.get(models))

    def needs_more(self, model: str, memory_mib: float) -> None:
        """A job of this model has run out of memory with so much."""
        self.models[model] = _more(self.models.get(model, Use()), Use(memory_mib))

    def is_costly(self, jobs: Iterable[Job]) -> Reason | None:
        """Why these jobs are not to be together: they were, or some of them."""
        together = Counter(job.spec.model for job in jobs)
        found = (why for mixture, why in self.costly.items() if Counter(mixture) <= together)
        return next(found, None)

    def gone(self, job_id: int) -> None:
        """The job's attempt is over."""
        self.speeds.gone(job_id)
        self.use.pop(job_id, None)
        self.limits.pop(job_id, None)


def mixture(jobs: Iterable[Job]) -> Mixture:
    """The models of these jobs."""
    return tuple(sorted(job.spec.model for job in jobs))


def shares_a_gpu(spec: JobSpec) -> bool:
    """Whether a job is content with a part of a GPU."""
    return spec.needs is not None and spec.needs.share is not None


def asked_mib(spec: JobSpec, *, on_gpu: bool) -> float | None:
    """The memory that a job asks for on its device, in MiB."""
    return None if spec.needs is None else spec.needs.gpu_memory_mib if on_gpu else spec.needs.memory_mib


def share_of(spec: JobSpec) -> float:
    """The share of a GPU that a job asks for; 0: it asks for none, but takes what is left."""
    return (spec.needs.share if spec.needs else None) or 0.0


def _more(old: Use, new: Use) -> Use:
    if new.memory_mib is not None:
        old = replace(old, memory_mib=max(new.memory_mib, old.memory_mib or 0.0))
    return old if new.busy is None else replace(old, busy=new.busy)
