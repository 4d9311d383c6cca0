"""`hpcsched simulate`: what jobs would take under some policies, by the same core and policies as `run`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import jobfile
from hpcsched.cli import policies
from hpcsched.cli.common import (
    Number,
    check_chart,
    database_path,
    find_run,
    hint_at_runs,
    json_option,
    naming_the_file,
    option,
    plural,
)
from hpcsched.errors import ConfigError, NoSuchRun
from hpcsched.store.rundir import RunDir

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec
    from hpcsched.core.profile import Profile
    from hpcsched.core.state import Life
    from hpcsched.planning.ps.training import Training
    from hpcsched.report.result import Result

MOST_LISTED = 50
"""Jobs of a trace or a run: with more of them the table of one policy's jobs is left out."""

MOST_DRAWN = 1000
"""Jobs: in a chart of more nobody could tell one from another."""

MOST_KEPT = 10_000
"""Jobs: of more, only the measures are kept."""

_PLAIN_HEIGHT = 24
"""Lines of a screen, where there is no terminal to ask."""


SHIPPED = "nearchus-a"
"""The models of trainings on CPU cores, if no others are given."""

_POLICIES = f"Policies to compare, with commas: {policies.ALL}; of a run: its own."


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What is to be simulated, where it comes from, and what has to be said about it.

    `policy` and `options` are what the source itself says of them. `cpus` are the cores of each host for
    jobs without GPUs, `trainings` how their models are trained. `was` is how a run went in reality,
    `over` whether that run has ended, `ids` its jobs' ids and models, which the simulation does not know.
    """

    where: str
    jobs: Sequence[JobSpec]
    profiles: Sequence[Profile]
    gpus: int
    nodes: int
    cpus: int = 0
    trainings: Mapping[str, Training] = field(default_factory=dict)
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    was: Result | None = None
    over: bool = True
    ids: Sequence[tuple[int, str]] = ()
    file: bool = False

    @property
    def place(self) -> str:
        there = {"GPU": self.gpus, "core": self.cpus}
        each = " and ".join(plural(number, what) for what, number in there.items() if number)
        return each if self.nodes == 1 else f"{self.nodes} hosts with {each} each"


@click.command()
@click.argument("jobs", metavar="[JOBS.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--trace", metavar="F.csv", type=click.Path(path_type=Path), help="A trace instead of JOBS.")
@click.option("--workload", metavar="W", default="", help="Which of several workloads in the trace.")
@click.option(
    "--run",
    "run_dir",
    metavar="[DIR]",
    is_flag=False,
    flag_value="",
    help="The jobs of a run instead of JOBS, beside how it went; it is only read.",
)
@option("--gpus", type=click.IntRange(min=0), help="GPUs per node (of a run: its own).")
@option("--nodes", type=click.IntRange(min=1), help="Nodes (1; of a run: its own).")
@option(
    "--cpus", type=click.IntRange(min=1), help="Cores per node for jobs on CPU cores (of a run: its own)."
)
@option(
    "--ps",
    metavar="F",
    multiple=True,
    help=f"Models of such jobs: files, or names of shipped ones ({SHIPPED}).",
)
@option("--profiles", metavar="F", multiple=True, help="Profile files, or names of shipped ones.")
@option("--policy", metavar="P,...", cls=policies.OnceWithCommas, help=_POLICIES)
@option("--policy-option", metavar="K=V", multiple=True, help="An option of the policy; can be repeated.")
@option("--device-type", metavar="T", default="", help="Device type whose profiles count.")
@option(
    "--background-share",
    metavar="X",
    type=Number(0, 1, min_open=True),
    default=0.5,
    help="Share of its own speed that a background job has beside another (0.5).",
)
@option(
    "--foreground-slowdown",
    metavar="X",
    type=Number(0, 1, max_open=True),
    default=0.03,
    help="Share of its speed that it costs that one (0.03).",
)
@click.option("--jobs", "list_jobs", is_flag=True, help="List all jobs of each policy.")
@option("--gantt", metavar="F.svg", type=click.Path(path_type=Path), help="Draw Gantt charts.")
@option("--database", metavar="F", help="SQLite file with profiles.")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    jobs: Path | None,
    trace: Path | None,
    workload: str,
    run_dir: str | None,
    gpus: int | None,
    nodes: int | None,
    cpus: int | None,
    ps: tuple[str, ...],
    profiles: tuple[str, ...],
    policy: str | None,
    policy_option: tuple[str, ...],
    device_type: str,
    background_share: float,
    foreground_slowdown: float,
    list_jobs: bool,
    gantt: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    """What jobs would take on NODES hosts with GPUS GPUs each, under one policy or several side by side.

    The jobs are those of JOBS.toml, of a CSV trace, or of a run, whether it is over or not; without DIR that
    is the run in --dir. With several policies an option goes to those that know it. Jobs on CPU cores have
    CPUS cores of each host.
    """
    given = {"JOBS.toml": jobs is not None, "--trace": trace is not None, "--run": run_dir is not None}
    if sum(given.values()) != 1:
        got = " and ".join(name for name, there in given.items() if there) or "no jobs"
        accepted = "one of JOBS.toml, --trace F.csv and --run [DIR]"
        raise ConfigError(where="simulate", got=got, accepted=accepted)
    if workload and trace is None:
        raise ConfigError(where="--workload", got=repr(workload), accepted="with --trace only")
    on_cores = _OnCores(cpus, ps)
    found = _Found(profiles, database, device_type)
    if run_dir is not None:
        explicit = ctx.get_parameter_source("profiles") is click.core.ParameterSource.COMMANDLINE
        known = profiles if explicit else ()
        case = _of_run(ctx, run_dir or None, gpus, nodes, on_cores, known, device_type)
    elif trace is not None:
        case = _of_trace(trace, workload, _needed(gpus), nodes or 1, found)
    else:
        assert jobs is not None
        case = _of_file(jobs, gpus, nodes or 1, on_cores, found)
    if gantt:
        _check_drawable(gantt, len(case.jobs))
    chosen = policies.for_simulation(ctx, policy, policy_option, (case.policy, case.options))
    with naming_the_file(jobs or trace):
        results = _simulated(case, chosen, (background_share, foreground_slowdown), keep=list_jobs)
    if gantt:
        from hpcsched.report.gantt import gantt_svg

        try:
            gantt_svg(results, gantt)
        except OSError as error:
            raise ConfigError(where="--gantt", got=f"{gantt}: {error.strerror}", accepted="a file") from error
    for note in case.notes:
        click.echo(f"hpcsched: {note}", err=True)
    if as_json:
        from hpcsched.report.result import to_json

        sys.stdout.buffer.write(to_json(results) + b"\n")
    else:
        _show(case, results, list_jobs=list_jobs)


@dataclass(frozen=True)
class _Found:
    """Where profiles are looked for."""

    files: tuple[str, ...]
    database: str | None
    device_type: str

    def of(self, models: set[str]) -> tuple[Profile, ...]:
        from hpcsched.cli.profiles_found import finder

        return finder(self.files, database_path(self.database))(models, self.device_type)


@dataclass(frozen=True)
class _OnCores:
    """What was said of jobs on CPU cores: cores of each host, and where the models of their trainings are."""

    cpus: int | None
    files: tuple[str, ...]

    def trainings(self) -> dict[str, Training]:
        """By model; of one that is in several files, as in the first of these."""
        from hpcsched.cli.plan_ps import trainings_in

        found: dict[str, Training] = {}
        for file in self.files:
            found = {**trainings_in(file)[1], **found}
        return found

    def check(self, jobs: Sequence[JobSpec], where: str, cpus: int | None) -> int:
        """The cores of each host; ConfigError for jobs that could not start on them, or have no steps."""
        from hpcsched.core.cores import WHOLE
        from hpcsched.policy.dtconfig import Rules

        for job in jobs:
            if job.cpus is None:
                continue
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


def _needed(gpus: int | None) -> int:
    if gpus is None:
        raise ConfigError(where="--gpus", got="missing", accepted="the number of GPUs per node")
    return gpus


def _of_file(path: Path, gpus: int | None, nodes: int, on_cores: _OnCores, found: _Found) -> _Case:
    file = jobfile.load(path, workdir=Path.cwd())
    policies.check_file(file, path)
    on_gpus = [job for job in file.jobs if job.cpus is None]
    gpus = _needed(gpus) if on_gpus else gpus or 0
    jobfile.check_fits(file.jobs, gpus=gpus, hosts=nodes, where=str(path))
    some = len(on_gpus) < len(file.jobs)
    return _Case(
        where=path.name,
        jobs=file.jobs,
        profiles=found.of({job.model for job in on_gpus}),
        gpus=gpus,
        nodes=nodes,
        cpus=on_cores.check(file.jobs, str(path), on_cores.cpus),
        trainings=replace(on_cores, files=on_cores.files or (SHIPPED,)).trainings() if some else {},
        policy=file.policy,
        options=file.policy_options,
        file=True,
    )


def _of_trace(path: Path, workload: str, gpus: int, nodes: int, found: _Found) -> _Case:
    from hpcsched.sim.workloads import read_trace

    read = read_trace(path, gpus=gpus, hosts=nodes, workload=workload)
    if not read.jobs:
        got = f"{plural(read.left_out, 'job')}, all for more GPUs than {nodes} x {gpus}"
        raise ConfigError(where=str(path), got=got, accepted="jobs that fit, or more --gpus and --nodes")
    models = {job.model for job in read.jobs} - {profile.model for profile in read.profiles}
    notes = []
    if read.left_out:
        notes.append(f"{plural(read.left_out, 'job')} left out: more GPUs asked for than there are")
    if read.rounded:
        notes.append(f"{plural(read.rounded, 'job')} rounded up to the same GPU count on each host")
    return _Case(
        where=path.name,
        jobs=read.jobs,
        profiles=(*read.profiles, *(found.of(models) if models else ())),
        gpus=gpus,
        nodes=nodes,
        notes=["; ".join(notes)] if notes else [],
    )


def _of_run(
    ctx: click.Context,
    dir_: str | None,
    gpus: int | None,
    nodes: int | None,
    on_cores: _OnCores,
    profiles: tuple[str, ...],
    device_type: str,
) -> _Case:
    """The case of a run directory, which is only read; a run that goes on is taken as it stands now."""
    from hpcsched.cli.results import result_of
    from hpcsched.core.events import AgentStarted
    from hpcsched.policy import make_policy
    from hpcsched.sim.whatif import past_of, place_of
    from hpcsched.store import journal
    from hpcsched.store.profiles import choose_all, load_profiles
    from hpcsched.store.replay import replay

    rundir = find_run(ctx, dir_)
    inside = RunDir(rundir.root / "hpcsched-run")
    if not rundir.journal.exists() and inside.journal.exists():
        rundir = inside  # named is the folder that `run` was called in
    with hint_at_runs(ctx, dir_):
        rundir.require()
    if not rundir.journal.exists():
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    machine = replay(rundir.journal, make_policy).machine
    if machine.policy is None:
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    starts = [event for event, _ in journal.read(rundir.journal) if isinstance(event, AgentStarted)]
    read = [profile for name in profiles for profile in load_profiles(name)]
    models = {job.spec.model for job in machine.jobs.values()}
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
    jobfile.check_fits(past.jobs, gpus=gpus, hosts=nodes, where="--run")
    cpus = on_cores.check(past.jobs, "--run", cpus)
    notes = []
    if left_out:
        notes.append(f"left out: {left_out}")
    if past.rigid:
        notes.append(f"{plural(len(past.rigid), 'job')} without steps or rate: taken as it went")
    notes = ["; ".join(notes)] if notes else []
    if not machine.finished:
        notes.append("the run is not over: `so far` ends now, the policies go to the end")
    record = rundir.read_record()
    return _Case(
        where=f"run {rundir.root}",
        jobs=past.jobs,
        profiles=past.profiles,
        gpus=gpus,
        nodes=nodes,
        cpus=cpus,
        trainings=trainings,
        policy=machine.policy.name,
        options=machine.policy_options,
        notes=notes,
        was=result_of(
            machine,
            label="as it was" if machine.finished else "so far",
            downtime_s=_downtime_s(machine.lives, record.devices if record else ""),
            keep_jobs=len(machine.jobs) <= MOST_KEPT,
        ),
        over=machine.finished,
        ids=[(job_id, machine.jobs[job_id].spec.model) for job_id in past.ids],
    )


def _downtime_s(lives: Sequence[Life], devices: str) -> float:
    """Real seconds between the lives of a run's agents; pretended devices may be faster than the clock."""
    _, at, speed = devices.rpartition("@")
    factor = float(speed) if at else 1.0
    gaps = [max(0.0, b.wall - a.wall - (b.at - a.at) / factor) for a, b in pairwise(lives)]
    return sum(gaps, 0.0)


