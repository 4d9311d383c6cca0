"""`hpcsched plan burst`: the GPUs of each layer of a model."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Renamed, check_chart, database_path, json_option, needs_numpy, option
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.planning.burst.plan import BurstPlan

_NETWORK = "Needed with a layer profile."


@click.command()
@click.argument("file", metavar="FILE")
@option("--gpus", type=click.IntRange(min=1), metavar="N", help="Number of GPUs.")
@option("--global-batch", type=click.IntRange(min=1), metavar="B", help="Samples of a step, over all GPUs.")
@option(
    "--amplification", type=float, metavar="L", help="Limit of a layer's GPU-seconds, relative to one GPU."
)
@option("--bandwidth", type=float, metavar="GB/s", help=f"Network bandwidth of a GPU. {_NETWORK}")
@option("--latency", type=float, metavar="US", help=f"Network latency in microseconds. {_NETWORK}")
@option("--overlap", is_flag=True, help="Overlap gradient sums with the backward pass.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="F", help="Write the plan as JSON.")
@click.option(
    "--gantt",
    cls=Renamed,
    older="--svg",
    type=click.Path(path_type=Path),
    metavar="F.svg",
    help="Draw the plan as a Gantt chart.",
)
@option("--database", metavar="F", help="SQLite file with layer profiles; default: in your data directory.")
@json_option
@click.pass_context
def burst(
    ctx: click.Context,
    file: str,
    gpus: int | None,
    global_batch: int | None,
    amplification: float | None,
    bandwidth: float | None,
    latency: float | None,
    overlap: bool,
    output: Path | None,
    gantt: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    """The GPUs of each layer of a model, by burst parallelism.

    FILE is a layer profile (from `hpcsched profile layers -o`), the name of a model that was measured by
    that, or of a shipped one (vgg16-a100, wrn101-2-a100, inception-v3-a100), or a table of times by GPU
    count. Exit code 1: the limit allows no plan.
    """
    if gantt is not None:
        check_chart(gantt)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(where="--output", got=f"no folder {output.parent}", accepted="a file in a folder")
    where, table = _read(file, database_path(database))
    needs_numpy()
    from hpcsched.planning.burst import planner

    options: dict[str, Any] = {
        "--gpus": gpus,
        "--global-batch": global_batch,
        "--amplification": amplification,
        "--bandwidth": bandwidth,
        "--latency": latency,
    }
    if amplification is not None and not 1 <= amplification < inf:
        raise ConfigError(
            where="--amplification", got=f"{amplification:g}", accepted="a number of at least 1"
        )
    try:
        if _is_tabulated(table):
            made = _of_table(table, where, options, overlap=overlap)
        else:
            made = _of_profile(table, where, options, overlap=overlap)
    except planner.NoBurstPlan as error:
        if as_json:
            click.echo(json.dumps({"schema": 1, "feasible": False, "why": str(error)}))
        else:
            click.echo(f"hpcsched: no plan: {error}", err=True)
        ctx.exit(1)
    from hpcsched.report.burst import plan_svg

    if output is not None:
        from hpcsched.store.files import write_atomically

        write_atomically(output, (json.dumps(made.to_table(), indent=1) + "\n").encode())
    if gantt is not None:
        plan_svg(made, gantt)
    click.echo(json.dumps(made.to_table()) if as_json else plan_table(made))


def plan_table(plan: BurstPlan) -> str:
    """One line a layer in the order in which they run, and what the whole comes to."""
    from hpcsched.profiling.draw import aligned
    from hpcsched.report.burst import ranks_text, summary

    rows: list[tuple[str, ...]] = [("LAYER", "GPUS", "RANKS", "START(ms)", "TIME(ms)", "AMPLIFICATION")]
    for layer in plan.layers:
        own_us = layer.end_us - layer.start_us
        times = (f"{us / 1e3:.3f}" for us in (layer.start_us, own_us))
        counts = (str(len(layer.ranks)), ranks_text(layer.ranks))
        rows.append((layer.name, *counts, *times, f"{layer.amplification:.2f}"))
    return "\n".join([aligned(rows, left=(0, 2)), summary(plan), *(f"note: {note}" for note in plan.notes)])


def _read(file: str, database: Path) -> tuple[str, Any]:
    """The name of a file for errors, and its content."""
    path = Path(file)
    if not path.exists() and path.name == file:
        from hpcsched.store.profiles import shipped

        known = shipped("layers")
        if (stored := _stored(file, database)) is not None:
            return f"the stored profile {file}", stored
        if (name := path.name.removesuffix(".json")) not in known:
            accepted = (
                "a file, a model measured by `hpcsched profile layers`, or the name of a shipped layer "
                f"profile ({', '.join(known)})"
            )
            raise ConfigError(where=file, got="no such file", accepted=accepted)
        path = known[name]
    try:
        return str(path), json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(where=file, got=str(error.strerror), accepted="a readable JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=file, got=f"not readable: {error}", accepted="JSON") from error


def _stored(model: str, path: Path) -> dict[str, Any] | None:
    """The newest layer profile of this model in the database."""
    if not path.exists():
        return None
    from hpcsched.store.database import Database

    with Database(path) as database:
        return next(iter(database.layers(model)), None)


def _is_tabulated(table: Any) -> bool:
    layers = table.get("layers") if isinstance(table, dict) else None
    return isinstance(layers, list) and any(isinstance(row, dict) and "time_us" in row for row in layers)


def _of_table(table: dict[str, Any], where: str, options: dict[str, Any], *, overlap: bool) -> BurstPlan:
    from hpcsched.planning.burst import planner
    from hpcsched.planning.burst.table import parse

    for name in ("--bandwidth", "--latency"):
        if options[name] is not None:
            got = "given with a table of times"
            raise ConfigError(where=name, got=got, accepted="only with a layer profile")
    if overlap:
        got = "given with a table of times"
        raise ConfigError(where="--overlap", got=got, accepted="only with a layer profile")
    keys = {"--gpus": "gpus", "--global-batch": "global_batch", "--amplification": "amplification_limit"}
    given = {key: options[name] for name, key in keys.items() if options[name] is not None}
    return planner.solve(parse({**table, **given}, where=where))


def _of_profile(table: Any, where: str, options: dict[str, Any], *, overlap: bool) -> BurstPlan:
    from hpcsched.planning.burst import planner
    from hpcsched.planning.burst.costs import Interconnect
    from hpcsched.planning.burst.graph import LayerProfile

    profile = LayerProfile.parse(table, where=where)
    wanted = {
        "--gpus": "how many GPUs there are",
        "--global-batch": "samples in a step",
        "--bandwidth": "GB/s that a GPU sends, such as 300",
        "--latency": "microseconds that a message takes at least, such as 20",
    }
    for name, accepted in wanted.items():
        if options[name] is None:
            raise ConfigError(where=name, got="missing", accepted=accepted)
    for name, least in (("--bandwidth", 1e-9), ("--latency", 0.0)):
        if not least <= options[name] <= 1e9:
            raise ConfigError(where=name, got=f"{options[name]:g}", accepted=wanted[name])
    limit = options["--amplification"]
    network = Interconnect(
        bandwidth_bytes_s=options["--bandwidth"] * 1e9, latency_s=options["--latency"] / 1e6
    )
    return planner.plan(
        profile,
        gpus=options["--gpus"],
        global_batch=options["--global-batch"],
        network=network,
        amplification=inf if limit is None else limit,
        overlap=overlap,
        uneven=options["--gpus"] <= planner.MOST_UNEVEN,
    )
