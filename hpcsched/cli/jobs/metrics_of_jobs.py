"""`hpcsched metrics` of several jobs: a line for each, with what it has told last."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.cli.jobs.columns import steps
from hpcsched.cli.jobs.metric_tables import said_value, show
from hpcsched.contract import files
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.store.metrics import read_points
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import JobStatus


@dataclass(frozen=True)
class _Line:
    """A job, and its last value of each metric; None: not finite."""

    job: JobStatus
    values: dict[str, float | None]

    def rank(self, metric: str, sign: int) -> tuple[bool, float]:
        """Where it stands among others: without a number behind all that have one."""
        value = self.values.get(metric)
        return value is None, 0.0 if value is None else sign * value


def tell(
    rundir: RunDir,
    jobs: Sequence[JobStatus],
    *,
    wanted: Sequence[str],
    sort: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Print a line for each of the jobs, in their order or by a metric; "-loss" turns it round.

    Raises ConfigError for a metric that none of them has, HpcschedError where none has any.
    """
    lines = [_Line(job, _last(rundir, job)) for job in jobs]
    known = list(dict.fromkeys(name for line in lines for name in line.values))
    if not known:
        raise HpcschedError("none of these jobs has logged a metric, or told one at its end")
    order = "" if sort is None else sort.removeprefix("-")
    for option, name in [*(("--metric", name) for name in wanted), *([("--sort", order)] if order else [])]:
        if name not in known:
            raise ConfigError(where=option, got=repr(name), accepted=", ".join(known))
    if order:
        sign = -1 if str(sort).startswith("-") else 1
        lines.sort(key=lambda line: line.rank(order, sign))
    names = list(wanted) or ([order] if order else []) + [name for name in known if name != order]
    if as_json:
        page = {"schema": 1, "jobs": [_as_json(line, names) for line in lines]}
        sys.stdout.write(json.dumps(page) + "\n")
    elif as_csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(("id", "name", "state", "step", *names))
        for line in lines:
            job, values = line.job, (line.values.get(name) for name in names)
            table.writerow((job.id, job.name, job.state, job.step, *values))
    else:
        columns = [
            ["JOBID", *(str(line.job.id) for line in lines)],
            ["NAME", *(line.job.name for line in lines)],
            ["ST", *(line.job.state.code for line in lines)],
            ["STEP", *(steps(line.job) for line in lines)],
        ]
        show(columns, [[name, *(said_value(line.values, name) for line in lines)] for name in names])


def _last(rundir: RunDir, job: JobStatus) -> dict[str, float | None]:
    """What the job has logged last of each metric, and what it has told at its end."""
    logged: dict[str, float | None] = {}
    for point in read_points(rundir.job(job.id) / files.METRICS):
        logged.update(point.values)
    return {**logged, **job.metrics}


def _as_json(line: _Line, names: Sequence[str]) -> dict[str, object]:
    values = {name: line.values[name] for name in names if name in line.values}
    return {
        "id": line.job.id,
        "name": line.job.name,
        "state": line.job.state,
        "step": line.job.step,
        "metrics": values,
    }
