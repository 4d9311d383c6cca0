"""What `hpcsched report` says of each job: the words of `explain`, and the last lines of its output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from hpcsched.cli.jobs.explain import explanation, story_of
from hpcsched.cli.run.last_words import last_lines
from hpcsched.cli.run.report_versions import versions_of
from hpcsched.contract import files
from hpcsched.core.exits import exit_pair
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Kind
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.report.jobs import JobDetail
from hpcsched.store.files import write_atomically
from hpcsched.store.metrics import read_curves
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_status

MOST_CURVE_BYTES = 2**28
"""What is read of the curves of all jobs together (chosen): a million lines take some seconds."""

LONGEST = 2000
"""Characters of a command or an explanation; more are not read on a page."""


def details_of(
    rundir: RunDir, machine: Machine, most: int, folder: Path, kept: Path | None = None
) -> tuple[list[JobDetail], int]:
    """At most `most` jobs, failed ones first, else in the order of their ids; their figures are left in the
    folder. And of how many the curves are left out, as they would take too long to read.

    `kept`: a folder of this run's curves as they were drawn before; those that have not changed are taken
    from there, the others left there.
    """
    jobs = sorted(machine.run.jobs.values(), key=lambda job: (not job.state.failed, job.id))[:most]
    outputs, curves = _outputs(rundir), _Curves(rundir, folder, kept)
    details = [_detail(rundir, machine, job, outputs.get(job.id), curves) for job in jobs]
    curves.tidy()
    return details, curves.left_out


class _Curves:
    """Draws the curves of jobs, as long as there is not too much to read."""

    def __init__(self, rundir: RunDir, folder: Path, kept: Path | None) -> None:
        self._rundir, self._folder, self._kept, self._left = rundir, folder, kept, MOST_CURVE_BYTES
        self._used = set[Path]()
        self.left_out = 0

    def of(self, job: Job) -> str | None:
        """A figure as an SVG document; None where the job has no curves."""
        path, same = self._rundir.job(job.id) / files.METRICS, None
        try:
            about = path.stat()
            if self._kept is not None:
                same = self._kept / f"{job.id}-{about.st_size}-{about.st_mtime_ns}.svg"
                self._used.add(same)
                with suppress(FileNotFoundError):
                    return same.read_text(encoding="utf-8")
            self._left -= about.st_size
            if self._left < 0:
                self.left_out += 1
                return None
            curves = read_curves(path)
        except OSError:
            return None
        except StoreError as error:
            click.echo(f"hpcsched: {error}: left out", err=True)
            return None
        if not curves:
            return None
        from hpcsched.report.curves import curves_svg

        figure = self._folder / f"{job.spec.name}-curves.svg"
        curves_svg(curves, figure, title=job.spec.name)
        svg = figure.read_text(encoding="utf-8")
        if same is not None:
            write_atomically(same, svg.encode())
        return svg

    def tidy(self) -> None:
        """Keep no curves of other jobs, and none that have changed."""
        for path in self._kept.iterdir() if self._kept is not None else ():
            if path not in self._used:
                path.unlink()


def _detail(rundir: RunDir, machine: Machine, job: Job, output: Path | None, curves: _Curves) -> JobDetail:
    told = explanation(rundir, machine, job)
    facts = [_program(job)]
    if versions := versions_of(rundir, job.id):
        facts.append(("trained by", versions))
    facts += [("exit", exit_pair(job.exit))] if job.exit is not None else []
    facts += [(what, text) for what, text in told.lines() if what != "because"]
    tail = [] if output is None else last_lines(output)
    if output is not None and not tail:
        facts.append(("output", str(output)))
    return JobDetail(
        job_id=job.id,
        name=job.spec.name,
        state=job.state,
        why=_cut(told.because),
        facts=[(what, _cut(text)) for what, text in facts],
        story=[(when, _cut(text)) for when, text in story_of(job, machine.ledger.noun)],
        log="" if output is None else str(output),
        tail=tail,
        curves=curves.of(job),
    )


def _program(job: Job) -> tuple[str, str]:
    """What the job runs."""
    spec = job.spec
    if spec.kind is Kind.COMMAND:
        return "command", shlex.join(spec.command)
    if spec.kind is Kind.TRAINER:
        args = ", ".join(f"{name} = {json.dumps(value)}" for name, value in spec.args.items())
        return "trainer", f"{spec.trainer}" + (f" with {args}" if args else "")
    return "stand-in", f"for {spec.model}"


def _outputs(rundir: RunDir) -> Mapping[int, Path]:
    """The output of each job by the snapshot; where the run has been moved, it has moved with it."""
    try:
        status = read_status(rundir)
    except HpcschedError:
        return {}
    was, found = Path(status.run.dir), dict[int, Path]()
    for job in status.jobs:
        if job.output:
            path = Path(job.output)
            inside = path.is_relative_to(was) and ".." not in path.parts
            found[job.id] = rundir.root / path.relative_to(was) if inside else path
    return found


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)"
