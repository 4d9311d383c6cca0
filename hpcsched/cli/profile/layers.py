"""`hpcsched profile layers`: measure the layers of a model, and look at what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Number, json_option, option, say, whole_number
from hpcsched.cli.jobs.given_jobs import trainer_arguments
from hpcsched.cli.run.environments import environment_options, filled_in
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec, PythonEnvironment
    from hpcsched.planning.burst.graph import LayerProfile

_BUILT_IN = (
    *("vgg16", "wrn101-2", "inception-v3", "resnet50", "transformer"),
    *("mobilenet-v2", "densenet121"),
)
_NETWORK = "hpcsched.examples.models:Network"


@click.command()
@click.argument("target", required=False)
@click.option(
    "--args", "arguments", metavar="JSON|K=V", multiple=True, help="What the trainer's build() gets."
)
@click.option(
    "--batches",
    metavar="LIST",
    help="Samples on the device, e.g. 1,2,4; default: 1,2,4,... to the global batch.",
)
@click.option("--model", metavar="NAME", help="Name of the profile; default: the target's.")
@option("--devices", metavar="SPEC", default="auto", show_default=True, help="The first of them is used.")
@click.option(
    "--seconds",
    type=Number(0, 3600),
    default=0.05,
    show_default=True,
    help="Measuring time of a layer at a batch size.",
)
@click.option("--timeout", type=Number(0, 86400, min_open=True), default=120.0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the layer profile here.")
@click.option("--list", "list_", is_flag=True, help="Only list the layer profiles in the database.")
@click.option("--stored", is_flag=True, help="Only show TARGET, a layer profile in the database.")
@option(
    "--database", type=click.Path(path_type=Path), help="The database file; default: in your data directory."
)
@json_option
@environment_options
def layers(
    target: str | None,
    arguments: tuple[str, ...],
    batches: str | None,
    model: str | None,
    devices: str,
    seconds: float,
    timeout: float,
    output: Path | None,
    list_: bool,
    stored: bool,
    database: Path | None,
    as_json: bool,
    environment: PythonEnvironment | None,
) -> None:
    """Time each layer of a model on one device, forward and backward, for several batches.

    TARGET is a Trainer, as package.module:Name, or one of vgg16, wrn101-2, inception-v3, resnet50,
    transformer, mobilenet-v2 and densenet121. The layer profile is kept in the database.
    """
    from hpcsched.store.database import Database, default_path

    if (target is None) != list_:
        raise click.UsageError("give a TARGET to measure, or --list")
    if not (list_ or stored):
        job, counts = _job(str(target), arguments, model), _batches(batches)
    # Opened before anything is measured: a place that cannot be written is found out at once.
    with Database(database or default_path()) as db:
        if list_:
            _list(db.layers(), as_json)
            return
        if stored:
            found = _stored(db.layers(target), str(target), str(db.path))
        else:
            (job,) = filled_in([job], environment)
            found = _measure(job, counts, devices, seconds, timeout)
            db.record_layers(found.to_table())
    if output is not None:
        from hpcsched.store.files import write_atomically

        write_atomically(output, (json.dumps(found.to_table(), indent=1) + "\n").encode())
    _show(found, as_json)
    where = [f"in {database or default_path()} as {found.model} on {found.device}"] * (not stored)
    if where := [*where, *([f"in {output}"] if output else [])]:
        click.echo(f"kept {' and '.join(where)}", err=True)


def _job(target: str, arguments: Sequence[str], model: str | None) -> JobSpec:
    """The trainer as a job file would have it, with the file's checks."""
    from hpcsched import jobfile

    args = {key: value for text in arguments for key, value in trainer_arguments(text).items()}
    name = target.rpartition(":")[2]
    if target in _BUILT_IN:
        target, args = _NETWORK, {"network": target, **args}
    elif ":" not in target:
        accepted = f"package.module:Name of a Trainer, or {', '.join(_BUILT_IN)}"
        raise ConfigError(where="TARGET", got=repr(target), accepted=accepted)
    table = {"name": "profiled", "model": model or name, "trainer": target, "args": args}
    return jobfile.parse({"schema": 1, "job": [table]}, where="profile layers", workdir=Path.cwd()).jobs[0]


def _batches(text: str | None) -> tuple[int, ...]:
    """The batch sizes in 1,2,4; empty where nothing is given."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    batches = {whole_number(part) or 0 for part in parts}
    if not all(0 < batch <= 2**20 for batch in batches):
        raise ConfigError(where="--batches", got=repr(text), accepted="samples like 1,2,4,8")
    return tuple(sorted(batches))


def _measure(
    job: JobSpec, batches: tuple[int, ...], spec: str, seconds: float, timeout: float
) -> LayerProfile:
    import socket

    from hpcsched.devices import open_devices
    from hpcsched.launch.local import LocalLauncher
    from hpcsched.profiling.layers import LayerProbeSettings, probe

    devices = open_devices(spec, socket.gethostname())
    try:
        if devices.kind == "replay":
            accepted = "cuda or cpu:N: pretended GPUs compute nothing"
            raise ConfigError(where="--devices", got=spec, accepted=accepted)
        with _progress(job.model) as watch:
            return probe(
                job,
                devices=devices,
                launcher=LocalLauncher(cpus=devices.cpus, device_env=devices.environment),
                settings=LayerProbeSettings(batches=batches, seconds=seconds, timeout_s=timeout),
                watch=watch,
                say=lambda text: say(text, err=True),
            )
    finally:
        devices.close()


@contextmanager
def _progress(model: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda share, what: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(model, total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=f"{model}, {what}")


def _stored(found: Sequence[dict[str, Any]], model: str, where: str) -> LayerProfile:
    from hpcsched.planning.burst.graph import LayerProfile

    if not found:
        accepted = "one of `hpcsched profile layers --list`"
        raise ConfigError(where=where, got=f"no layer profile of {model!r}", accepted=accepted)
    return LayerProfile.parse(found[0], where=f"{where}: {model}")


def _list(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    from hpcsched.planning.burst.graph import LayerProfile
    from hpcsched.profiling.layers_draw import layers_list

    if as_json:
        click.echo(json.dumps({"schema": 1, "layer_profiles": list(found)}))
    else:
        click.echo(layers_list([LayerProfile.parse(one, where="database") for one in found]), nl=False)


def _show(found: LayerProfile, as_json: bool) -> None:
    from hpcsched.profiling.layers_draw import layers_table

    click.echo(json.dumps(found.to_table()) if as_json else layers_table(found), nl=as_json)
