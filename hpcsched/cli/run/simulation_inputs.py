"""Inputs of `hpcsched simulate`: the jobs of a file, of a trace or of a run, and their GPUs and cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import jobfile
from hpcsched.cli.common import database_path, find_run, hint_at_runs, plural
from hpcsched.cli.run import allocations, policies
from hpcsched.core.nouns import GPU
from hpcsched.errors import ConfigError, NoSuchRun
from hpcsched.sim.capacity import Capacity
from hpcsched.store import run_folders
from hpcsched.store.rundir import RunDir

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec
    from hpcsched.core.processes import Program
    from hpcsched.core.profile import Profile
    from hpcsched.core.run import Life
    from hpcsched.planning.ps.training import PsTraining
    from hpcsched.report.result import Result
    from hpcsched.sim.blocks import Block
    from hpcsched.store.profiles import FindProfiles

MOST_KEPT = 10_000
"""Jobs: of more, only the measures are kept."""

SHIPPED = "nearchus-a"
"""The models of trainings on CPU cores, if no others are given."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Jobs and the place to simulate them in, their source, and notes for the user.

    `parallel` are the programs that have said that they are.
    `policy` and `options` are what the source itself says of them. `cpus` are the cores of each host for
    jobs without GPUs, `trainings` how their models are trained. `was` is how a run went in reality,
    `over` whether that run has ended, `ids` its jobs' ids and models, which the simulation does not know.
    `blocks` are all hosts, if some of them come or go; `gpus` and `nodes` do not count then. `profiles` are
    those on GPUs of the type that comes first, `on_types` what was measured on the others.
    """

    where: str
    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    gpus: int
    nodes: int
    parallel: Sequence[Program] = ()
    cpus: int = 0
    trainings: Mapping[str, PsTraining] = field(default_factory=dict)
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    was: Result | None = None
    over: bool = True
    ids: Sequence[tuple[int, str]] = ()
    file: bool = False
    blocks: Sequence[Block] = ()
    on_types: Mapping[str, Sequence[Profile]] = field(default_factory=dict)

    @property
    def gpus_in_all(self) -> int:
        """The most GPUs at the same time."""
        return Capacity(self.blocks).gpus if self.blocks else self.gpus * self.nodes

    @property
    def place(self) -> str:
        """In words: `2 hosts with 4 GPUs and 64 cores each`."""
        if self.blocks:
            return (
                f"{plural(len(self.blocks), 'allocation')}, at most {plural(self.gpus_in_all, GPU)} at once"
            )
        there = {self.was.noun if self.was else GPU: self.gpus, "core": self.cpus}
        each = " and ".join(plural(number, what) for what, number in there.items() if number)
        return each if self.nodes == 1 else f"{self.nodes} hosts with {each} each"


@dataclass(frozen=True)
class ProfileSource:
    """The files and the database in which profiles are looked for."""

    files: tuple[str, ...]
    database: str | None
    device_type: str

    def of(self, models: set[str], blocks: Sequence[Block] = ()) -> tuple[Profile, ...]:
        """The profiles of some models on the GPUs that come first."""
        gpu_type = allocations.first_type(blocks) or self.device_type
        return self._finder()(models, gpu_type) if models else ()

    def on_types(self, models: set[str], blocks: Sequence[Block]) -> dict[str, tuple[Profile, ...]]:
        """What was measured of some models on GPUs of other types than that which comes first."""
        from hpcsched.store.profiles import measured_on

        types = dict.fromkeys(block.gpu_type for block in blocks if block.gpus)
        others = types.keys() - {"", allocations.first_type(blocks)}
        find = self._finder() if others else None
        return {each: measured_on(each, models, find) for each in types if find and each in others}

    def _finder(self) -> FindProfiles:
        from hpcsched.cli.profile.lookup import profile_finder

        return profile_finder(self.files, database_path(self.database))

    def parallel(self, models: set[str]) -> tuple[Program, ...]:
        """The programs of some models that have said that they are parallel."""
        from hpcsched.cli.profile.lookup import parallel_programs

        return parallel_programs(database_path(self.database), models)


def _not_measured(
    on_types: Mapping[str, Sequence[Profile]], models: set[str], blocks: Sequence[Block]
) -> list[str]:
    """A line for each of the other types of GPU on which some of the models were never measured."""
    own, notes = allocations.first_type(blocks) or "the first type", list[str]()
    for gpu_type, found in on_types.items():
        if missing := sorted(models - {profile.model for profile in found}):
            those = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
            notes.append(f"no profile of {those} on {gpu_type}: taken to be as fast there as on {own}")
    return notes


@dataclass(frozen=True)
class CpuOptions:
    """Options for jobs on CPU cores: cores of each host, and files with the models of their trainings."""

    cpus: int | None
    files: tuple[str, ...]

    def trainings(self) -> dict[str, PsTraining]:
        """Trainings by model; where several files have a model, the first counts."""
        from hpcsched.cli.plan.ps import trainings_in

        found: dict[str, PsTraining] = {}
        for file in self.files:
            found = {**trainings_in(file)[1], **found}
        return found

    def check(self, jobs: Sequence[JobSpec], where: str, cpus: int | None) -> int:
        """The cores of each host; ConfigError for jobs that could not start on them, or have no steps."""
        from hpcsched.core.mechanisms.cpu.cores import WHOLE
        from hpcsched.core.model import Kind
        from hpcsched.policy.cpu.configurations import Rules

        for job in jobs:
            if job.cpus is None and job.gpus_max == 0:
                key, got = f"job {job.name}.strategy", f"{job.strategy['kind']!r}"
                accepted = "one on GPUs, or ps: how fast others are is not known"
                raise ConfigError(where=where, key=key, got=got, accepted=accepted)
            if job.cpus is None:
                continue
            if job.kind is Kind.COMMAND:
                accepted = "trainings only: how long a program takes is not known"
                raise ConfigError(where=where, key=f"job {job.name}", got="a command", accepted=accepted)
            if cpus is None:
                accepted = f"cores of each node for jobs on CPU cores, such as {job.name}"
                raise ConfigError(where="--cpus", got="missing", accepted=accepted)
            if job.steps is None:
                key = f"job {job.name}.steps"
                raise ConfigError(where=where, key=key, got="missing", accepted="a positive number of steps")
            if (first := Rules.of(job.strategy).first().cores / WHOLE) > cpus:
                key, got = f"job {job.name}.strategy.cpus", f"{first:.4g} cores to start with"
                raise ConfigError(where=where, key=key, got=got, accepted=f"at most {cpus}: so many are here")
        return cpus or 0


def needed(gpus: int | None) -> int:
    """The number of GPUs; ConfigError if it was not said."""
    if gpus is None:
        raise ConfigError(where="--gpus-per-node", got="missing", accepted="the number of GPUs per node")
    return gpus


def of_file(
    path: Path,
    gpus: int | None,
    nodes: int,
    blocks: Sequence[Block],
    on_cores: CpuOptions,
    source: ProfileSource,
) -> Scenario:
    """The scenario of a job file."""
    file = jobfile.load(path, workdir=Path.cwd())
    policies.check_file(file, path)
    on_gpus = [job for job in file.jobs if job.cpus is None]
    models = {job.model for job in on_gpus}
    gpus = needed(gpus) if on_gpus and not blocks else gpus or 0
    _check_fits(file.jobs, gpus, nodes, blocks, str(path))
    some, on_types = len(on_gpus) < len(file.jobs), source.on_types(models, blocks)
    return Scenario(
        where=path.name,
        jobs=file.jobs,
        profiles=source.of(models, blocks),
        on_types=on_types,
        parallel=source.parallel(models),
        gpus=gpus,
        nodes=nodes,
        cpus=on_cores.check(file.jobs, str(path), on_cores.cpus),
        trainings=replace(on_cores, files=on_cores.files or (SHIPPED,)).trainings() if some else {},
        policy=file.policy,
        options=file.policy_options,
        notes=_not_measured(on_types, models, blocks),
        file=True,
        blocks=blocks,
    )


def _check_fits(jobs: Sequence[JobSpec], gpus: int, nodes: int, blocks: Sequence[Block], where: str) -> None:
    if blocks:
        allocations.check_fits(jobs, blocks, where)
    else:
        jobfile.check_fits(jobs, gpus=gpus, hosts=nodes, where=where)


def of_trace(
    path: Path,
    workload: str,
    gpus: int | None,
    nodes: int,
    blocks: Sequence[Block],
    source: ProfileSource,
) -> Scenario:
    """The scenario of a trace; jobs for more GPUs than there are are left out."""
    from hpcsched.sim.workloads import read_trace

    if blocks:
        gpus, nodes = allocations.largest_hosts(blocks)
    gpus = needed(gpus)
    read = read_trace(path, gpus=gpus, hosts=nodes, workload=workload)
    if not read.jobs:
        got = f"{plural(read.left_out, 'job')}, all for more GPUs than {nodes} x {gpus}"
        raise ConfigError(
            where=str(path), got=got, accepted="jobs that fit, or more --gpus-per-node and --nodes"
        )
    models = {job.model for job in read.jobs} - {profile.model for profile in read.profiles}
    on_types = source.on_types({job.model for job in read.jobs}, blocks)
    notes = list[str]()
    if read.left_out:
        notes.append(f"{plural(read.left_out, 'job')} left out: more GPUs asked for than there are")
    if read.rounded:
        notes.append(f"{plural(read.rounded, 'job')} rounded up to the same GPU count on each host")
    return Scenario(
        where=path.name,
        jobs=read.jobs,
        profiles=(*read.profiles, *source.of(models, blocks)),
        on_types=on_types,
        gpus=gpus,
        nodes=nodes,
        notes=[*(["; ".join(notes)] if notes else []), *_not_measured(on_types, models, blocks)],
        blocks=blocks,
    )


def of_run(
    ctx: click.Context,
    dir_: str | None,
    gpus: int | None,
    nodes: int | None,
    blocks: Sequence[Block],
    on_cores: CpuOptions,
    profiles: tuple[str, ...],
    device_type: str,
) -> Scenario:
    """The scenario of a run directory, which is only read; a run that goes on is taken as it stands now."""
    from hpcsched.cli.run.results import result_of
    from hpcsched.core.events import AgentStarted
    from hpcsched.policy import make_policy
    from hpcsched.sim.past_run import past_of, place_of
    from hpcsched.store.profiles import choose_all, load_profiles
    from hpcsched.store.replay import replay, valid_events

    rundir = find_run(ctx, dir_)
    inside = RunDir(run_folders.newest(rundir.root))
    if not rundir.journal.exists() and inside.journal.exists():
        rundir = inside  # named is the folder that `run` was called in
    with hint_at_runs(ctx, dir_):
        rundir.require()
    if not rundir.journal.exists():
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    machine = replay(rundir.journal, make_policy).machine
    if machine.decisions.policy is None:
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    starts = [event for event in valid_events(rundir.journal) if isinstance(event, AgentStarted)]
    read = [profile for name in profiles for profile in load_profiles(name)]
    models = {job.spec.model for job in machine.run.jobs.values()}
    trainings = on_cores.trainings()
    past = past_of(machine, choose_all(read, sorted(models), device_type), trainings)
    most = max(starts, key=lambda start: len(start.devices))
    if gpus is None:
        gpus = place_of(most.devices)[0] if most.devices or any(j.cpus is None for j in past.jobs) else 0
    nodes = nodes or len({device.host for device in most.devices} | {own.host for own in most.cores}) or 1
    cpus = on_cores.cpus or max((len(host.own) for host in most.cores), default=0) or None
    left_out = ", ".join(f"{len(ids)} {reason}" for reason, ids in past.left_out.items())
    if not past.jobs:
        accepted = "a run with jobs that completed, or whose steps and rates are known"
        got = f"no job to simulate ({left_out or 'there are none'})"
        raise ConfigError(where=str(rundir.root), got=got, accepted=accepted)
    _check_fits(past.jobs, gpus, nodes, blocks, "--run")
    cpus = on_cores.check(past.jobs, "--run", cpus)
    notes = []
    if left_out:
        notes.append(f"left out: {left_out}")
    if past.rigid:
        notes.append(f"{plural(len(past.rigid), 'job')} without steps or rate: taken as it went")
    notes = ["; ".join(notes)] if notes else []
    if not machine.run.finished:
        notes.append("the run is not over: `so far` ends now, the policies go to the end")
    record = rundir.read_record()
    return Scenario(
        where=f"run {rundir.root}",
        jobs=past.jobs,
        profiles=past.profiles,
        gpus=gpus,
        nodes=nodes,
        parallel=tuple(sorted(machine.estimates.parallel)),
        cpus=cpus,
        trainings=trainings,
        policy=machine.decisions.policy.name,
        options=machine.decisions.options,
        notes=notes,
        was=result_of(
            machine,
            label="as it was" if machine.run.finished else "so far",
            downtime_s=_downtime_s(machine.run.lives, record.devices if record else ""),
            keep_jobs=len(machine.run.jobs) <= MOST_KEPT,
        ),
        over=machine.run.finished,
        ids=[(job_id, machine.run.jobs[job_id].spec.model) for job_id in past.ids],
        blocks=blocks,
    )


def _downtime_s(lives: Sequence[Life], devices: str) -> float:
    """Real seconds between the lives of a run's agents; pretended devices may be faster than the clock."""
    _, at, speed = devices.rpartition("@")
    factor = float(speed) if at else 1.0
    gaps = [max(0.0, b.wall - a.wall - (b.at - a.at) / factor) for a, b in pairwise(lives)]
    return sum(gaps, 0.0)
