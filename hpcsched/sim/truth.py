"""The true speeds and costs of jobs in a simulation: what the machine believes may differ, and it learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core.actions import Resize
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile, cost_at
from hpcsched.errors import ConfigError
from hpcsched.planning.jobs.costs import course_of, require_profiles
from hpcsched.planning.jobs.course import Course
from hpcsched.planning.ps.training import PsTraining


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """The cost of a resize in place: seconds to start the ranks that join, beside the training, and seconds
    for which the training stands still."""

    built_s: float
    stand_s: float


class Truth:
    """The truth of all jobs of a machine.

    Args:
        profiles: of all jobs, on GPUs of the run's own type; None: as the machine believes. On others jobs go
            by the profiles that were loaded.
        trainings: how the models behave that are trained on CPU cores, by name.
    """

    def __init__(
        self, machine: Machine, profiles: Iterable[Profile] | None, trainings: Mapping[str, PsTraining] | None
    ) -> None:
        self._machine = machine
        self._profiles = None if profiles is None else {(p.model, p.nodes): p for p in profiles}
        self._trainings = dict(trainings or {})

    @property
    def teaches(self) -> bool:
        """Whether the machine can learn from it."""
        return self._profiles is not None

    def check(self, jobs: Sequence[JobSpec], known: Iterable[Profile]) -> None:
        """Raises ConfigError for a job of which it is not known how it runs, or which has no step count.

        `known`: the profiles that the machine has, or will have.
        """
        require_profiles(
            [spec for spec in jobs if spec.cpus is None],
            known if self._profiles is None else self._profiles.values(),
        )
        for spec in jobs:
            if spec.cpus is None:
                continue
            where, models = f"job {spec.name}", ", ".join(self._trainings) or "none"
            if spec.kind is Kind.COMMAND:
                raise ConfigError(where=where, got="a command on CPU cores", accepted="trainings")
            if spec.steps is None:
                raise ConfigError(
                    where=where, key="steps", got="missing", accepted="a positive number of steps"
                )
            if spec.model not in self._trainings:
                raise ConfigError(
                    where=where, key="model", got=f"{spec.model!r} on CPU cores", accepted=models
                )

    def profile(self, job: Job) -> Profile:
        """The true profile of a job on GPUs."""
        estimates = self._machine.estimates
        if self._profiles is None:
            profile = estimates.profile(job)
        elif self._machine.ledger.type_of(job.gpus):
            profile = estimates.loaded(job)
        else:
            model = job.spec.model
            profile = self._profiles.get((model, job.spec.nodes)) or self._profiles.get((model, 1))
        assert profile, f"job {job.id} was checked to have one"
        return profile

    def course(self, job: Job, gpus: int, seats: tuple[Seat, ...]) -> Course:
        """The course of a job from its last known step, on so many GPUs of each host, or with these seats."""
        assert job.spec.steps is not None, f"job {job.id} was checked to have them"
        steps = max(job.spec.steps, job.step)
        if seats:
            return self._training(job).course(seats, from_step=job.step, steps=steps)
        return course_of(self.profile(job), gpus, from_step=job.step, steps=steps, first=job.attempt == 1)

    def resizes_in_place(self, job: Job) -> bool:
        """Whether it can be changed while it runs. Stand-ins cannot: they know their own course only."""
        if job.spec.cpus is not None:
            return True
        profile = self.profile(job)
        known = profile.grow_s is not None or profile.shrink_s is not None
        return known and job.spec.kind is not Kind.REPLAY

    def change(self, job: Job, action: Resize) -> ResizeCost:
        """The cost of this resize of a job."""
        if action.seats:
            training = self._training(job)
            joins = len(action.keep) < len(action.seats)
            return ResizeCost(training.build_s if joins else 0.0, training.change_s)
        gpus = len(action.gpus) // job.spec.nodes
        profile, old, new = self.profile(job), set(job.current.gpus), set(action.gpus)
        built_s = (profile.launch_s(gpus, first=False) or 0.0) if new - old else 0.0
        stand_s = cost_at(profile.grow_s if len(new) >= len(old) else profile.shrink_s, gpus)
        if stand_s is None:
            stand_s = self._machine.decisions.view().stand_s(job, job.width, gpus)
        return ResizeCost(built_s, stand_s)

    def device_use(self, job: Job) -> dict[str, Any]:
        """What a job that shares a GPU is measured to use of it, as the fields of `DeviceUseMeasured`; none
        for others, and where its profile says nothing of that."""
        if not shares_a_gpu(job.spec):
            return {}
        profile = self.profile(job)
        use = {"memory_mib": cost_at(profile.memory_mib, 1), "busy": cost_at(profile.busy, 1)}
        return {key: value for key, value in use.items() if value is not None}

    def stable_s(self, job: Job) -> float:
        """After so long on the same seats the measurements of a job on CPU cores are steady."""
        return self._training(job).stable_s

    def measured(self, job: Job, seats: tuple[Seat, ...]) -> dict[str, Any]:
        """The measurements at that time, as the fields of `UsageMeasured`."""
        return self._training(job).measured(seats)

    def _training(self, job: Job) -> PsTraining:
        return self._trainings[job.spec.model]
