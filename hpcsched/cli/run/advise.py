"""`hpcsched advise`: what to ask for, by simulation and by what the batch system says of waiting."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import durations, jobfile
from hpcsched.cli.common import Number, check_chart, json_option, naming_the_file, option, say, say_json
from hpcsched.cli.run import policies
from hpcsched.cli.run.advice_inputs import (
    NUMBERS,
    TIMES,
    asked_for,
    batch_options,
    doubt_of,
    partitions_of,
    system_of,
    waits_of,
    without_room,
    work_of,
)
from hpcsched.cli.run.simulation_inputs import SHIPPED
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.allocations.advice import Advice, Row, Separate
    from hpcsched.allocations.outcomes import Work
    from hpcsched.allocations.waits import Waits
    from hpcsched.batch.queue import Partition, Queue

_SYSTEMS = click.Choice(["auto", "slurm", "lsf", "none"])
_WAIT = "Minutes that each allocation waits, by your own estimate: wins over all else."


@click.command()
@click.argument("jobs", metavar="JOBS.toml", type=click.Path(path_type=Path))
@click.option("--gpus-per-node", "--gpus", "gpus", metavar="N-M", help=f"GPUs on each node: {NUMBERS}.")
@click.option("--nodes", "-N", metavar="N-M", help="Nodes, likewise.")
@click.option("--time", "-t", "times", metavar="T,...", help=f"Time limits: {TIMES}.")
@click.option("--partition", "-p", metavar="P,...", help="Partitions (all that are up and have GPUs).")
@option("--account", "-A", metavar="A", help="Account, for the questions to the batch system.")
@click.option("--wait", "wait_min", metavar="MIN", type=Number(min=0, max=durations.YEAR_S / 60), help=_WAIT)
@click.option("--max-gpu-hours", metavar="X", type=Number(min=0), help="Leave out what costs more GPU-hours.")
@click.option(
    "--prefer",
    type=click.Choice(["time", "gpu-hours"]),
    default="time",
    help="Recommend what ends first, or what costs least (time).",
)
@click.option("--all", "all_rows", is_flag=True, help="List all allocations, also those that one beats.")
@click.option(
    "--svg", metavar="F.svg", type=click.Path(path_type=Path), help="Draw end times against GPU-hours."
)
@option(
    "--batch", type=_SYSTEMS, default="auto", help="Batch system: the one whose commands are here (auto)."
)
@option("--cpus", metavar="N", type=click.IntRange(min=1), help="Cores of each node for jobs on CPU cores.")
@option(
    "--ps",
    metavar="F",
    multiple=True,
    help=f"Models of jobs on CPU cores: files, or names of shipped ones ({SHIPPED}).",
)
@option("--profiles", metavar="F", multiple=True, help="Profile files, or names of shipped ones.")
@option("--device-type", metavar="T", default="", help="Device type whose profiles count.")
@option("--devices", metavar="SPEC", help="Devices of the run: of replay:N@SPEED, the speed counts.")
@option("--policy", metavar="P", cls=policies.Once, help=f"Policy of the run: {policies.ALL}.")
@option("--policy-option", metavar="K=V", multiple=True, help="An option of the policy; can be repeated.")
@option(
    "--margin",
    type=Number(min=0, max=durations.YEAR_S),
    default=60.0,
    help="Safety margin before the end, for saving: seconds (60).",
)
@option("--database", metavar="F", help="SQLite file with profiles, and with how long your runs waited.")
@json_option
@click.pass_context
def advise(ctx: click.Context, /, jobs: Path, svg: Path | None, as_json: bool, **given: Any) -> None:
    """What to ask the batch system for: how many GPUs, for how long, in which partition.

    Each allocation that may be worth it is simulated, over as many time limits as it takes. How long it would
    wait is asked of Slurm (sbatch --test-only: nothing is submitted), or taken from your earlier runs.
    """
    from hpcsched.cli.run import advice_text

    if svg is not None:
        check_chart(svg, "--svg")
    with naming_the_file(jobs):
        advice, about = _advised(ctx, jobs, given)
    if svg is not None:
        from hpcsched.allocations.picture import advice_svg

        try:
            advice_svg(advice, svg)
        except OSError as error:
            raise ConfigError(where="--svg", got=f"{svg}: {error.strerror}", accepted="a file") from error
    if as_json:
        import msgspec

        say_json(msgspec.to_builtins(advice))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(advice_text.shown(advice, about, width=width, all_rows=given["all_rows"]), lines=True)


def _advised(ctx: click.Context, path: Path, given: dict[str, Any]) -> tuple[Advice, Sequence[str]]:
    """The advice for a job file, and what its running times rest on, in words. Raises ConfigError."""
    from hpcsched.allocations import advice as pages
    from hpcsched.allocations.tried import Trials
    from hpcsched.batch import queue_of
    from hpcsched.cli.run import advice_text

    asked = asked_for(given)
    system = system_of(given["batch"])
    file = jobfile.load(path, workdir=Path.cwd())
    work, missing = work_of(ctx, path, file, given)
    doubt = doubt_of(work.profiles)
    notes = advice_text.about_missing(missing, str(path))
    queue, partitions = partitions_of(system, work, asked, given, notes)
    trials = Trials(work, partitions, asked, doubt=doubt or 0.0)
    waits = waits_of(queue, system, trials.in_turn(), batch_options(ctx, given), given, notes)
    known = queue_of(system, environ=os.environ)
    hold_s = known.hold_s if known else 0.0
    tried, left_out = trials.tried(lambda shape: waits.of(shape).seconds, hold_s)
    notes += left_out
    every = [
        pages.row_of(one.shape, one.outcome, wait, hold_s, preempted=one.preempted)
        for one in tried
        if not (wait := waits.of(one.shape)).refused
    ]
    notes += advice_text.about_refused(waits)
    if not every:
        why = next(iter([*waits.refused.values(), *left_out]), "none was found")
        why = without_room(work, partitions, asked) or why
        accepted = "other --gpus-per-node, --nodes, --time or --partition"
        got = f"no allocation in which these jobs end ({why})"
        raise ConfigError(where=path.name, got=got, accepted=accepted)
    most = given["max_gpu_hours"]
    rows = [row for row in every if most is None or row.gpu_hours <= most]
    if not rows:
        least = min(row.gpu_hours for row in every)
        accepted = f"at least {least:.3g}: the cheapest"
        raise ConfigError(where="--max-gpu-hours", got=f"{most:g}", accepted=accepted)
    waiting = any(row.end_s is not None for row in rows)
    marked = pages.in_order(rows, waiting=waiting)
    best = pages.recommended(marked, prefer=given["prefer"], waiting=waiting)
    partition = next(one for one in partitions if one.name == best.partition)
    advice = pages.Advice(
        file=str(path),
        system=system,
        jobs=len(file.jobs),
        counted=len(work.jobs),
        missing=tuple(missing),
        policy=work.policy,
        prefer=given["prefer"],
        waiting=waiting,
        doubt=doubt,
        recommended=best.number,
        command=_command(path, system, best, given["cpus"]),
        rows=marked,
        separate=tuple(_separate(work, partition, queue, waits, batch_options(ctx, given))),
        notes=tuple(notes),
    )
    return advice, advice_text.about_profiles(work, doubt, partitions)


def _command(path: Path, system: str, row: Row, cpus: int | None) -> str:
    """The command that makes the batch script of a row."""
    words = ["hpcsched", "script", "lsf" if system == "lsf" else "slurm", str(path)]
    if row.nodes > 1:
        words += ["--nodes", str(row.nodes)]
    words += ["--gpus-per-node", str(row.gpus_per_node), "--time", durations.limit(row.time_s)]
    if cpus:
        words += ["--cpus", str(cpus)]
    if row.partition:
        words += ["--partition", row.partition]
    return shlex.join(words)


def _separate(
    work: Work, partition: Partition, queue: Queue | None, waits: Waits, options: Sequence[str]
) -> list[Separate]:
    """A batch job for each training, on the fewest and on the best number of GPUs, in a partition.

    Its waits are asked for too, and kept in `waits`.
    """
    from hpcsched.allocations import advice as pages
    from hpcsched.allocations import separate
    from hpcsched.allocations.candidates import whole_limit_s
    from hpcsched.allocations.outcomes import as_used
    from hpcsched.allocations.waits import ask
    from hpcsched.batch.queue import Shape

    found: list[Separate] = []
    there = max(partition.hosts)
    jobs = as_used(work, gpus=there)
    room = sum(gpus * nodes for gpus, nodes in partition.hosts.items())
    for how in ("fewest", "best"):
        made = separate.trainings(
            jobs, work.profiles, best=how == "best", most=there, speed=work.speed
        )  # fmt: skip
        total = sum(one.gpus for one in made)
        if not made or (found and total == found[0].gpus_in_all):
            continue
        longest_s = whole_limit_s(max(one.seconds for one in made), 0.0, 0.0)
        largest = max(made, key=lambda one: one.gpus)
        one = Shape(
            partition=partition.name,
            nodes=largest.nodes,
            gpus=largest.gpus // largest.nodes,
            limit_s=min(longest_s, partition.limit_s or longest_s),
        )
        nodes = max(largest.nodes, -(-total // max(1, there)))
        block = replace(one, nodes=nodes, gpus=max(one.gpus, -(-total // nodes)))
        fits = block.nodes <= partition.nodes_for(block.gpus)
        if queue is not None and waits.given_s is None:
            asked = ask(queue, [one, block] if fits else [one], options=options, now=time.time)
            waits.asked |= asked.asked
            waits.refused |= asked.refused
        first, last = waits.of(one).seconds, waits.of(block).seconds if fits else None
        together_s = separate.together_s(made, room if queue else total)
        worst_s = max(last or 0.0, first or 0.0) + separate.together_s(made, total)
        found.append(
            pages.Separate(
                how=how,
                jobs=len(made),
                gpus=(min(one.gpus for one in made), max(one.gpus for one in made)),
                gpus_in_all=total,
                partition=partition.name,
                wait_s=first,
                wait_source=waits.of(one).source,
                end_s=None if first is None else first + together_s,
                end_high_s=None if last is None else worst_s,
                least_s=together_s,
                gpu_hours=separate.gpu_hours(made),
                too_long=sum(one.seconds > (partition.limit_s or math.inf) for one in made),
            )
        )
    return found
