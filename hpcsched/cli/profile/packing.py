"""`hpcsched profile pack`: what packing trainings on one device pays, measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Number, json_option, needs_place, option, plural, say, whole_number
from hpcsched.cli.run.environments import environment_options, filled_in
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec, PythonEnvironment
    from hpcsched.devices.base import Devices
    from hpcsched.profiling.packing import PackProbeSettings
    from hpcsched.profiling.packing_results import MeasuredPacks, Pair

MODES = ("auto", "loop", "stacked", "adapters", "streams", "graph")
"""Of the pack's engine, which is not imported here."""

MOST = 4096
"""Models in a pack: more is a slip of the pen."""


@click.command()
@click.argument("jobs", metavar="JOBS.toml", type=click.Path(path_type=Path))
@click.option("--job", "names", metavar="NAME", multiple=True, help="Only this job; can be repeated.")
@click.option("--counts", metavar="LIST", default="1,2,4,8", show_default=True, help="Models in a pack.")
@click.option("--pairs", is_flag=True, help="Also every two different models in a pack.")
@option("--devices", metavar="SPEC", default="auto", show_default=True, help="The first of them is used.")
@click.option(
    "--seconds",
    type=Number(0, 86400),
    default=2.0,
    show_default=True,
    help="Measuring time of a model alone, and of a pack.",
)
@click.option("--mode", type=click.Choice(MODES), default="auto", help="Mode of packs; default: the fastest.")
@click.option("--timeout", type=Number(0, 86400, min_open=True), default=120.0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the models' profiles here.")
@click.option("--costs", type=click.Path(path_type=Path), help="Write what `hpcsched plan pack` reads.")
@click.option("--dry-run", is_flag=True, help="Only say what would be launched.")
@option(
    "--database", type=click.Path(path_type=Path), help="The database file; default: in your data directory."
)
@json_option
@environment_options
def pack(
    jobs: Path,
    names: tuple[str, ...],
    counts: str,
    pairs: bool,
    devices: str,
    seconds: float,
    mode: str,
    timeout: float,
    output: Path | None,
    costs: Path | None,
    dry_run: bool,
    database: Path | None,
    as_json: bool,
    environment: PythonEnvironment | None,
) -> None:
    """Measure what training several models as one on a device gains, needs and costs.

    Each model of the trainer jobs in JOBS.toml is trained alone and packed with itself; the step times and
    memory peaks go into its profile.
    """
    import socket

    from hpcsched import jobfile
    from hpcsched.devices import open_devices
    from hpcsched.profiling.packing import PackProbeSettings
    from hpcsched.store.database import Database, default_path

    settings = PackProbeSettings(counts=_counts(counts), seconds=seconds, mode=mode, timeout_s=timeout)
    members = jobs_with_trainers(jobfile.load(jobs, workdir=Path.cwd()).jobs, names, jobs)
    members = filled_in(members, environment)
    models, notes = _by_model(members)
    two = _pairs(models, jobs) if pairs else []
    for place, file in (("-o", output), ("--costs", costs)):
        if file is not None:
            needs_place(place, file)
    opened = open_devices(devices, socket.gethostname())
    try:
        if opened.kind == "replay":
            accepted = "cuda or cpu:N: pretended GPUs compute nothing"
            raise ConfigError(where="--devices", got=devices, accepted=accepted)
        if dry_run:
            _say_plans(models, two, opened, settings, as_json)
            return
        for note in notes:
            say(f"note: {note}", err=True)
        # Opened before anything is measured: a place that cannot be written is found out at once.
        with Database(database or default_path()) as db:
            found, together = _measure(models, two, opened, settings, db, output)
            click.echo(f"kept in {db.path}{f' and in {output}' if output else ''}", err=True)
    finally:
        opened.close()
    if costs is not None:
        from hpcsched.store.files import write_atomically

        write_atomically(costs, (json.dumps(_problem(members, found, together), indent=1) + "\n").encode())
        click.echo(f"costs for `hpcsched plan pack` are in {costs}", err=True)
    if as_json:
        tables = [one.to_table() for one in found.values()]
        click.echo(json.dumps({"schema": 1, "packs": tables, "pairs": [p.to_table() for p in together]}))
    else:
        click.echo(
            "\n".join([*map(packs_table, found.values()), *([pairs_table(together)] if together else [])])
        )


# What is asked for


def _counts(text: str) -> tuple[int, ...]:
    """The counts in 1,2,4,8, ascending; raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    counts = {whole_number(part) or 0 for part in parts}
    if not all(1 <= count <= MOST for count in counts):
        raise ConfigError(where="--counts", got=repr(text), accepted=f"models from 1 to {MOST}, like 1,2,4,8")
    return tuple(sorted(counts))


def jobs_with_trainers(jobs: Sequence[JobSpec], names: Sequence[str], path: Path) -> list[JobSpec]:
    """The jobs of the given names, or all with trainers; raises ConfigError."""
    by_name = {job.name: job for job in jobs}
    for name in names:
        if name not in by_name:
            listed = ", ".join([*by_name][:8])
            raise ConfigError(where=str(path), got=f"no job {name!r}", accepted=listed)
        if by_name[name].trainer is None:
            accepted = "a job with a trainer, which hpcsched can train in a pack"
            raise ConfigError(
                where=str(path), key=f"job {name}", got=by_name[name].kind.value, accepted=accepted
            )
    chosen = [by_name[name] for name in dict.fromkeys(names)] or [
        job for job in jobs if job.trainer is not None
    ]
    if not chosen:
        accepted = 'at least one with trainer = "package.module:Name"'
        raise ConfigError(where=str(path), got="no job with a trainer", accepted=accepted)
    return chosen


def _by_model(jobs: Sequence[JobSpec]) -> tuple[list[JobSpec], list[str]]:
    """The first job of each model; and what to say where others of it are not the same."""
    first: dict[str, JobSpec] = {}
    notes = []
    for job in jobs:
        kept = first.setdefault(job.model, job)
        if (job.trainer, job.args) != (kept.trainer, kept.args):
            what = "other args" if job.trainer == kept.trainer else "another trainer"
            notes.append(
                f"job {job.name} has {what} than job {kept.name}, but the same model {job.model!r}:"
                f" they count as one, and {kept.name} is measured"
            )
    return [*first.values()], notes


def _pairs(jobs: Sequence[JobSpec], path: Path) -> list[tuple[JobSpec, JobSpec]]:
    """Every two of them; raises ConfigError."""
    if len(jobs) < 2:
        got, accepted = f"only the model {jobs[0].model!r}", "jobs with two different `model`s"
        raise ConfigError(where=f"--pairs: {path}", got=got, accepted=accepted)
    if len({job.workdir for job in jobs}) > 1:
        got, accepted = "jobs with different `workdir`s", "one for all: a pair is trained by one process"
        raise ConfigError(where=f"--pairs: {path}", got=got, accepted=accepted)
    if len({job.environment for job in jobs}) > 1:
        got, accepted = "jobs with different environments", "one for all: a pair is trained by one process"
        raise ConfigError(where=f"--pairs: {path}", got=got, accepted=accepted)
    return list(combinations(jobs, 2))


# Measuring


def _measure(
    jobs: Sequence[JobSpec],
    two: Sequence[tuple[JobSpec, JobSpec]],
    devices: Devices,
    settings: PackProbeSettings,
    db: Any,
    output: Path | None,
) -> tuple[dict[str, MeasuredPacks], list[Pair]]:
    """Each model is kept as soon as it is measured."""
    from hpcsched.launch.local import LocalLauncher
    from hpcsched.profiling.packing import measure_model, measure_pair
    from hpcsched.store.profiles import save_profiles

    how: dict[str, Any] = {
        "devices": devices,
        "launcher": LocalLauncher(cpus=devices.cpus, device_env=devices.environment),
        "settings": settings,
        "say": lambda text: say(text, err=True),
    }
    found, profiles = {}, []
    for job in jobs:
        found[job.model] = measure_model(job, **how)
        profiles.append(found[job.model].profile(db.profiles(job.model)))
        db.record_profile(profiles[-1], db.samples(profiles[-1]))
        if output is not None:
            save_profiles(output, profiles)
    pairs = [measure_pair(one, other, **how) for one, other in two]
    return found, [pair for pair in pairs if pair is not None]


def _problem(
    members: Sequence[JobSpec], found: Mapping[str, MeasuredPacks], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """The jobs as `hpcsched plan pack` reads them, with what was measured."""
    rows: list[dict[str, Any]] = []
    for job in members:
        plain = {key: value for key, value in job.args.items() if not isinstance(value, (dict, list))}
        row = {"name": job.name, "model": job.model, "batch": found[job.model].batch, "config": plain}
        rows.append(row if job.steps is None else {**row, "steps": job.steps})
    factors = [
        {
            "models": list(pair.models),
            "batches": list(pair.batches),
            "factor": pair.factor(*(found[model] for model in pair.models)),
        }
        for pair in pairs
    ]
    costs = [one.costs.to_table() for one in found.values()]
    return {"schema": 1, "members": rows, "costs": costs, "pairs": factors}


def _say_plans(
    jobs: Sequence[JobSpec],
    two: Sequence[tuple[JobSpec, JobSpec]],
    devices: Devices,
    settings: PackProbeSettings,
    as_json: bool,
) -> None:
    """Print the launches that would be made."""
    from hpcsched.profiling.packing import plan_probe
    from hpcsched.profiling.trial import argv_of

    trials: list[dict[str, Any]] = []
    for chosen in [*((job,) for job in jobs), *two]:
        packs = [[0] * count for count in settings.counts] if len(chosen) == 1 else [[0, 1]]
        place = Path("<scratch>")
        plan = plan_probe(chosen, packs, devices=devices, settings=settings, folder=place, result=place)
        about = {
            "models": [job.model for job in chosen],
            "device": devices.kind,
            "packs": list(map(len, packs)),
        }
        least_s = settings.seconds * (1.25 * len(chosen) + len(packs))
        trials.append({**about, "argv": argv_of(plan), "cwd": str(plan.cwd), "seconds_at_least": least_s})
    if as_json:
        click.echo(json.dumps({"schema": 1, "trials": trials}))
    for trial in [] if as_json else trials:
        sizes = ", ".join(map(str, trial["packs"]))
        click.echo(
            f"{' and '.join(trial['models'])} on one {trial['device']}: alone, then packs of {sizes},"
            f" at least {trial['seconds_at_least']:g} s: {shlex.join(trial['argv'])}"
        )


# Showing


def packs_table(found: MeasuredPacks) -> str:
    """A line for each number of models, and what coming and going costs."""
    from hpcsched.profiling.draw import aligned

    rows = [("MODELS", "STEP(ms)", "IMPV", "MODE", "MEMORY(MiB)", "JOIN(s)")]
    for point in found.points:
        rows.append(
            (
                str(point.models),
                f"{1e3 * point.step_s:.3f}",
                f"{found.impv(point):.0%}",
                point.mode,
                _mib(point.memory_mib),
                f"{point.join_s:.2f}",
            )
        )
    head = f"{found.model} on one {found.device}, batch {found.batch}"
    lines = [
        f"{head}: {1e3 * found.separate_s:.3f} ms a step alone",
        aligned(_known(rows), left=(3,)).rstrip("\n"),
    ]
    known = (("load", found.load_s), ("join", found.join_s), ("leave", found.leave_s))
    costs = [f"{seconds:.3f} s to {what}" for what, seconds in known if seconds is not None]
    if costs:
        lines.append(f"a member takes {', '.join(costs)}")
    if found.unstackable:
        lines.append(f"cannot be computed as one: {found.unstackable}")
    if found.full:
        lines.append(f"{plural(found.full, 'model')} or more do not fit into memory")
    return "\n".join(lines) + "\n"


def pairs_table(pairs: Sequence[Pair]) -> str:
    """A line for each pair; times are for a sample of both."""
    from hpcsched.profiling.draw import aligned

    rows = [("PAIR", "BATCHES", "SEPARATE(us)", "PACKED(us)", "IMPV", "MODE", "MEMORY(MiB)")]
    for pair in pairs:
        rows.append(
            (
                " + ".join(pair.models),
                ", ".join(map(str, pair.batches)),
                f"{1e6 * pair.separate_s:.3f}",
                f"{1e6 * pair.packed_s:.3f}",
                f"{pair.impv:.0%}",
                pair.mode,
                _mib(pair.memory_mib),
            )
        )
    return "a sample of both:\n" + aligned(_known(rows), left=(0, 5)).rstrip("\n")


def _known(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Without the columns in which nothing is known."""
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    return list(zip(*columns, strict=True))


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
