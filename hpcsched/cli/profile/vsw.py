"""`hpcsched profile vsw`: what a trainer's stream workers take on the devices here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import Number, needs_place, option, say
from hpcsched.cli.jobs.given_jobs import trainer_arguments
from hpcsched.cli.profile.packing import jobs_with_trainers
from hpcsched.cli.run.environments import environment_options, filled_in
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec, PythonEnvironment
    from hpcsched.devices.base import Devices
    from hpcsched.planning.vsw.profile import VswProfile
    from hpcsched.profiling.vsw import MeasuredRound, VswProbeSettings

_RANGE = re.compile(r"(?P<low>[1-9][0-9]{0,8})(-(?P<high>[1-9][0-9]{0,8}))?")

_COLUMNS = ("LOCAL-BATCH", "AT-ONCE", "READ(ms)", "FORWARD(ms)", "BACKWARD(ms)", "SAMPLES/S", "MEMORY(MiB)")


@click.command()
@click.argument("jobs", metavar="[JOBS.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--job", "name", metavar="NAME", help="Only this job of the job file.")
@click.option("--trainer", metavar="PKG.MOD:CLASS", help="Measure this Trainer class.")
@click.option(
    "--args", "arguments", metavar="JSON|K=V", multiple=True, help="What the trainer's build() gets."
)
@option("--devices", metavar="SPEC", default="auto", show_default=True)
@click.option(
    "--local-batch",
    metavar="N[-M]",
    help="Samples of a worker; default: the job's, else 1 to the trainer's global batch.",
)
@click.option(
    "--at-once",
    type=click.IntRange(1, 64),
    metavar="K",
    help="Most workers at once; default: as many as gain something.",
)
@click.option(
    "--seconds", type=Number(0, 3600), default=1.0, show_default=True, help="Time of each measurement."
)
@click.option("--timeout", type=Number(0, 86400, min_open=True), default=120.0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the costs here.")
@environment_options
def vsw(
    jobs: Path | None,
    name: str | None,
    trainer: str | None,
    arguments: tuple[str, ...],
    devices: str,
    local_batch: str | None,
    at_once: int | None,
    seconds: float,
    timeout: float,
    output: Path,
    environment: PythonEnvironment | None,
) -> None:
    """Measure a trainer's stream workers, for `hpcsched plan vsw`.

    On one device of each kind: local batches, each twice the one before, with 1, 2, 3... workers at once,
    until memory or the gain ends; then sums of gradients over all devices. The file is written after each
    measurement.
    """
    import socket

    from hpcsched.devices import open_devices
    from hpcsched.planning.vsw.options import WorkerOptions
    from hpcsched.profiling.vsw import VswProbeSettings

    if (jobs is None) == (trainer is None):
        raise click.UsageError("give a job file or --trainer PKG.MOD:CLASS")
    if name is not None and jobs is None:
        raise click.UsageError("--job names a job of a job file")
    if arguments and trainer is None:
        raise click.UsageError("--args goes with --trainer")
    job = _of_file(jobs, name) if jobs else _of_words(str(trainer), arguments)
    (job,) = filled_in([job], environment)
    said = WorkerOptions.parse(job.strategy) if job.strategy.get("kind") == "vsw" else None
    settings = VswProbeSettings(
        local_batch=_range(local_batch) if local_batch else said.local_batch if said else None,
        at_once=at_once,
        seconds=seconds,
        global_batch=said.global_batch if said else None,
        timeout_s=timeout,
    )
    needs_place("-o", output)
    opened = open_devices(devices, socket.gethostname())
    try:
        if opened.kind == "replay":
            accepted = "cuda or cpu:N: pretended GPUs compute nothing"
            raise ConfigError(where="--devices", got=devices, accepted=accepted)
        _measure(job, opened, settings, output)
    finally:
        opened.close()


# What is asked for


def _of_file(path: Path, name: str | None) -> JobSpec:
    """The job of this name, else the only one with a trainer, or with stream workers; raises ConfigError."""
    from hpcsched import jobfile

    found = jobs_with_trainers(jobfile.load(path, workdir=Path.cwd()).jobs, (name,) if name else (), path)
    if len(found) > 1:
        found = [job for job in found if job.strategy.get("kind") == "vsw"] or found
    if len(found) > 1:
        accepted = f"--job NAME of one: {', '.join(job.name for job in found[:8])}"
        raise ConfigError(where=str(path), got=f"{len(found)} jobs to measure", accepted=accepted)
    return found[0]


def _of_words(trainer: str, arguments: tuple[str, ...]) -> JobSpec:
    """The trainer as a job file would have it, with the file's checks."""
    from hpcsched import jobfile

    args = {key: value for text in arguments for key, value in trainer_arguments(text).items()}
    table = {"name": "profiled", "model": trainer.rpartition(":")[2], "trainer": trainer, "args": args}
    return jobfile.parse({"schema": 1, "job": [table]}, where="profile vsw", workdir=Path.cwd()).jobs[0]


