"""Commands that change a run: through the inbox, so that they work from any host without a port."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hpcsched import jobfile
from hpcsched.accounts import user_name
from hpcsched.agent.inbox import USERS_SIGNALS, Answer, Command, send
from hpcsched.cli.common import (
    Number,
    dir_option,
    files,
    find_run,
    job_names,
    meant,
    option,
    say,
    select,
    whole_number,
)
from hpcsched.cli.jobs import without_agent
from hpcsched.cli.jobs.directives import WithDirectives
from hpcsched.cli.jobs.given_jobs import check_programs, exported, of_command, sweep_options
from hpcsched.cli.jobs.key_options import key_options, naming_the_option
from hpcsched.cli.run.environments import check_here, environment_options, filled_in, was_said
from hpcsched.client import waiting
from hpcsched.client.requests import ask, leave, names_in, wait_for, what_begins
from hpcsched.core.model import JobState, PythonEnvironment
from hpcsched.dialects import what_was_recognised
from hpcsched.durations import clock
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun
from hpcsched.printing import bounded, spans
from hpcsched.store.run_folders import go_on
from hpcsched.store.rundir import RunDir, agent_works
from hpcsched.store.status import Status, age_s, read_status

_EXPORT = "Variables for the jobs: names, with your values here, or NAME=VALUE."


def _living(rundir: RunDir) -> Status:
    """The status of a run whose agent lives; raises NoSuchRun otherwise."""
    status = waiting.read_all(rundir)
    if not status.run.alive:
        from hpcsched.cli.jobs import batch_job_status

        batch_job_status.ask(status.run)
        what = batch_job_status.sentence(status.run, clock(age_s(status.run)))
        again = "it is FINISHED (`hpcsched retry` runs jobs again)"
        what = what or (again if status.run.state == "FINISHED" else "")
        if line := waiting.what_takes_them(status):
            line = f"{line.removeprefix('no agent runs: ')}, and `hpcsched cancel` takes back what waits"
        what = "; ".join(filter(None, [what, line])) or "none has begun"
        raise NoSuchRun(f"no agent runs in {rundir.root}: {what}")
    return status


def _on_jobs(name: str, help_: str) -> click.Command:
    @click.command(name, help=help_)
    @click.argument("jobs", nargs=-1, required=True, shell_complete=job_names)
    @dir_option
    @click.pass_context
    def command(ctx: click.Context, jobs: tuple[str, ...], dir_: str | None) -> int:
        return _to_jobs(name, find_run(ctx, dir_), jobs)

    return command


def _to_jobs(command: str, rundir: RunDir, jobs: Sequence[str], *, signal: str = "") -> int:
    """Have a command carried out for the jobs of these names; the exit code."""
    if not agent_works(rundir) and (code := without_agent.leave(rundir, command, jobs)) is not None:
        return code
    status = _living(rundir)
    targets = [job.id for job in meant(status, jobs)]
    return _tell(status, ask(rundir, Command(command=command, targets=targets, signal=signal)))


def _words(keys: Sequence[str]) -> set[str]:
    return {word for key in keys for word in key.split(",")}


def _tell(status: Status, answer: Answer) -> int:
    """Say what was done to each job; the exit code: 1 if that was nothing."""
    names = {job.id: job.name for job in status.jobs}
    for job_id, text in zip(answer.ids, answer.outcomes, strict=False):
        say(f"job {job_id} ({names.get(job_id, '?')}): {text}", err=True)
    return int(bool(answer.done) and not any(answer.done))


_NOTHING = " Exit code 1: nothing could be done to any of them."
_NEXT = " Without an agent the next one does it, before it starts anything."


@click.command()
@click.argument("jobs", nargs=-1, required=True, shell_complete=job_names)
@dir_option
@click.option("--signal", "-s", metavar="SIG", help="Send this signal to their processes, and do no more.")
@click.pass_context
def cancel(ctx: click.Context, jobs: tuple[str, ...], dir_: str | None, signal: str | None) -> int:
    """End JOBS (ids, names, 3-7) for good.

    Without an agent the next one does it, before it starts anything; jobs that no agent has taken yet are
    cancelled now. Exit code 1: nothing could be done to any of them.
    """
    rundir = find_run(ctx, dir_)
    if signal is None:
        return _to_jobs("cancel", rundir, jobs)
    name = f"SIG{signal.upper().removeprefix('SIG')}"
    if name not in USERS_SIGNALS:
        raise ConfigError(where="--signal", got=repr(signal), accepted=", ".join(USERS_SIGNALS))
    return _to_jobs("signal", rundir, jobs, signal=name)


hold = _on_jobs("hold", "Keep waiting JOBS from starting until released." + _NEXT + _NOTHING)
release = _on_jobs("release", "Let held JOBS go." + _NEXT + _NOTHING)
suspend = _on_jobs("suspend", "Have running JOBS save and leave their GPUs until resumed." + _NOTHING)
resume = _on_jobs("resume", "Let suspended JOBS go on." + _NEXT + _NOTHING)


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=job_names)
@dir_option
@click.option("--failed", is_flag=True, help="All jobs that have failed.")
@click.option("--from-scratch", is_flag=True, help="From the beginning; checkpoints are put aside.")
@click.pass_context
def retry(
    ctx: click.Context, jobs: tuple[str, ...], dir_: str | None, failed: bool, from_scratch: bool
) -> int:
    """Run JOBS (ids, names, 3-7) that have ended again, from their newest checkpoints.

    Jobs that were cancelled because one of JOBS did not complete run too. A job that has completed, and has
    nothing left to do, begins once more. Without a running agent this waits for the next `hpcsched
    run --resume`. Exit code 1: nothing could be done to any of them.
    """
    if bool(jobs) == failed:
        raise click.UsageError("name jobs, or give --failed")
    rundir = find_run(ctx, dir_)
    status = read_status(rundir)
    chosen = [job for job in status.jobs if JobState(job.state).failed] if failed else select(status, jobs)
    of_arrays = _words(jobs)
    # Of an array those that did not complete are meant.
    done = JobState.COMPLETED
    chosen = [job for job in chosen if not (job.array in of_arrays and job.state == done)] or chosen
    if not chosen:
        raise HpcschedError("no job has failed")
    command = Command(command="retry", targets=[job.id for job in chosen], from_scratch=from_scratch)
    if agent_works(rundir):
        return _tell(status, ask(rundir, command))
    from hpcsched.agent.command_outcomes import command_outcome
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    machine = replay(rundir.journal, make_policy).machine
    code = _tell(status, command_outcome(machine, command, at=machine.run.now, cause="")[1])
    if code == 0:
        send(rundir, command)
        what = f"no agent in {rundir.root}; the next `{go_on(rundir.root)}` does it"
        say(f"hpcsched: {what}", err=True)
    return code


@click.command()
@dir_option
@click.option("--wait/--no-wait", default=True, help="Wait until all has been saved (default).")
@click.pass_context
def drain(ctx: click.Context, dir_: str | None, wait: bool) -> int:
    """Save all jobs, start nothing, stop the run. Go on with `hpcsched run --resume`."""
    rundir = find_run(ctx, dir_)
    _living(rundir)
    ask(rundir, Command(command="drain"))
    while wait:
        status = read_status(rundir, only=())
        if status.run.state in ("STOPPED", "FINISHED"):
            break
        if status.run.stale:
            raise NoSuchRun(f"the agent is gone before it had saved all; go on with `{go_on(rundir.root)}`")
        time.sleep(0.2)
    return 0


@click.command(cls=WithDirectives)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[JOBS.toml | -- COMMAND...]", shell_complete=files
)
@dir_option
@option("--name", "-J", metavar="NAME", help="Name (default: the program's, with a number).")
@option("--model", metavar="M", help="Key of the profile (default: the name).")
@option("--steps", type=int, help="Total work in steps.")
@option("--gpus", "-G", metavar="N", default="auto", help="GPUs: auto, a number, or MIN-MAX.")
@option("--after", metavar="JOB", multiple=True, help="Start when this job has completed; can be repeated.")
@option("--output", "-o", metavar="PATTERN", help="Output file, with %j %A %a %x %N %u.")
@option("--priority", type=int, metavar="N", help="A higher one goes first in line (0).")
@option("--nice", type=int, is_flag=False, flag_value=100, metavar="[N]", help="As --priority -N (100).")
@option("--retries", type=int, help="Failures in a row allowed (2).")
@click.option("--export", metavar="NAME,...", multiple=True, help=_EXPORT)
@option(
    "--processes",
    metavar="P",
    default="auto",
    help="Processes on each host: auto, per-gpu (one for each GPU), or a number.",
)
@click.option("--one-process", is_flag=True, hidden=True, help="The same as --processes 1.")
@key_options
@click.option("--update", is_flag=True, help="Apply changes to jobs that the run has; failed jobs run again.")
@click.option("--parsable", is_flag=True, help="Print the ids only.")
@sweep_options
@click.pass_context
@environment_options
def submit(
    ctx: click.Context,
    words: tuple[str, ...],
    dir_: str | None,
    name: str | None,
    model: str | None,
    steps: int | None,
    gpus: str,
    after: tuple[str, ...],
    output: str | None,
    priority: int | None,
    nice: int | None,
    retries: int | None,
    export: tuple[str, ...],
    processes: str,
    one_process: bool,
    keys: dict[str, Any],
    update: bool,
    parsable: bool,
    each: tuple[str, ...],
    array: str | None,
    at_once: int | None,
    environment: PythonEnvironment | None,
) -> int:
    """Put jobs into a run: `submit JOBS.toml`, or `submit [options] -- COMMAND...`; prints their ids.

    In the place of a COMMAND: `--trainer mymodels:Net --args lr=0.1`.

    Jobs have the environment of the run, not of this command; see --export. Options may stand in lines
    `#HPCSCHED --gpus 2` at the top of a script that is the command.

    Without a running agent they wait in the run directory for the next `hpcsched run`. Differences from jobs
    that the run has already are listed, and applied with --update. Exit code 2: one was not applied.
    """
    rundir = find_run(ctx, dir_, begins=not update)
    living, taken, arrays = names_in(rundir)
    file = len(words) == 1 and words[0].endswith(".toml")
    if file:
        _of_commands_only(ctx)
        path = Path(words[0])
        user = user_name()
        jobs = jobfile.load(path, workdir=Path.cwd(), user=user, known=taken, arrays=arrays, again=True).jobs
    elif words or "trainer" in keys:
        if words and "trainer" in keys:
            raise click.UsageError("a COMMAND and --trainer are two jobs: give one")
        if words and "workdir" in keys and "/" in words[0]:  # it is here, as sbatch's script is
            words = (os.path.abspath(words[0]), *words[1:])  # noqa: PTH100
        if nice is not None:
            priority = (priority or 0) - nice
        optional = {"model": model, "steps": steps, "output": output, "priority": priority}
        optional |= {"retries": retries}
        keys |= {key: value for key, value in optional.items() if value is not None}
        waits_for = [name for key in after for name in arrays.get(key, [key])]
        keys |= {"gpus": _gpus(gpus), "after": waits_for, "env": exported(export)}
        count = whole_number(processes)
        keys["processes"] = 1 if one_process else processes if count is None else count
        with naming_the_option(ctx):
            jobs = of_command(
                words,
                keys,
                each=each,
                array=array,
                at_once=at_once,
                where="submit",
                name=name,
                taken=taken,
                arrays=arrays,
                numbered=True,
                again=update,
            )
    else:
        raise click.UsageError("name a job file (JOBS.toml), or a command after --")
    jobs = tuple(filled_in(jobs, environment if was_said(ctx) else None))
    record = rundir.read_record()
    here = living and record is not None and record.host == socket.gethostname()
    doubts = list(check_here(jobs, here=here))
    if not file and environment is None and not (record and record.environment):
        try:  # what is in the PATH of the run is known when it is there
            unsure = check_programs(jobs, same_path=False)
        except ConfigError as error:
            if not living or here:
                raise
            unsure = [error]
        doubts += [f"{error.where}: {error.got}" for error in unsure]
    command = Command(command="submit", jobs=list(jobs), update=update, workdir=str(Path.cwd()))
    answer = ask(rundir, command) if living else leave(rundir, command, taken)
    if not living and command.jobs:
        say(f"hpcsched: no agent in {rundir.root}; the next `{what_begins(rundir)}` takes them", err=True)
    for doubt in doubts:
        say(f"hpcsched: submitted all the same: {bounded(doubt)} (on this host, with this PATH)", err=True)
    for line in what_was_recognised(jobs):
        say(f"hpcsched: {line}", err=True)
    outcomes = answer.outcomes or [""] * len(jobs)
    new: dict[str, list[int]] = {}
    for job_id, spec, outcome in zip(answer.ids, jobs, outcomes, strict=True):
        if outcome:
            say(f"job {spec.name}: {outcome}", err=True)
        elif parsable:
            say(str(job_id))
        else:
            new.setdefault(spec.array.name if spec.array else spec.name, []).append(job_id)
    for called, ids in new.items():
        say(f"submitted job{'s' * (len(ids) > 1)} {spans(ids)} ({called})")
    return 2 if answer.kept else 0


def _of_commands_only(ctx: click.Context) -> None:
    """Refuse options that say of a command what a job file says itself."""
    beside = ("words", "dir_", "update", "parsable", *jobfile.ENVIRONMENTS)
    for parameter in ctx.command.params:
        said = ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if said and parameter.name not in beside:
            raise click.UsageError(f"{parameter.opts[0]} is not for a job file, which says that itself")


def _gpus(text: str) -> str | int | dict[str, int]:
    least, dash, most = text.partition("-")
    try:
        if text == "auto":
            return text
        return {"min": int(least), "max": int(most)} if dash else int(text)
    except ValueError:
        raise ConfigError(where="--gpus", got=repr(text), accepted="auto, a number, or MIN-MAX") from None


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=job_names)
@dir_option
@click.option("--timeout", type=Number(min=0), help="Give up after this many seconds.")
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], dir_: str | None, timeout: float | None) -> int:
    """Wait until JOBS (default: all) have ended. Exit code 0: all completed; 1: one has not."""
    rundir = find_run(ctx, dir_)
    mine = wait_for(
        rundir,
        lambda status: select(status, jobs) if jobs else status.jobs,
        only=jobs or None,
        timeout_s=timeout,
    )
    return int(any(job.state != "COMPLETED" for job in mine))
