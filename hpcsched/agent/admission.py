"""Letting jobs into a run: what is asked for is checked, and the events that bring it in are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcsched import jobfile
from hpcsched.core import events as ev
from hpcsched.core.cores import WHOLE
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile, cost_at
from hpcsched.errors import ConfigError
from hpcsched.planning.costs import require_profiles
from hpcsched.policy.dtshapes import Rules
from hpcsched.strategies import checked


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What this run can take.

    `find_profiles` gives the profiles of these models for the devices at hand, `find_parallel` those of them
    whose programs have said in an earlier run that they are parallel. `stand_ins`: every job runs as
    a stand-in of its profile. `cores` is the most that a host has for jobs without GPUs. `memory_mib` is the
    memory of the largest GPU; None: not known.
    """

    machine: Machine
    find_profiles: Callable[[set[str]], tuple[Profile, ...]]
    stand_ins: bool
    find_parallel: Callable[[set[str]], Sequence[str]] = lambda models: ()
    hosts: int = 1
    cores: float = 0.0
    memory_mib: float | None = None

    def events(
        self, jobs: Sequence[JobSpec], *, at: float, gpus: int, where: str, cause: str = ""
    ) -> list[ev.Event]:
        """The events that bring jobs in, the submission last; raises ConfigError for jobs that cannot.

        The submission alone carries the cause: a journal torn before it does not hold the command.
        """
        machine = self.machine
        for job in jobs:
            _check(job, where)
        jobfile.check_names(jobs, where=where, known=machine.by_name.keys())
        jobfile.check_fits(jobs, gpus=gpus, hosts=self.hosts, where=where)
        for job in jobs:
            self._check_cores(job, where)
        new = {job.model for job in jobs} - {model for model, _ in machine.profiles}
        found = self.find_profiles(new) if new else ()
        parallel = self.parallel(jobs)
        for job in jobs:
            self._check_room(job, [*found, *machine.profiles.values()], where)
        stand_ins = [job for job in jobs if self.stand_ins or job.kind is Kind.REPLAY]
        require_profiles(stand_ins, [*machine.profiles.values(), *found])
        first_id = max(machine.jobs, default=0) + 1
        known = ev.ProfilesLoaded(at=at, profiles=found, parallel=parallel)
        events: list[ev.Event] = [known] if found or parallel else []
        return [*events, ev.JobsSubmitted(at=at, cause=cause, first_id=first_id, jobs=tuple(jobs))]

    def known_better(self) -> tuple[Profile, ...]:
        """Profiles to go by from now on for the jobs of earlier lives, whose devices may have been others."""
        models = {job.spec.model for job in self.machine.jobs.values() if not job.state.final}
        found = self.find_profiles(models) if models else ()
        return tuple(p for p in found if self.machine.profiles.get((p.model, p.nodes)) != p)

    def parallel(self, jobs: Iterable[JobSpec]) -> tuple[str, ...]:
        """The models of these commands that are known to be parallel, and new to the run."""
        models = {job.model for job in jobs if job.kind is Kind.COMMAND} - self.machine.parallel
        return tuple(self.find_parallel(models)) if models else ()

    def _check_cores(self, job: JobSpec, where: str) -> None:
        """Refuse a job that could never start on the cores that there are."""
        if job.cpus is None:
            return
        if self.stand_ins:
            got = f"{job.strategy['kind']} on pretended GPUs"
            raise ConfigError(where=where, key=f"job {job.name}.strategy", got=got, accepted="cpu:N or cuda")
        checked(job.strategy, where=where, key=f"job {job.name}.strategy", trainer=job.kind is Kind.TRAINER)
        need = Rules.of(job.strategy).first().cores / WHOLE
        if need > self.cores:
            got = f"{need:.4g} cores to start with"
            accepted = f"at most {self.cores:.4g}: no host here has more for jobs without GPUs (cpus_per_gpu)"
            raise ConfigError(where=where, key=f"job {job.name}.strategy.cpus", got=got, accepted=accepted)

    def _check_room(self, job: JobSpec, profiles: Sequence[Profile], where: str) -> None:
        """Refuse a background job that has no room in any GPU's memory, even alone."""
        tables = (profile.memory_mib for profile in profiles if profile.model == job.model)
        need, room = cost_at(next(tables, None), 1), self.memory_mib
        if job.background and need is not None and room is not None and need > room:
            got = f"{job.model} needs {need:.0f} MiB on one GPU"
            accepted = f"at most {room:.0f} MiB: no GPU here has more"
            raise ConfigError(where=where, key=f"job {job.name!r}.background", got=got, accepted=accepted)


def _gpus_make_sense(job: JobSpec) -> bool:
    if job.cpus is not None:
        return (job.gpus_min, job.gpus_max, job.nodes) == (0, 0, 1)
    return 1 <= job.gpus_min <= (job.gpus_max or job.gpus_min) and job.gpus_max != 0


def _check(job: JobSpec, where: str) -> None:
    """Refuse what no job file can say: a file in the inbox may come from anywhere."""
    checks = {
        "name": jobfile.NAME.fullmatch(job.name),
        "gpus": _gpus_make_sense(job),
        "steps": job.steps is None or job.steps >= 1,
        "command": job.kind is not Kind.COMMAND or job.command,
        "trainer": job.kind is not Kind.TRAINER or job.trainer,
        "background": not job.background or (job.gpus_min, job.gpus_max, job.nodes) == (1, 1, 1),
        "max_foreground_slowdown": 0 <= job.max_foreground_slowdown <= 1,
    }
    for key, good in checks.items():
        if not good:
            got = repr(getattr(job, key, (job.gpus_min, job.gpus_max)))
            raise ConfigError(where=where, key=f"job {job.name!r}.{key}", got=got, accepted="see the guide")