def _range(text: str) -> tuple[int, int]:
    """The bounds in N or N-M; raises ConfigError."""
    found = _RANGE.fullmatch(text.strip())
    low, high = (int(found["low"]), int(found["high"] or found["low"])) if found else (1, 0)
    if low > high:
        raise ConfigError(where="--local-batch", got=repr(text), accepted="samples like 16, or 8-64")
    return low, high


# Measuring


def _measure(job: JobSpec, devices: Devices, settings: VswProbeSettings, output: Path) -> None:
    from hpcsched.launch.local import LocalLauncher
    from hpcsched.profiling.probing import ProbeFailed
    from hpcsched.profiling.vsw import Measurement, VswListener
    from hpcsched.store.files import write_atomically

    kept, shown = False, set[str]()

    def keep(profile: VswProfile) -> None:
        nonlocal kept
        write_atomically(output, (json.dumps(profile.to_table(), indent=1) + "\n").encode())
        kept = True

    def show(kind: str, row: MeasuredRound) -> None:
        if kind not in shown:
            shown.add(kind)
            click.echo(f"{job.model} on one {kind}")
            click.echo("  ".join(_COLUMNS if row.memory_mib is not None else _COLUMNS[:-1]))
        click.echo(_line(row))

    measurement = Measurement(
        job,
        devices=devices,
        launcher=LocalLauncher(cpus=devices.cpus, device_env=devices.environment),
        settings=settings,
        watch=VswListener(
            row=show,
            keep=keep,
            say=lambda text: say(f"note: {text}", err=True),
        ),
    )
    try:
        profile = measurement.run()
    except ProbeFailed:
        if kept:
            click.echo(f"note: what was measured before is in {output}", err=True)
        raise
    line = profile.costs.network.within
    if measurement.ranks > 1:
        each = f"{1e3 * line.latency_s:.3f} ms and {1e9 * line.per_byte_s:.3f} ms for each MB that travels"
        click.echo(f"all-reduce over {measurement.ranks} ranks: {each}")
    batch = profile.global_batch[1] if profile.global_batch else measurement.global_batch
    plan = f"`hpcsched plan vsw {output} --global-batch {batch}`"
    click.echo(f"kept in {output}; how many workers each device gets: {plan}", err=True)


# Showing


def _line(row: MeasuredRound) -> str:
    """Without memory on a CPU: what a process holds there says little of its model."""
    cells = [
        str(row.local_batch),
        str(row.at_once),
        f"{1e3 * row.read_s:.3f}",
        f"{1e3 * row.forward_s:.3f}",
        f"{1e3 * row.backward_s:.3f}",
        f"{row.samples_s:.1f}",
        *([] if row.memory_mib is None else [f"{row.memory_mib:.0f}"]),
    ]
    return "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, _COLUMNS, strict=False))