def _simulated(
    case: _Case, chosen: Mapping[str, dict[str, Any]], sharing: tuple[float, float], *, keep: bool
) -> list[Result]:
    """How the case went, if it did, and how it would go under each policy.

    `sharing`: what background jobs have beside others, and what they cost these.
    """
    from hpcsched.cli.progress import Progress
    from hpcsched.cli.results import MOST_STORIES, Bounds, result_of
    from hpcsched.sim.engine import Simulation
    from hpcsched.sim.interference import Interference

    interference = Interference(background_share=sharing[0], foreground_slowdown=sharing[1])
    many = len(case.jobs) > MOST_KEPT
    results: list[Result] = []
    bounds = None
    for name, options in chosen.items():
        with Progress(name, len(case.jobs)) as progress:
            simulation = Simulation(
                case.jobs,
                case.profiles,
                gpus=case.gpus,
                nodes=case.nodes,
                cpus=case.cpus,
                trainings=case.trainings,
                policy=name,
                options=options,
                interference=interference,
                stories=len(case.jobs) <= MOST_STORIES,
                watch=progress.watch,
            )
            result = result_of(simulation.run(), bounds=bounds, keep_jobs=keep or not many)
        bounds = bounds or Bounds(result.lower_bound_s, result.mean_jct_bound_s)
        results.append(_as_in_the_run(result, case.ids) if case.ids else result)
    return results if case.was is None else [case.was, *results]


