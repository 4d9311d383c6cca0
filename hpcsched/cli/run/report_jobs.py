"""What `hpcsched report` says of each job: the words of `explain`, and the last lines of its output."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcsched.cli.jobs.explain import explanation, story_of
from hpcsched.cli.run.last_words import last_lines
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Kind
from hpcsched.errors import HpcschedError
from hpcsched.report.jobs import JobDetail
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_status

LONGEST = 2000
"""Characters of a command or an explanation; more are not read on a page."""


def details_of(rundir: RunDir, machine: Machine, most: int) -> list[JobDetail]:
    """At most `most` jobs, failed ones first, else in the order of their ids."""
    jobs = sorted(machine.run.jobs.values(), key=lambda job: (not job.state.failed, job.id))
    outputs = _outputs(rundir)
    return [_detail(rundir, machine, job, outputs.get(job.id)) for job in jobs[:most]]


def _detail(rundir: RunDir, machine: Machine, job: Job, output: Path | None) -> JobDetail:
    told = explanation(rundir, machine, job)
    facts = [_program(job), *([("exit", said_exit(job.exit))] if job.exit is not None else [])]
    facts += [(what, text) for what, text in told.lines() if what != "because"]
    tail = [] if output is None else last_lines(output)
    if output is not None and not tail:
        facts.append(("output", str(output)))
    return JobDetail(
        job_id=job.id,
        name=job.spec.name,
        state=job.state,
        why=_cut(str(told.reason)) if told.reason else "",
        facts=[(what, _cut(text)) for what, text in facts],
        story=[(when, _cut(text)) for when, text in story_of(job)],
        log="" if output is None else str(output),
        tail=tail,
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


def said_exit(code: int) -> str:
    """An exit code; of those with which a shell, and hpcsched, tell a signal, with its name."""
    with suppress(ValueError):
        if code > 128:
            return f"{code}, as after {signal.Signals(code - 128).name}"
    return str(code)


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
