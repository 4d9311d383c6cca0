"""`hpcsched history`: finished jobs, sacct's role, from the database."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime

import click

from hpcsched.cli.common import database_path, dir_option, find_run, json_option, option
from hpcsched.cli.status import clock
from hpcsched.core.model import JobState
from hpcsched.errors import ConfigError


@click.command()
@dir_option
@click.option("--all", "all_runs", is_flag=True, help="Of all runs, not only the one in --dir.")
@click.option("--last", "-n", type=click.IntRange(min=1), help="The last N only.")
@click.option("--states", "-s", metavar="S", help="These states only: names or codes, with commas.")
@click.option("--parsable", "-P", is_flag=True, help="Columns separated by |.")
@option("--database", metavar="F", help="SQLite file with profiles and history.")
@json_option
@click.pass_context
def history(
    ctx: click.Context,
    dir_: str | None,
    all_runs: bool,
    last: int | None,
    states: str | None,
    parsable: bool,
    database: str | None,
    as_json: bool,
) -> None:
    """Finished jobs of the run in --dir, or of all runs: what they used, how they ended.

    A run's jobs come here when the run stops; until then `status --states all` has them.
    """
    from hpcsched.store.database import Database

    path = database_path(database)
    run_id = None
    if not all_runs:
        record = find_run(ctx, dir_).read_record()
        if record is None:
            raise ConfigError(
                where="--dir", got="no run there", accepted="a run directory, or --all for all runs"
            )
        run_id = record.id
    wanted = None if states is None else {word.strip().upper() for word in states.split(",")}
    with Database(path) as opened:
        jobs = opened.history(run_id=run_id, last=None if wanted else last)
    if wanted:
        jobs = tuple(j for j in jobs if {j.state, JobState(j.state).code} & wanted)[-(last or 0) :]
    if as_json:
        import msgspec

        page = {"schema": 1, "jobs": [asdict(job) for job in jobs]}
        sys.stdout.buffer.write(msgspec.json.encode(page) + b"\n")
        return
    rows = [("JOBID", "NAME", "MODEL", "STATE", "EXIT", "STARTED", "TIME", "GPUS", "GPU-H", "SUSP", "STEPS")]
    for job in jobs:
        started = "-"
        if job.start_at:
            started = datetime.fromisoformat(job.start_at).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
        taken = clock(job.end_s - job.start_s) if job.start_s is not None else "-"
        rows.append(
            (
                str(job.job_id),
                job.name,
                job.model,
                job.state,
                "-" if job.exit is None else exit_text(job.exit),
                started,
                taken,
                str(job.gpus_max),
                f"{job.gpu_hours:.3f}",
                str(job.suspensions),
                "-" if job.steps is None else str(job.steps),
            )
        )
    if parsable:
        click.echo("\n".join("|".join(row) for row in rows))
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def exit_text(code: int) -> str:
    """sacct's code:signal."""
    return f"0:{code - 128}" if code > 128 else f"{code}:0"