def _as_in_the_run(result: Result, ids: Sequence[tuple[int, str]]) -> Result:
    """The result with the jobs' ids and models of the run: those of the simulation count from 1."""
    from msgspec.structs import replace

    jobs = []
    for job in result.jobs:
        job_id, model = ids[job.id - 1]
        jobs.append(replace(job, id=job_id, model=model))
    return replace(result, jobs=tuple(jobs))


def _check_drawable(path: Path, jobs: int) -> None:
    if jobs > MOST_DRAWN:
        raise ConfigError(where="--gantt", got=f"{jobs} jobs", accepted=f"at most {MOST_DRAWN}")
    check_chart(path)


def _show(case: _Case, results: list[Result], *, list_jobs: bool) -> None:
    """One policy with its jobs, or several on one screen: a line per job is there where it fits."""
    from hpcsched.report.tables import comparison_table, headline, job_table, side_by_side

    size = shutil.get_terminal_size() if sys.stdout.isatty() else None
    width = size.columns if size else None
    if len(results) == 1 and (case.file or list_jobs or len(case.jobs) <= MOST_LISTED):
        measures = comparison_table(results, width=width)
        click.echo(f"{headline(results[0])}\n{job_table(results[0], width=width)}\n\n{measures}")
        return
    title = f"{case.where}: {plural(len(case.jobs), 'job')} on {case.place}"
    if case.was is not None and case.was.gpus != case.gpus * case.nodes:
        title += f"; {case.was.label} on {case.was.gpus}"
    base = 0 if case.over else min(1, len(results) - 1)
    measures = comparison_table(results, width=width, base=base)
    if list_jobs:
        for result in results:
            click.echo(f"{headline(result)}\n{job_table(result, width=width)}\n")
        click.echo(f"{title}\n{measures}")
        return
    above = [title, *(f"hpcsched: {note}" for note in case.notes)]
    taken = sum(-(-len(line) // (width or 80)) for line in above)
    room = (size.lines if size else _PLAIN_HEIGHT) - 1 - taken - measures.count("\n") - 1
    if len(case.jobs) <= room:  # a quick look first: tables of a million lines are not to be made
        jobs = side_by_side(results, width=width)
        if jobs.count("\n") + 2 <= room:
            click.echo(f"{title}\n{jobs}\n\n{measures}")
            return
    click.echo(f"{title} (--jobs lists them)\n{measures}")
