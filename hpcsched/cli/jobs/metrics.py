"""`hpcsched metrics JOB`: what a job has logged by step."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import dir_option, find_run, hint_at_runs, job_names, json_option, say, select
from hpcsched.client.waiting import read_all
from hpcsched.contract import files
from hpcsched.errors import ConfigError, HpcschedError, UnknownJob

if TYPE_CHECKING:
    from hpcsched.contract.metrics import Point


@click.command()
@click.argument("job", shell_complete=job_names)
@dir_option
@click.option("-m", "--metric", "wanted", metavar="NAME", multiple=True, help="These only; repeatable.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), help="The last N lines; of --csv and --json points."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, all metrics, with times.")
@json_option
@click.pass_context
def metrics(
    ctx: click.Context,
    job: str,
    dir_: str | None,
    wanted: Sequence[str],
    lines: int | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Print what JOB (id or name) has logged by step: loss, learning rate, evaluations.

    Of steps that were done again after a crash only what was logged last. A terminal shows as many metrics as
    fit; CSV and JSON have all, with `t` in Unix seconds. Exit code 4: there is no such job.
    """
    from hpcsched.store.metrics import read_points

    if as_csv and as_json:
        raise click.UsageError("--csv or --json, not both", ctx)
    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        several = select(read_all(rundir), [job])
    if len(several) > 1:
        raise UnknownJob(f"{job!r} are {len(several)} jobs: name one, such as {several[0].name}")
    (found,) = several
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
    columns = [["STEP", *(str(step) for step, _ in rows)]]
    columns += [[name, *(_text(values, name) for _, values in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sum(widths) + 2 * len(widths)
    shown = len(columns)
    while shown > 2 and sum(widths[:shown]) + 2 * (shown - 1) > room:
        shown -= 1
    for cells in zip(*columns[:shown], strict=True):
        say("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())
    if left := names[shown - 1 :]:
        say(f"no room for {', '.join(left)}: --metric NAME, --csv or --json has them", err=True)


def _text(values: dict[str, float | None], name: str) -> str:
    if name not in values:
        return ""
    value = values[name]
    return "nan" if value is None else f"{value:.5g}"
