"""What `run` prints at its end: the result, other policies beside it, and why jobs failed."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcsched.cli.common import say
from hpcsched.contract.files import ATTEMPT_MARK
from hpcsched.core.machine import Machine
from hpcsched.decoding import read_tail
from hpcsched.errors import BadInput, ConfigError, HpcschedError
from hpcsched.printing import hanging, json_for_terminals, printable, room

FAILURES = 20
"""Failed jobs of which it is told why; of the others, how many."""
TAIL_LINES = 10
TAIL_BYTES = 2**16
TAIL_CHARACTERS = 300

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""What has a terminal change its colours: without one it is noise."""


def tell_result(
    life: Any, *, as_json: bool, gantt: Path | None, compare: Sequence[str], again: str, listed: str
) -> None:
    """Print the result at the end: JSON, or tables. `again` goes on with the run, `listed` shows its jobs."""
    from msgspec.structs import replace

    from hpcsched.cli.run.results import result_of, simulated
    from hpcsched.report.result import to_json
    from hpcsched.report.tables import comparison_table, headline, job_table

    machine: Machine = life.machine
    result = result_of(machine, downtime_s=life.downtime_s)
    results = [replace(result, label="this run")]
    for policy in compare:
        profiles = {
            (p.model, p.nodes): p for j in machine.run.jobs.values() if (p := machine.estimates.profile(j))
        }
        specs = [job.spec for job in machine.run.jobs.values()]
        hosts = Counter(device.host for device in machine.hosts.there_at_first)
        gpus, nodes = max(hosts.values(), default=1), len(hosts)
        try:
            if len(set(hosts.values())) != 1 or machine.ledger.lost or not machine.run.finished:
                raise ConfigError(
                    where="--compare",
                    got=f"a run cut short, or hosts with unequal or lost {result.noun}s",
                    accepted="a finished run on hosts that are alike",
                )
            known = list(profiles.values())
            other = simulated(specs, known, gpus=gpus, nodes=nodes, policy=policy, options={})
            results.append(replace(other, devices=result.devices))
        except ConfigError as error:
            say(f"hpcsched: no comparison with {policy}: {error}", err=True)
    if as_json:
        click.echo(json_for_terminals(to_json([result])))
    else:
        width = room()
        say(job_table(result, width=width), lines=True)
        say(hanging(printable(headline(result)), under=2, width=width), lines=True)
        if len(results) > 1:
            say(
                "\nthis run, and what others would have taken (simulated with the same profiles):", lines=True
            )
            say(comparison_table(results, width=width), lines=True)
    failed = [job for job in machine.run.jobs.values() if job.state.failed]
    for job in failed[:FAILURES]:
        _tell_failure(life, job.id)
    if others := failed[FAILURES:]:
        states = ",".join(sorted({job.state.code for job in others}))
        say(f"hpcsched: {len(others)} more failed: `{listed} --states {states}` lists them", err=True)
    for why in life.refused:
        say(f"hpcsched: not taken from what waited: {why}", err=True)
    if life.exit_code == 130:
        left = machine.run.unfinished
        say(f"hpcsched: killed with {left} jobs left; go on with `{again}`", err=True)
    if gantt:
        from hpcsched.report.gantt import gantt_svg

        try:
            gantt_svg(results if len(results) > 1 else [result], gantt)
            say(f"hpcsched: Gantt chart in {gantt}", err=True)
        except OSError as error:
            say(f"hpcsched: no Gantt chart: {gantt}: {error.strerror}", err=True)
        except HpcschedError as error:
            say(f"hpcsched: no Gantt chart: {error}", err=True)


def _tell_failure(life: Any, job_id: int) -> None:
    """Print why a job failed, and the last lines it wrote."""
    job = life.machine.run.jobs[job_id]
    why = job.reason.said(life.machine.ledger.noun) if job.reason else None
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    line = printable(f"hpcsched: job {job.id} ({job.spec.name}) failed: {why}")
    say(hanging(line, under=2, width=width), lines=True, err=True)
    path = life.outputs.get(job_id)
    if path is None:
        return
    if lines := last_lines(path):
        say(f"  the last lines of {path}:", err=True)
    for line in lines:
        say(f"    {line}", lines=True, err=True)


def last_lines(path: Path) -> list[str]:
    """The last lines of a job's last attempt, each cut where it is long; none where it cannot be read."""
    try:
        lines = read_tail(path, TAIL_BYTES).splitlines()
    except (OSError, BadInput):  # it may write to a terminal or a pipe
        return []
    begin = max((number for number, line in enumerate(lines, 1) if line.startswith(ATTEMPT_MARK)), default=0)
    return [_COLOURS.sub("", line)[:TAIL_CHARACTERS] for line in lines[begin:][-TAIL_LINES:]]
