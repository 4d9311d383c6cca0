"""`hpcsched plan pack`: which trainings share a device."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched.cli.common import Number, json_option, plural
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.planning.packing.planner import PackPlan
    from hpcsched.planning.packing.problem import PackProblem

STRATEGIES = ("run", "auto", "off", "measured", "knn", "batch", "random")
"""Named here too, such that --help need not import the planner."""


# No environment variables: HPCSCHED_DEVICES, for one, means the devices of a run, such as cpu:2.
@click.command()
@click.argument("file", metavar="FILE")
@click.option("--devices", type=click.IntRange(1, 2**16), metavar="D", help="Number of devices.")
@click.option(
    "--memory", type=Number(min=0, min_open=True, max=1e15), metavar="MIB", help="Memory of each device."
)
@click.option("--most", type=click.IntRange(min=1), metavar="N", help="Most members of a pack; default: 16.")
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="run",
    help="Strategy; default: what `run` does; auto: the best of all.",
)
@click.option("--threshold", type=Number(min=0), metavar="X", help="Largest distance of neighbours (knn).")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of random choices.")
@json_option
@click.pass_context
def pack(
    ctx: click.Context,
    file: str,
    devices: int | None,
    memory: float | None,
    most: int | None,
    strategy: str,
    threshold: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """The trainings that share a device, and the gain.

    FILE is JSON: members with model and batch, and measurements of them (see docs/packing-plans.md).
    Exit code 1: a member fits on no device.
    """
    from hpcsched.planning.packing import planner
    from hpcsched.planning.packing.problem import PackProblem

    problem = replace(PackProblem.parse(_read(file), where=file), seed=seed)
    if devices is not None:
        problem = replace(problem, devices=devices)
    if threshold is not None:
        problem = replace(problem, threshold=threshold)
    if memory is not None:
        problem = replace(problem, limits=replace(problem.limits, capacity_mib=memory))
    if most is not None:
        problem = replace(problem, limits=replace(problem.limits, most=most))
    try:
        made = planner.plan(problem, strategy)
    except planner.NoPackPlan as error:
        if as_json:
            click.echo(json.dumps({"schema": 1, "feasible": False, "why": str(error)}))
        else:
            click.echo(f"hpcsched: no plan: {error}", err=True)
        ctx.exit(1)
    click.echo(json.dumps(made.to_table()) if as_json else plan_table(made, problem))


def plan_table(plan: PackPlan, problem: PackProblem) -> str:
    """One line a pack, by device and in the order in which they run, and what the whole gains."""
    from hpcsched.profiling.draw import aligned

    rows = [("PACK", "DEVICE", "STEP(ms)", "TIME(s)", "MEMORY(MiB)", "GAIN", "MEMBERS")]
    for number, each in enumerate(plan.packs):
        several = len(each.members) > 1
        rows.append(
            (
                str(number),
                str(each.device),
                f"{each.step_s * 1e3:.3f}",
                f"{each.time_s:.3f}",
                "-" if each.memory_mib is None else f"{each.memory_mib:.0f}",
                f"{each.gain:.0%}" if several else "-",
                ", ".join(member.name for member in each.members),
            )
        )
    notes = list(plan.notes)
    if any(member.steps is None for member in problem.members):
        notes.insert(0, f"members without steps train for an epoch of {problem.speeds.epoch} samples")
    return "\n".join([aligned(rows, left=(6,)), _summary(plan), *(f"note: {note}" for note in notes)])


def _summary(plan: PackPlan) -> str:
    own_s = plan.time_s or inf  # factors of pairs may come to nothing
    others = [
        f"{name} {time_s:.3f} s ({time_s / own_s:.2f}x)"
        for name, time_s in plan.strategies.items()
        if name not in (plan.strategy, "off")
    ]
    faster = plan.separate_s / own_s
    line = f"{plan.strategy}: {plan.time_s:.3f} s on {plural(plan.devices, 'device')}, "
    line += f"{plan.separate_s:.3f} s one by one: {faster:.2f}x"
    return f"{line}; {', '.join(others)}" if others else line


def _read(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(where=file, got=str(error.strerror), accepted="a readable JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=file, got=f"not readable: {error}", accepted="JSON") from error
