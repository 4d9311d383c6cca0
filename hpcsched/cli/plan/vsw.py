"""`hpcsched plan vsw`: how many workers each GPU runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import json_option, needs_numpy, plural, whole_number
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import worker_count

if TYPE_CHECKING:
    from hpcsched.planning.vsw.configure import ClusterGpu, Configuration, Scaled
    from hpcsched.planning.vsw.profile import VswProfile

SAMPLES = 1_000_000
"""Of the epoch that --scale shows, unless given."""


# No environment variables: HPCSCHED_GPUS, for one, would be of a job.
@click.command()
@click.argument("file", metavar="FILE")
@click.option("--global-batch", type=click.IntRange(1, 10**9), metavar="B", help="Samples of a step.")
@click.option(
    "--local-batch", metavar="N[,N...]", help="Samples of a worker; default: all that were measured."
)
@click.option(
    "--gpus", multiple=True, metavar="HOST=N:KIND", help="GPUs, instead of those in FILE; repeatable."
)
@click.option(
    "--accumulation",
    type=(click.IntRange(min=0), click.IntRange(min=0)),
    metavar="LEAST MOST",
    help="Rounds of workers before the last, on each GPU; default: 0 1000.",
)
@click.option("--scale", "by_count", is_flag=True, help="Show the time of an epoch by the number of GPUs.")
@click.option(
    "--samples", type=click.IntRange(min=1), metavar="N", help=f"Samples of that epoch; default: {SAMPLES:,}."
)
@json_option
@click.pass_context
def vsw(
    ctx: click.Context,
    file: str,
    global_batch: int | None,
    local_batch: str | None,
    gpus: tuple[str, ...],
    accumulation: tuple[int, int] | None,
    by_count: bool,
    samples: int | None,
    as_json: bool,
) -> None:
    """The workers of each GPU, how many of them at once, and the time of a step.

    FILE has costs of a model as JSON, is the name of shipped ones (resnet50-v100-p100), a folder in the
    format of JABAS's authors, or a table of options by group (see docs/vsw-plans.md). Exit code 1: no
    configuration is possible.
    """
    needs_numpy()
    from hpcsched.planning.vsw.configure import ACCUMULATION_BOUNDS, NoConfiguration
    from hpcsched.planning.vsw.solver import Infeasible

    options = {
        "--global-batch": global_batch,
        "--local-batch": local_batch,
        "--gpus": gpus or None,
        "--accumulation": accumulation,
        "--scale": by_count or None,
        "--samples": samples,
    }
    where, found = _read(file)
    try:
        if isinstance(found, dict) and "groups" in found:
            shown = _of_table(found, where, options)
        else:
            shown = _of_profile(found, where, options, accumulation or ACCUMULATION_BOUNDS)
    except (NoConfiguration, Infeasible) as error:
        if as_json:
            click.echo(json.dumps({"schema": 1, "feasible": False, "why": str(error)}))
        else:
            click.echo(f"hpcsched: no plan: {error}", err=True)
        ctx.exit(1)
    result, text = shown
    click.echo(json.dumps(result) if as_json else text)


# -- a table of options --------------------------------------------------------------------------------


def _of_table(table: dict[str, Any], where: str, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from hpcsched.planning.vsw.solver import solve
    from hpcsched.planning.vsw.whatif.option_table import OptionTable
    from hpcsched.profiling.draw import aligned

    for name, value in options.items():
        if value is not None:
            raise ConfigError(where=name, got="given with a table of options", accepted="only with costs")
    problem = OptionTable.parse(table, where=where)
    began = time.perf_counter()
    picked = solve(problem.groups, problem.workers)
    result = problem.result(picked, time.perf_counter() - began)
    rows = [("GROUP", "WORKERS", "STEP(ms)")]
    rows += [(row["name"], str(row["workers"]), f"{row['iter_s'] * 1e3:.3f}") for row in result["groups"]]
    used = plural(len(result["groups"]), "group")
    summary = f"{plural(problem.workers, 'worker')} on {used}: {result['iter_s'] * 1e3:.3f} ms a step"
    return result, f"{aligned(rows, left=(0,))}\n{summary}"


# -- costs ---------------------------------------------------------------------------------------------


def _of_profile(
    table: Any, where: str, options: dict[str, Any], accumulation: tuple[int, int]
) -> tuple[dict[str, Any], str]:
    from hpcsched.planning.vsw.configure import configure, scale
    from hpcsched.planning.vsw.profile import VswProfile

    profile = table if isinstance(table, VswProfile) else VswProfile.parse(table, where=where)
    gpus = [gpu for text in options["--gpus"] for gpu in _gpus(text, profile)] if options["--gpus"] else []
    gpus = gpus or list(profile.cluster)
    if not gpus:
        raise ConfigError(where="--gpus", got="missing", accepted="HOST=N:KIND, such as n1=4:V100")
    batch = options["--global-batch"] or (profile.global_batch or (None,))[0]
    if batch is None:
        raise ConfigError(where="--global-batch", got="missing", accepted="samples of a step")
    local_batches = _near(profile.local_batches, batch)
    if options["--local-batch"] is not None:
        local_batches = _sizes(options["--local-batch"])
    if accumulation[0] > accumulation[1]:
        got = f"{accumulation[0]} {accumulation[1]}"
        raise ConfigError(where="--accumulation", got=got, accepted="the least first")
    low, high = profile.global_batch or (batch, batch)
    outside = (
        "" if low <= batch <= high else f"\nnote: the profile is for global batches from {low} to {high}"
    )
    if not options["--scale"]:
        if options["--samples"]:
            raise ConfigError(where="--samples", got="given without --scale", accepted="only with --scale")
        began = time.perf_counter()
        made = configure(profile.costs, gpus, batch, local_batches=local_batches, accumulation=accumulation)
        result, text = _configuration(profile, gpus, made, batch, time.perf_counter() - began)
        return result, text + outside
    if accumulation[0]:
        got = f"{accumulation[0]} {accumulation[1]}"
        raise ConfigError(where="--accumulation", got=got, accepted="0 as the least with --scale")
    samples = options["--samples"] or SAMPLES
    began = time.perf_counter()
    scaled = scale(
        profile.costs,
        gpus,
        [(batch, float(samples))],
        local_batches=local_batches,
        accumulation=accumulation,
    )
    result, text = _scaled(gpus, scaled, batch, samples, time.perf_counter() - began)
    sizes = sorted({size * worker_count(batch, size, even=True) for size in local_batches})
    if sizes != [batch]:
        few = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        text += f"\nnote: steps of {few} samples, as whole workers make; {batch} was asked"
    return result, text + outside


def _near(local_batches: Sequence[int], batch: int) -> Sequence[int]:
    """The rows nearest to the batch, or within a tenth of it: workers are whole numbers."""
    misses = {size: abs(size * worker_count(batch, size, even=True) - batch) for size in local_batches}
    most = max(batch / 10, min(misses.values()))
    return [size for size in local_batches if misses[size] <= most]


def _configuration(
    profile: VswProfile, gpus: list[ClusterGpu], made: Configuration, asked: int, solve_s: float
) -> tuple[dict[str, Any], str]:
    from hpcsched.planning.vsw.costs import iteration_s
    from hpcsched.profiling.draw import aligned

    one_host = len({gpu.host for gpu in gpus}) == 1
    entries: list[dict[str, Any]] = []
    for gpu, share in zip(gpus, made.shares, strict=True):
        assert share is not None  # every GPU is used
        each_s = iteration_s(
            profile.costs,
            gpu.kind,
            local_batch=made.local_batch,
            workers=share.workers,
            at_once=share.at_once,
            gpus=len(gpus),
            one_host=one_host,
            sync=made.sync,
        )
        entries.append(
            {
                "host": gpu.host,
                "kind": gpu.kind,
                "workers": share.workers,
                "at_once": share.at_once,
                "accumulation": share.accumulation,
                "iter_s": each_s,
            }
        )
    workers = made.global_batch // made.local_batch
    result = {
        "schema": 1,
        "feasible": True,
        "model": profile.model,
        "global_batch": made.global_batch,
        "local_batch": made.local_batch,
        "workers": workers,
        "iter_s": made.iter_s,
        "samples_s": made.samples_s,
        "sync": made.sync,
        "gpus": entries,
        "solve_s": solve_s,
    }
    alike: dict[tuple[str, ...], int] = {}
    for each in entries:
        key = (
            each["host"],
            each["kind"],
            str(each["workers"]),
            str(each["at_once"]),
            str(each["accumulation"]),
            f"{each['iter_s'] * 1e3:.1f}",
        )
        alike[key] = alike.get(key, 0) + 1
    rows: list[tuple[str, ...]] = [("HOST", "GPUS", "WORKERS", "AT-ONCE", "ACCUMULATION", "STEP(ms)")]
    rows += [(host, f"{number} x {kind}", *rest) for (host, kind, *rest), number in alike.items()]
    lines = [
        aligned(rows, left=(0, 1)),
        f"{profile.model}: {plural(workers, 'worker')} of {made.local_batch} samples on "
        f"{plural(len(gpus), 'GPU')}: {made.iter_s * 1e3:.1f} ms a step, {made.samples_s:.1f} samples/s; "
        f"weights: {made.sync}",
    ]
    if made.global_batch != asked:
        lines.append(f"note: a global batch of {made.global_batch}, as whole workers make; {asked} was asked")
    return result, "\n".join(lines)


def _scaled(
    gpus: list[ClusterGpu], scaled: list[Scaled], batch: int, samples: int, solve_s: float
) -> tuple[dict[str, Any], str]:
    from hpcsched.profiling.draw import aligned

    result = {
        "schema": 1,
        "feasible": True,
        "global_batch": batch,
        "samples": samples,
        "sets": [{"count": each.count, "epoch_s": each.epoch_s, "gpus": list(each.gpus)} for each in scaled],
        "solve_s": solve_s,
    }
    best = min(scaled, key=lambda each: each.epoch_s)
    rows = [("GPUS", "EPOCH(s)", "SAMPLES/S", "BEST", "WHICH")]
    for each in scaled:
        rate = f"{samples / each.epoch_s:.1f}"
        mark = "*" if each is best else ""
        rows.append((str(each.count), f"{each.epoch_s:.1f}", rate, mark, _which(gpus, each)))
    summary = (
        f"an epoch of {samples:,} samples in steps of about {batch}: {best.epoch_s:.1f} s "
        f"on {plural(best.count, 'GPU')}"
    )
    return result, f"{aligned(rows, left=(4,))}\n{summary}"


def _which(gpus: list[ClusterGpu], scaled: Scaled) -> str:
    numbers: dict[tuple[str, str], int] = {}
    for i in scaled.gpus:
        key = (gpus[i].host, gpus[i].kind)
        numbers[key] = numbers.get(key, 0) + 1
    return ", ".join(f"{host}: {number} x {kind}" for (host, kind), number in numbers.items())


def _gpus(text: str, profile: VswProfile) -> list[ClusterGpu]:
    from hpcsched.planning.vsw.configure import ClusterGpu

    host, equals, rest = text.partition("=")
    digits, colon, name = rest.partition(":")
    number = whole_number(digits)
    if not (host and equals and colon and name) or number is None:
        raise ConfigError(where="--gpus", got=repr(text), accepted="HOST=N:KIND, such as n1=4:V100")
    if not 1 <= number <= 1024:
        raise ConfigError(where="--gpus", got=repr(text), accepted="1 to 1024 GPUs")
    kinds = profile.costs.gpus
    matching = [name] if name in kinds else [kind for kind in kinds if name.lower() in kind.lower()]
    if len(matching) != 1:
        accepted = f"one of {', '.join(kinds)}, or a part of one's name"
        raise ConfigError(where="--gpus", got=repr(text), accepted=accepted)
    return [ClusterGpu(kind=matching[0], host=host)] * number


def _sizes(text: str) -> list[int]:
    sizes = {whole_number(part) or 0 for part in text.split(",")}
    if 0 in sizes:
        raise ConfigError(where="--local-batch", got=repr(text), accepted="numbers, such as 32,64")
    return sorted(sizes)


# -- reading -------------------------------------------------------------------------------------------


def _read(file: str) -> tuple[str, Any]:
    """The name of a file for errors, and its content: JSON, or the profile of a folder."""
    path = Path(file)
    if path.is_dir():
        return file, _folder(path)
    if not path.exists() and path.name == file:
        from hpcsched.store.profiles import shipped

        known = shipped("vsw")
        if (name := path.name.removesuffix(".json")) not in known:
            accepted = f"a file, a folder, or the name of shipped costs ({', '.join(known)})"
            raise ConfigError(where=file, got="no such file", accepted=accepted)
        path = known[name]
    return str(path), _json(path)


def _folder(folder: Path) -> VswProfile:
    """The profile of a folder in the authors' format, wherever in it the files are."""
    from hpcsched.planning.vsw.whatif import jabas_files

    def texts(pattern: str) -> dict[str, str]:
        return {str(path): _text(path) for path in sorted(folder.rglob(pattern))}

    def tables(pattern: str) -> dict[str, Any]:
        return {str(path): _json(path) for path in sorted(folder.rglob(pattern))}

    return jabas_files.parse(
        jabas_files.Published(
            computation=tables("*_comp_profile.json"),
            memory=tables("max_memory_profile_info.json"),
            within=texts("*intra*.txt"),
            between=texts("*inter*.txt"),
            buckets=tables("*_bucket_size_profile.json"),
            cluster=tables("cluster_info.json"),
            job={str(path): _json(path) for path in [folder / "config.json"] if path.exists()},
        ),
        where=str(folder),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(where=str(path), got=str(error.strerror), accepted="a readable file") from error
    except ValueError as error:
        raise ConfigError(where=str(path), got="not UTF-8 text", accepted="text") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=str(path), got=f"not readable: {error}", accepted="JSON") from error
