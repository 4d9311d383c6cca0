"""`hpcsched profile run`: measure how training programs scale."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Number, say, whole_number
from hpcsched.cli.profile.stored import (
    database_option,
    json_profiles_option,
    print_profiles,
    profile_database,
)
from hpcsched.cli.run.environments import environment_options, filled_in
from hpcsched.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec, PythonEnvironment
    from hpcsched.devices.base import Devices
    from hpcsched.profiling.sweep import MeasuredProfile
    from hpcsched.profiling.trial import TrialSettings

_COMMAND = "hpcsched.profile.command"


class _WithCommand(click.Command):
    """A command whose words after `--` are a program to run, whatever they look like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(
            ctx.command_path, "[OPTIONS] {JOBS.toml | --trainer PKG.MOD:CLASS | -- COMMAND...}"
        )


@click.command(cls=_WithCommand)
@click.argument("jobs", required=False, type=click.Path(path_type=Path))
@click.option("--job", metavar="NAME", help="Only this job of the job file.")
@click.option("--trainer", metavar="PKG.MOD:CLASS", help="Measure this Trainer class.")
@click.option("--args", "arguments", metavar="JSON", help="An object that the trainer's build() gets.")
@click.option(
    "--processes",
    default="auto",
    help="Processes of a command on each host: auto, per-gpu (one for each GPU), or a number.",
)
@click.option(
    "--progress-pattern",
    metavar="PATTERN",
    help="Find the steps of a command in what it prints, as in 'step (\\d+)'; default: as the job file"
    " says, or as its framework is known to print them.",
)
@click.option("--model", help="The profile's key; default: the job's model, or the program's name.")
@click.option("--devices", metavar="SPEC", default="auto", envvar="HPCSCHED_DEVICES", show_default=True)
@click.option(
    "--gpus", metavar="LIST", help="GPU counts to measure, in this order, e.g. 1,2,4 or 1-4; default: all."
)
@click.option("--seconds", type=Number(0, 86400, min_open=True), default=5.0, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option(
    "--warmup", type=Number(0, 86400), default=2.0, show_default=True, help="Seconds before the first window."
)
@click.option("--timeout", type=Number(0, 86400, min_open=True), default=120.0, show_default=True)
@click.option("--costs/--no-costs", default=True, help="Also measure what suspending and resuming costs.")
@click.option(
    "--global-batch", type=click.IntRange(1), help="Samples of a step; default: as the program tells."
)
@click.option("--software", default="", help="Part of the profile's key, e.g. the version of a framework.")
@click.option("--dry-run", is_flag=True, help="Only say what would be launched.")
@database_option
@json_profiles_option
@click.pass_context
@environment_options
def run(
    ctx: click.Context,
    jobs: Path | None,
    job: str | None,
    trainer: str | None,
    arguments: str | None,
    processes: str,
    progress_pattern: str | None,
    model: str | None,
    devices: str,
    gpus: str | None,
    seconds: float,
    repeats: int,
    warmup: float,
    timeout: float,
    costs: bool,
    global_batch: int | None,
    software: str,
    dry_run: bool,
    database: Path | None,
    as_json: bool,
    environment: PythonEnvironment | None,
) -> None:
    """Measure throughput on 1..N devices, start, suspend and resume times, and keep them.

    The program reports its progress by lines like {"step": 1, "t": 0.5} on the descriptor in
    HPCSCHED_PROGRESS_FD (trainers do), or it is seen in what it prints or writes. Each count
    is launched once: after the warm-up, --repeats windows of --seconds each; then, if the program can be
    suspended, it is, and it is resumed.
    """
    import socket

    from hpcsched.devices import open_devices
    from hpcsched.profiling.sweep import counts_for
    from hpcsched.profiling.trial import TrialSettings

    command: tuple[str, ...] = ctx.meta.get(_COMMAND, ())
    if sum([jobs is not None, trainer is not None, bool(command)]) != 1:
        raise click.UsageError("give one of: a job file, --trainer PKG.MOD:CLASS, or -- COMMAND...")
    if job is not None and jobs is None:
        raise click.UsageError("--job names a job of a job file")
    if arguments is not None and trainer is None:
        raise click.UsageError("--args goes with --trainer")
    specs = _from_file(jobs, job) if jobs else [_from_words(trainer, arguments, command, processes)]
    if model is not None and len(specs) > 1:
        raise click.UsageError(f"--model names one profile, {jobs} has {len(specs)} models: add --job NAME")
    specs = filled_in((replace(one, model=model or one.model) for one in specs), environment)
    if progress_pattern is not None:
        specs = [_followed(one, progress_pattern) for one in specs]
    settings = TrialSettings(
        seconds=seconds, repeats=repeats, warmup_s=warmup, timeout_s=timeout, costs=costs
    )
    opened = open_devices(devices, socket.gethostname())
    try:
        asked = _counts(gpus) if gpus else ()
        plans = [(s, counts_for(s, opened, asked)) for s in specs]
        if dry_run:
            _say_plans(plans, opened, settings, as_json)
            return
        # Opened before anything is measured: a place that cannot be written is found out at once.
        with profile_database(database) as db:
            found = []
            for one, counts in plans:
                result = measured(one, counts, opened, settings, global_batch, software)
                db.record_profile(result.profile, result.samples)
                found.append(result.profile)
    finally:
        opened.close()
    print_profiles(found, as_json)


def _from_file(path: Path, name: str | None) -> list[JobSpec]:
    """The jobs to measure: the named one, or the first of each model."""
    from hpcsched import jobfile

    jobs = jobfile.load(path, workdir=Path.cwd()).jobs
    if name is None:
        return list({job.model: job for job in reversed(jobs)}.values())[::-1]
    found = [job for job in jobs if job.name == name]
    if not found:
        raise ConfigError(
            where=str(path), got=f"no job {name!r}", accepted=", ".join(job.name for job in jobs[:8])
        )
    return found


def _from_words(
    trainer: str | None, arguments: str | None, command: Sequence[str], processes: str
) -> JobSpec:
    """A job as a job file would have it, with the file's checks."""
    from hpcsched import jobfile

    try:
        args = json.loads(arguments) if arguments else {}
    except ValueError as error:
        raise ConfigError(
            where="--args", got=f"not JSON: {error}", accepted='an object like {"lr": 0.1}'
        ) from error
    if not isinstance(args, dict):
        raise ConfigError(where="--args", got=arguments or "", accepted='an object like {"lr": 0.1}')
    what: dict[str, Any] = {"trainer": trainer, "args": args} if trainer else {"command": list(command)}
    if command:
        count = whole_number(processes)
        what["processes"] = processes if count is None else count
    name = trainer.rpartition(":")[2] if trainer else _program_name(list(command))
    table = {"schema": 1, "job": [{"name": "profiled", "model": name, **what}]}
    return jobfile.parse(table, where="profile run", workdir=Path.cwd()).jobs[0]


def _followed(spec: JobSpec, pattern: str) -> JobSpec:
    """A job whose steps are found in its output by this pattern. Raises ConfigError."""
    from hpcsched.core.model import Kind
    from hpcsched.dialects import step_pattern

    where = "--progress-pattern"
    if spec.kind is not Kind.COMMAND:
        raise ConfigError(where=where, got=f"{spec.name} with a trainer", accepted="a job with a command")
    try:
        step_pattern(pattern)
    except BadInput as error:
        raise ConfigError(where=where, got=repr(pattern), accepted=str(error)) from error
    return replace(spec, progress_pattern=pattern)


def _program_name(command: Sequence[str]) -> str:
    """The script of `python script.py`, the module of `python -m module`, else the program."""
    word = command[0]
    if command[1:2] == ["-m"] and len(command) > 2:
        word = command[2]
    elif len(command) > 1 and command[1].endswith((".py", ".sh")):
        word = command[1]
    return Path(word).name.removesuffix(".py").removesuffix(".sh") or "program"


def _counts(text: str) -> tuple[int, ...]:
    """Counts of "1,2,4" or "1-4,8"; raises ConfigError."""
    counts: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            low, high = 1, 0
        if not 1 <= low <= high < 100_000:
            raise ConfigError(where="--gpus", got=repr(text), accepted="counts like 1,2,4 or 1-4")
        counts.extend(range(low, high + 1))
    return tuple(counts)


def measured(
    spec: JobSpec,
    counts: tuple[int, ...],
    devices: Devices,
    settings: TrialSettings,
    global_batch: int | None,
    software: str,
) -> MeasuredProfile:
    """Measure a job on these numbers of devices, with a bar on a terminal; see `sweep`."""
    from hpcsched.launch.local import LocalLauncher
    from hpcsched.profiling.sweep import sweep

    with _progress(spec.model, counts) as watch:
        return sweep(
            spec,
            counts=counts,
            devices=devices,
            launcher=LocalLauncher(cpus=devices.cpus, device_env=devices.environment),
            settings=settings,
            global_batch=global_batch,
            software=software,
            watch=watch,
            say=lambda text: say(text, err=True),
        )


@contextmanager
def _progress(model: str, counts: Sequence[int]) -> Iterator[Callable[[int, float], None]]:
    """A bar over all counts on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda gpus, share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(model, total=len(counts))

        def watch(gpus: int, share: float) -> None:
            of = f"{model} on {gpus} device{'s' * (gpus > 1)}"
            bar.update(task, completed=counts.index(gpus) + share, description=of)

        yield watch


def _say_plans(
    plans: Sequence[tuple[JobSpec, tuple[int, ...]]], devices: Devices, settings: TrialSettings, as_json: bool
) -> None:
    """Print the launches that `profile run` would make."""
    from hpcsched.core.processes import Because, shape_of
    from hpcsched.profiling.trial import argv_of, plan_of

    least_s = settings.warmup_s + settings.repeats * settings.seconds
    trials: list[dict[str, Any]] = []
    for spec, counts in plans:
        if shape_of(spec, None, ()).because is Because.UNKNOWN:
            counts = counts[:1]  # the others if its program says that it is parallel
        for count in counts:
            plan = plan_of(spec, devices, devices.inventory()[:count], Path("<scratch>"), attempt=1)
            ranks = count if plan.per_rank else plan.processes
            about = {"model": spec.model, "device": devices.kind, "gpus": count, "processes": ranks}
            trials.append({**about, "argv": argv_of(plan), "cwd": str(plan.cwd), "seconds_at_least": least_s})
    if as_json:
        click.echo(json.dumps({"schema": 1, "trials": trials}))
    for trial in [] if as_json else trials:
        click.echo(
            f"{trial['model']} on {trial['gpus']} x {trial['device']}, at least {least_s:g} s,"
            f" {trial['processes']} process(es): {shlex.join(trial['argv'])}"
        )
