"""`hpcsched metrics`: what a job has logged by step, or several have logged last."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import dir_option, find_run, hint_at_runs, job_names, json_option, select
from hpcsched.cli.jobs import metrics_of_jobs
from hpcsched.cli.jobs.metric_tables import said_value, show
from hpcsched.client.waiting import read_all
from hpcsched.contract import files
from hpcsched.errors import ConfigError, HpcschedError

if TYPE_CHECKING:
    from hpcsched.contract.metrics import Point


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=job_names)
@dir_option
@click.option("-m", "--metric", "wanted", metavar="NAME", multiple=True, help="These only; repeatable.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), help="The last N lines; of --csv and --json points."
)
@click.option(
    "--sort", "-S", metavar="NAME", help="Order jobs by a metric: loss, -accuracy (- turns it round)."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, all metrics.")
@json_option
@click.pass_context
def metrics(
    ctx: click.Context,
    jobs: Sequence[str],
    dir_: str | None,
    wanted: Sequence[str],
    lines: int | None,
    sort: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Print what a job has logged by step: loss, learning rate, evaluations.

    Of several JOBS (ids, names, 3-7; default: all) it prints a line for each, with its last values, and with
    what it has told at its end.

    Of steps that were done again after a crash only what was logged last. A terminal shows as many metrics as
    fit; CSV and JSON have all, with `t` in Unix seconds. Exit code 4: there is no such job.
    """
    from hpcsched.store.metrics import read_points

    if as_csv and as_json:
        raise click.UsageError("--csv or --json, not both", ctx)
    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        status = read_all(rundir)
        chosen = select(status, jobs) if jobs else status.jobs
    if not jobs or len(chosen) > 1:
        if lines is not None:
            raise click.UsageError("--lines is for one job", ctx)
        metrics_of_jobs.tell(rundir, chosen, wanted=wanted, sort=sort, as_csv=as_csv, as_json=as_json)
        return
    if sort is not None:
        raise click.UsageError("--sort is for several jobs", ctx)
    (found,) = chosen
    points = read_points(rundir.job(found.id) / files.METRICS)
    if not points:
        raise HpcschedError(f"job {found.id} ({found.name}) has logged no metrics: it is {found.state}")
    known = list(dict.fromkeys(name for point in points for name in point.values))
    for name in wanted:
        if name not in known:
            raise ConfigError(where="--metric", got=repr(name), accepted=", ".join(known))
    names = list(wanted) or known
    points = [point for point in points if not point.values.keys().isdisjoint(names)]
    if as_json or as_csv:
        points = points[-(lines or 0) :]
    if as_json:
        rows = [{"step": p.step, "t": p.t, "attempt": p.attempt, **_of(p, names)} for p in points]
        page = {"schema": 1, "id": found.id, "name": found.name, "points": rows}
        sys.stdout.write(json.dumps(page) + "\n")
    elif as_csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(("step", "t", "attempt", *names))
        for point in points:
            values = (point.values.get(name) for name in names)
            table.writerow((point.step, point.t, point.attempt, *values))
    else:
        _show(points, names, lines or 0)


def _of(point: Point, names: Sequence[str]) -> dict[str, float | None]:
    return {name: point.values[name] for name in names if name in point.values}


def _show(points: Sequence[Point], names: Sequence[str], last: int = 0) -> None:
    """A table with a row for each step, the `last` ones (0: all), and of as many metrics as the terminal has
    room for."""
    rows: list[tuple[int, dict[str, float | None]]] = []
    for point in points:
        if not rows or rows[-1][0] != point.step or not rows[-1][1].keys().isdisjoint(point.values):
            rows.append((point.step, {}))
        rows[-1][1].update(_of(point, names))
    rows = rows[-last:]
    metrics = [[name, *(said_value(values, name) for _, values in rows)] for name in names]
    show([["STEP", *(str(step) for step, _ in rows)]], metrics)
