"""`hpcsched explain JOB`: replays the journal through the core and tells the job's story."""

from __future__ import annotations

import sys

import click
import msgspec

from hpcsched.cli.common import dir_option, find_run, hint_at_runs, json_option, plural
from hpcsched.cli.status import clock
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.errors import NoSuchRun, UnknownJob


@click.command()
@click.argument("job")
@dir_option
@json_option
@click.pass_context
def explain(ctx: click.Context, job: str, dir_: str | None, as_json: bool) -> None:
    """Why JOB (id or name) waits, why it has this many GPUs, and what is next for it."""
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    rundir = find_run(ctx, dir_)
    with hint_at_runs(ctx, dir_):
        rundir.require()
    if not rundir.journal.exists():
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    machine = replay(rundir.journal, make_policy).machine
    found = machine.job_of(job)
    if found is None:
        raise UnknownJob(f"no job {job!r}; `hpcsched status --states all` lists them")
    reason = machine.waiting_reason(found) or found.reason
    following = what_is_next(machine, found)
    if as_json:
        story = [
            {
                "at_s": note.at,
                "code": str(note.reason.why),
                "text": str(note.reason),
                "facts": note.reason.facts,
            }
            for note in found.story
        ]
        page = {
            "schema": 1,
            "id": found.id,
            "name": found.spec.name,
            "state": found.state,
            "reason": {"code": str(reason.why), "text": str(reason)} if reason else None,
            "role": found.role,
            "gpus": list(found.current.gpus) if found.state.active else [],
            "next": following,
            "story": story,
        }
        sys.stdout.buffer.write(msgspec.json.encode(page) + b"\n")
        return
    click.echo(f"job {found.id} ({found.spec.name}) is {found.state}" + _where(found))
    if reason:
        click.echo(f"  because: {reason}")
    for line in following:
        click.echo(f"  next: {line}")
    click.echo("story (time into the run):")
    for note in found.story:
        click.echo(f"  {clock(note.at):>10}  {note.reason}")


def _where(job: Job) -> str:
    if not job.state.active:
        return ""
    gpus = ", ".join(map(str, job.current.gpus))
    return f" on GPU {gpus} as {job.role}" if len(job.current.gpus) == 1 else f" on GPUs {gpus} as {job.role}"


def what_is_next(machine: Machine, job: Job) -> list[str]:
    """What will happen to the job, as far as it is decided or can be said."""
    profile, total = machine.profile(job), len(machine.devices)
    if job.state is JobState.SUSPENDING and job.target:
        return [f"it starts again on {plural(len(job.target.gpus), 'GPU')} as soon as it has saved"]
    if job.state in (JobState.STARTING, JobState.RUNNING):
        lines = []
        if job.remaining is not None and (job.rate or profile):
            rate = job.rate or (profile.rate(len(job.gpus)) if profile else 1.0)
            lines.append(
                f"{job.remaining} of {job.spec.steps} steps left at {rate:.4g} steps/s: "
                f"about {clock(job.remaining / rate)}"
            )
        if profile and total:
            least, most = job.limits(total)
            best = profile.optimal(most, least)
            if best > len(job.gpus):
                lines.append(f"promoted to {plural(best, 'GPU')} when they can be had and it pays")
        if not job.ready:
            lines.append("it has not said that it can be suspended, so it keeps these GPUs until it ends")
        return lines
    if job.id in machine.queue:
        ahead = sum(
            1
            for other in machine.jobs.values()
            if other.id in machine.queue and (other.submit_s, other.id) < (job.submit_s, job.id)
        )
        least, most = job.limits(total)
        wants = f"at least {least}"
        if profile:
            wants = f"{plural(profile.optimal(most, least), 'GPU')} (its fastest count)"
        free = f"{len(machine.free)} of {plural(total, 'GPU')} free"
        return [f"{plural(ahead, 'job')} before it; {free}; it wants {wants}"]
    return []
