"""`hpcsched history`: finished jobs, sacct's role, from the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import (
    database_path,
    dir_option,
    find_run,
    hint_at_runs,
    json_option,
    option,
    plural,
    say,
    say_json,
)
from hpcsched.core.exits import exit_pair
from hpcsched.core.model import JobState
from hpcsched.durations import clock
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun
from hpcsched.printing import fitting, printables, room, said_cores, short_bytes, shortened
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_status

MOST_CLEANED = 5
"""Cleaned runs that are named; the others are counted."""

if TYPE_CHECKING:
    from hpcsched.store.database import FinishedJob, TrialEntry


@click.command()
@dir_option
@click.option("--all", "all_runs", is_flag=True, help="All runs, not only the one in --dir.")
@click.option("--last", "-n", type=click.IntRange(min=1), help="The last N only.")
@click.option("--states", "-s", metavar="S", help="These states only: names or codes, with commas.")
@click.option("--trials", is_flag=True, help="Trials of searches (hpcsched tune) instead of jobs.")
@click.option("--format", "-o", "format_", metavar="NAMES", help="These columns, with commas: jobid,exit.")
@click.option("--noheader", is_flag=True, help="No header line.")
@click.option("--parsable", "-P", is_flag=True, help="Columns with a vertical bar between them.")
@option("--database", metavar="F", help="SQLite file with profiles and history.")
@json_option
@click.pass_context
def history(
    ctx: click.Context,
    dir_: str | None,
    all_runs: bool,
    last: int | None,
    states: str | None,
    trials: bool,
    format_: str | None,
    noheader: bool,
    parsable: bool,
    database: str | None,
    as_json: bool,
) -> None:
    """Finished jobs of the run in --dir, or of all runs: what they used, how they ended.

    A run's jobs come here when the run stops; until then `status --states all` has them.

    On a terminal that is too narrow the columns that matter least are left out; -o names those to show.

    MAXRSS: the most memory that a job's processes together had resident, as it was sampled every 20 s; "-":
    not measured.
    """
    from hpcsched.store.database import Database

    path = database_path(database)
    run_id = None
    if not all_runs:
        rundir = find_run(ctx, dir_)
        record = rundir.read_record()
        if record is None:
            with hint_at_runs(ctx, dir_):
                raise NoSuchRun(f"no run has begun in {rundir.root}; --all shows all runs")
        run_id = record.id
        _tell_of_unfinished(rundir)
    if trials:
        with Database(path) as opened:
            found = opened.trials(run_id=run_id)[-(last or 0) :]
        if as_json:
            say_json({"schema": 1, "trials": [asdict(trial) for trial in found]})
        else:
            _show(_of_trials(found), format_, header=not noheader, parsable=parsable)
        return
    wanted = None if states is None else {word.strip().upper() for word in states.split(",")}
    with Database(path) as opened:
        jobs = opened.history(run_id=run_id, last=None if wanted else last)
    if wanted:
        jobs = tuple(j for j in jobs if {j.state, JobState(j.state).code} & wanted)[-(last or 0) :]
    if as_json:
        page = {"schema": 1, "jobs": [asdict(job) for job in jobs]}
        say_json(page)
        return
    on_cores = [_on_cores(job) for job in jobs]
    core_hours = ("CORE-H",) if any(on_cores) or format_ else ()
    heads = ("JOBID", "NAME", "MODEL", "STATE", "EXIT", "STARTED", "TIME", "GPUS", "GPU-H", *core_hours)
    rows: list[tuple[str, ...]] = [(*heads, "SUSP", "STEPS", "MAXRSS")]
    for job, cores in zip(jobs, on_cores, strict=True):
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
                "-" if job.exit is None else exit_pair(job.exit),
                started,
                taken,
                said_cores(cores[0]) if cores else str(job.gpus_max),
                f"{job.gpu_hours:.3f}",
                *(f"{cores[1]:.3f}" if cores else "-" for _ in core_hours),
                str(job.suspensions),
                "-" if job.steps is None else str(job.steps),
                "-" if job.max_rss_bytes is None else short_bytes(job.max_rss_bytes),
            )
        )
    _show(rows, format_, header=not noheader, parsable=parsable)
    _tell_of_cleaned(path, {job.run_id for job in jobs})


def _tell_of_cleaned(database: Path, run_ids: set[str]) -> None:
    """Say of which of these runs the folder, or what was in it, is gone."""
    from hpcsched.store.cleaning import cleaned
    from hpcsched.store.database import Database
    from hpcsched.store.leftovers import What

    words = {
        What.ALL: "gone",
        What.CHECKPOINTS: "without its checkpoints",
        What.OTHERS: "without its outputs",
    }
    with Database(database) as opened:
        shown = [run for run in opened.runs() if run.run_id in run_ids]
    gone = [(run, what) for run in shown if (what := cleaned(Path(run.directory), run.run_id))]
    for run, what in gone[:MOST_CLEANED]:
        say(f"hpcsched: {run.directory} is {words[what]} (cleaned)", err=True)
    if len(gone) > MOST_CLEANED:
        say(f"hpcsched: and {len(gone) - MOST_CLEANED} more runs were cleaned", err=True)


def _tell_of_unfinished(rundir: RunDir) -> None:
    """Say where the jobs are that have ended in a run which goes on."""
    try:
        status = read_status(rundir, only=())
    except HpcschedError:
        return
    if status.run.alive:
        over = sum(number for state, number in status.counts.items() if state.final)
        what = f"{plural(over, 'job') if over else 'no job has'} ended so far in this run, which goes on"
        say(f"hpcsched: {what}: `hpcsched status --states all` has them", err=True)


def _on_cores(job: FinishedJob) -> tuple[float, float] | None:
    """The most CPU cores that a job had, and its core-hours; None for one on GPUs."""
    held = [
        (sum(attempt["servers"]) + sum(attempt["workers"]), attempt["end_s"] - attempt["start_s"])
        for attempt in job.attempts
        if "servers" in attempt
    ]
    return (max(held)[0], sum(cores * lasted_s for cores, lasted_s in held) / 3600) if held else None


def _chosen(rows: Sequence[Sequence[str]], names: str | None) -> list[Sequence[str]]:
    """The columns of these names, in their order; all of them for None. Raises ConfigError."""
    if names is None:
        return list(rows)
    heads, at = list(rows[0]), []
    for name in names.split(","):
        if name.strip().upper() not in heads:
            raise ConfigError(where="--format", got=repr(name), accepted=", ".join(heads))
        at.append(heads.index(name.strip().upper()))
    return [[row[k] for k in at] for row in rows]


_FIRST_TO_GO = ("SUSP", "MODEL", "STEPS", "MAXRSS", "GPUS", "STARTED", "CORE-H", "GPU-H", "TIME")
_FIRST_OF_TRIALS = ("BRACKET", "METRIC", "BUDGET")
"""Columns that a narrow terminal does without, in this order; ids and names are always there."""

_LEAST_ARGS = 20
"""Characters of arguments that are shown at least (chosen)."""


def _show(rows: Sequence[Sequence[str]], names: str | None, *, header: bool, parsable: bool) -> None:
    """Print the columns of these names; without any all, on a terminal those that fit."""
    columns, width = [printables(column) for column in zip(*_chosen(rows, names), strict=True)], room()
    if names is None and not parsable and width is not None:
        if columns[-1][0] == "ARGS":
            longest = max(width - sum(2 + max(map(len, column)) for column in columns[:-1]), _LEAST_ARGS)
            columns[-1] = [shortened(text, longest) for text in columns[-1]]
        widths = [max(map(len, column)) for column in columns]
        columns = [columns[i] for i in fitting(widths, [_rank(column[0]) for column in columns], width)]
    columns = columns if header else [column[1:] for column in columns]
    widths = [max(map(len, column), default=0) for column in columns]
    for row in zip(*columns, strict=True):
        aligned = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        click.echo("|".join(row) if parsable else aligned)


def _rank(head: str) -> int:
    order = _FIRST_OF_TRIALS if head in _FIRST_OF_TRIALS else _FIRST_TO_GO
    return len(order) - order.index(head) if head in order else 0


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _of_trials(trials: Sequence[TrialEntry]) -> Sequence[tuple[str, ...]]:
    """The results of the configurations that searches have tried, below their heads."""
    rows = [("RUN", "TRIAL", "BRACKET", "BUDGET", "METRIC", "VALUE", "STATE", "ARGS")]
    for trial in trials:
        rows.append(
            (
                trial.run_id[:8],
                str(trial.trial),
                str(trial.bracket),
                f"{trial.budget:g} {trial.unit.removesuffix('s') if trial.budget == 1 else trial.unit}",
                trial.metric,
                "-" if trial.value is None else f"{trial.value:.6g}",
                "best" if trial.best else trial.state,
                " ".join(f"{name}={_short(value)}" for name, value in trial.args.items()),
            )
        )
    return rows
