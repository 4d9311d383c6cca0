"""`hpcsched efficiency`: what jobs made of the GPUs that they held, as `seff` tells of a batch job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import (
    dir_option,
    find_run,
    hint_at_runs,
    job_names,
    json_option,
    plural,
    say,
    select,
)
from hpcsched.cli.jobs.columns import aligned
from hpcsched.cli.run import policies
from hpcsched.core.model import JobState
from hpcsched.durations import clock
from hpcsched.errors import NoSuchRun
from hpcsched.printing import said_bytes, shortened

if TYPE_CHECKING:
    from hpcsched.cli.run.efficiency_of import JobEfficiency, SetEfficiency
    from hpcsched.report.result import Result

WIDTH = 80
LEAST_NAME = 8

MOSTLY = 0.9
"""The share of the time that has to be sampled for the utilisation to stand alone (chosen)."""


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB...]", shell_complete=job_names)
@dir_option
@click.option(
    "--policy",
    metavar="P,...",
    cls=policies.OnceWithCommas,
    shell_complete=policies.complete,
    help="Also what these policies would have taken: modelled, by the simulator.",
)
@click.option(
    "--records",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Sums of a site's records in this folder.",
)
@click.option("--by", metavar="KEY,...", help="With --records: what to sum by (user,account,month).")
@click.option("--csv", "as_csv", is_flag=True, help="With --records: print CSV.")
@json_option
@click.pass_context
def efficiency(
    ctx: click.Context,
    jobs: tuple[str, ...],
    dir_: str | None,
    policy: str | None,
    records: Path | None,
    by: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """What jobs (default: all) made of the GPUs that they held.

    Held, overhead and lost are by the journal; how busy devices were, their energy, CPU time and memory were
    sampled while the jobs ran. "-" is what was not measured. With --records: what all runs of a site did.
    """
    asked = ctx.get_parameter_source("records") is click.core.ParameterSource.COMMANDLINE
    if records is not None and asked:
        from hpcsched.cli.run.efficiency_records import USUAL, show

        if jobs or dir_ or (as_csv and as_json):
            raise click.UsageError("--records is of all runs: give no job and no --dir, and one form")
        return show(records, by=by or USUAL, as_csv=as_csv, as_json=as_json)
    if by or as_csv:
        raise click.UsageError("--by and --csv go with --records")
    from hpcsched.cli.run.efficiency_of import efficiency_of
    from hpcsched.policy import make_policy
    from hpcsched.store import job_use
    from hpcsched.store.replay import replay
    from hpcsched.store.status import read_status

    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        rundir.require()
        if not rundir.begun:
            raise NoSuchRun(f"the run in {rundir.root} has not started yet")
        chosen = {job.id for job in select(read_status(rundir), jobs)} if jobs else None
    machine = replay(rundir.journal, make_policy).machine
    together, each = efficiency_of(machine, job_use.read(rundir.job_use), chosen)
    by_flag = ctx.get_parameter_source("policy") is click.core.ParameterSource.COMMANDLINE
    modelled = _modelled(ctx, dir_, policy) if policy and by_flag else []  # settings are about `run`
    if as_json:
        from hpcsched.cli.common import say_json

        page = {"schema": 1, "dir": str(rundir.root), "over": machine.run.finished}
        more = {"modelled": modelled} if modelled else {}
        say_json({**page, "set": together, "jobs": each, **more})
        return
    say(_table(each) + "\n".join(_lines(together, machine.ledger.noun)), lines=True)
    if modelled:
        from hpcsched.report.tables import comparison_table

        compared = comparison_table(modelled, width=WIDTH)
        say(f"\nmodelled, by the simulator, beside how it went:\n{compared}", lines=True)


def _modelled(ctx: click.Context, dir_: str | None, policy: str) -> list[Result]:
    """How the run went, and what the simulator says of it under these policies."""
    from hpcsched.cli.run.simulate import simulated_under
    from hpcsched.cli.run.simulation_inputs import CpuOptions, of_run

    scenario = of_run(ctx, dir_, None, None, (), CpuOptions(None, ()), (), "")
    chosen = policies.for_simulation(ctx, policy, (), (scenario.policy, scenario.options))
    for note in scenario.notes:
        say(f"hpcsched: {note}", err=True)
    return simulated_under(scenario, chosen, (0.5, 0.03), release_after_s=None, keep=False)


def _table(jobs: Sequence[JobEfficiency]) -> str:
    rows = [("JOBID", "NAME", "ST", "GPU-H", "UTIL", "OVERH", "LOST", "CORES", "MEM", "KWH")]
    for job in jobs:
        partly = job.sampled_gpu_hours < MOSTLY * job.gpu_hours
        rows.append(
            (
                str(job.id),
                job.name,
                JobState(job.state).code,
                f"{job.gpu_hours:.3f}",
                _percent(job.utilisation) + ("*" if partly and job.utilisation is not None else ""),
                f"{job.overhead_gpu_hours:.3f}",
                f"{job.lost_gpu_hours:.3f}",
                _number(job.cores, ".1f"),
                "-" if job.memory_mib is None else said_bytes(job.memory_mib * 2**20),
                _number(job.energy_kwh, ".2f"),
            )
        )
    columns = [list(column) for column in zip(*rows, strict=True)]
    others = sum(max(map(len, column)) + 2 for number, column in enumerate(columns) if number != 1)
    room = max(LEAST_NAME, WIDTH - others)
    columns[1] = [shortened(name, room) for name in columns[1]]
    return aligned(columns, [True, False, False, *[True] * 7])


def _lines(total: SetEfficiency, noun: str) -> list[str]:
    """The set, for people; `noun`: what its devices are called."""
    held = f"{total.gpu_hours:.3f} {noun}-hours held"
    if total.there_gpu_hours and total.gpus:
        share = total.gpu_hours / total.there_gpu_hours
        took_s = total.makespan_s or 0.0
        always = total.gpus * took_s <= total.there_gpu_hours * 3600 * 1.01
        held += f" of {total.there_gpu_hours:.3f} ({share:.0%}), {'' if always else 'at most '}"
        held += f"{plural(total.gpus, noun)} {'for' if always else 'at a time, in'} {clock(took_s)}"
    lines = [f"{plural(total.jobs, 'job')}: {held}"]
    if total.busy_gpu_hours is not None and total.idle_gpu_hours is not None:
        sampled = total.sampled_gpu_hours
        part = "" if sampled >= MOSTLY * total.gpu_hours else f"* of {sampled:.3f} hours that were sampled: "
        busy, idle = total.busy_gpu_hours, total.idle_gpu_hours
        lines.append(f"  {part}busy {busy:.3f} ({_percent(total.utilisation)}), idle {idle:.3f}")
    lines.append(
        f"  overhead {total.overhead_gpu_hours:.3f} (starts, saves, changes),"
        f" lost {total.lost_gpu_hours:.3f} (done again, or never)"
    )
    if total.shared_sampled_gpu_hours:
        lines.append(
            f"  shared by several jobs at once, in no job's line: {total.shared_sampled_gpu_hours:.3f}"
            f" (busy {_number(total.shared_busy_gpu_hours, '.3f')})"
        )
    if total.energy_kwh is not None:
        idle_kwh = total.energy_unheld_kwh
        unheld = "" if idle_kwh is None else f"; {noun}s that nobody held {idle_kwh:.2f}"
        measured = f"{total.energy_gpu_hours:.3f} {noun}-hours measured"
        lines.append(f"  energy {total.energy_kwh:.2f} kWh in {measured}{unheld}")
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
