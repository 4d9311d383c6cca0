"""`hpcsched run`: the main job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcsched import jobfile
from hpcsched.accounts import user_name
from hpcsched.cli.common import (
    Number,
    allocation_options,
    check_chart,
    database_path,
    dir_option,
    files,
    find_run,
    goes_on,
    json_option,
    naming_the_file,
    option,
    say,
    warm_processes,
)
from hpcsched.cli.jobs.directives import directives
from hpcsched.cli.jobs.given_jobs import check_programs, is_job_file, of_command, sweep_options
from hpcsched.cli.option_groups import GroupedOptions
from hpcsched.cli.run import policies
from hpcsched.cli.run.environments import environment_options, was_said
from hpcsched.cli.run.handed_on import words_of
from hpcsched.cli.run.last_words import tell_result
from hpcsched.cli.run.notifying import Notify, notify_options
from hpcsched.cli.run.observers import Display, Observers
from hpcsched.cli.run.staying import staying_options
from hpcsched.cli.run.watching import closed_before, group_of, share_option
from hpcsched.client.waiting import waiting_names
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.contract.variables import LANE_MODE
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, PythonEnvironment
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.patience import is_folder, kind_of
from hpcsched.store import run_folders

if TYPE_CHECKING:
    from hpcsched.agent.allocation.requeue import RequeuePlan
    from hpcsched.agent.resources import FindJobs
    from hpcsched.batch.base import BatchSystem
    from hpcsched.store.allocations import AllocationEntry
    from hpcsched.store.rundir import RunDir


_CPUS_PER_GPU = "CPU cores reserved for the jobs of each GPU; jobs without GPUs get the others (8)."
_MARGIN = "Safety margin before the end of the allocation, besides the time to save: seconds (60)."


_RELEASE = "Minutes after which nodes that nothing could use are given back; default: never."

_JOINABLE = "Let hosts of other allocations join this run (`hpcsched join`)."

_METRICS = "Have the run's state in this file, for Prometheus' textfile collector."

_POLICY = f"Policy: {policies.ALL}."

_UPDATE = "With --resume: apply changes in JOBS.toml to jobs that the run has; those that failed run again."


@click.command(cls=GroupedOptions)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[JOBS.toml | -- COMMAND...]", shell_complete=files
)
@dir_option
@option("--name", "-J", metavar="NAME", help="With a command: the job's name (default: the program's).")
@sweep_options
@option(
    "--devices",
    metavar="SPEC",
    default="auto",
    help="Devices: auto, cuda[:N], cpu:N, replay:N[@SPEED] or replay:NODE.toml[@SPEED].",
)
@option("--policy", metavar="P", cls=policies.Once, shell_complete=policies.complete, help=_POLICY)
@option("--policy-option", metavar="K=V", multiple=True, help="An option of the policy; can be repeated.")
@option("--profiles", metavar="F", multiple=True, help="Profile files, or names of shipped ones.")
@option("--device-type", metavar="T", help="Device type whose profiles count; default: what is found.")
@option("--resume", is_flag=True, help="Continue the run in the run directory, if there is one.")
@option("--update", is_flag=True, help=_UPDATE)
@option("--retry", is_flag=True, help="With --resume: run all failed jobs again, changed or not.")
@allocation_options
@option("--interface", metavar="I", help="Network interface (or address) for connections between hosts.")
@option("--margin", type=Number(min=0), default=60.0, help=_MARGIN)
@option("--requeue", is_flag=True, help="With work left at the end, put the batch job back into its queue.")
@option("--chain", is_flag=True, help="With work left at the end, submit a batch job that goes on.")
@option("--chain-script", metavar="F", type=click.Path(path_type=Path), help="What --chain submits.")
@option(
    "--max-restarts", type=click.IntRange(min=0), default=20, help="Most requeues or follow-up jobs (20)."
)
@option(
    "--checkpoints",
    metavar="D",
    type=click.Path(path_type=Path),
    help="Directory for checkpoints (the run directory).",
)
@option("--pyslurm", metavar="W", default="auto", help="auto, or off: Slurm's commands only.")
@option("--warm", metavar="N", default="auto", help="Warm processes on each host: auto, off or a number.")
@option("--cpus-per-gpu", metavar="N", type=click.IntRange(min=0), default=8, help=_CPUS_PER_GPU)
@option("--release-idle-nodes", metavar="MINUTES", type=Number(min=0), help=_RELEASE)
@option("--joinable", is_flag=True, help=_JOINABLE)
@click.option("--lead", nargs=3, type=(str, int, str), hidden=True, help="As `join` takes a run over.")
@option("--gantt", metavar="F.svg", type=click.Path(path_type=Path), help="Draw a Gantt chart at the end.")
@option(
    "--compare", metavar="P,...", multiple=True, help="At the end, compare with these policies, simulated."
)
@option("--grace", type=Number(min=0), default=30.0, help="Least time to save in: seconds (30).")
@option("--monitor", type=Number(min=0.1), default=5.0, help="Seconds between device samples (5).")
@option("--metrics-file", metavar="F.prom", type=click.Path(path_type=Path), help=_METRICS)
@option("--database", metavar="F", help="SQLite file with profiles and history.")
@option("--quiet", "-q", is_flag=True, help="No progress messages.")
@json_option
@click.pass_context
@environment_options
@staying_options
@share_option
@notify_options
def run(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    name: str | None,
    each: tuple[str, ...],
    array: str | None,
    at_once: int | None,
    **options: Any,
) -> int:
    """Run the jobs in JOBS.toml, or a command, in this allocation (or on this machine) until all have ended.

    Ctrl-C saves all jobs and stops (exit code 75; go on with --resume); a second one kills.
    In a batch job all is saved before the time is up; --requeue and --chain then come back by themselves.
    """
    file = is_job_file(words, elsewhere=options["environment"] is not None)
    if (file or not words) and (name or each or array or at_once):
        option_ = "--name goes" if name else "--each, --array and --at-once go"
        raise click.UsageError(f"{option_} with a command: run ... -- COMMAND")
    if file or not words:
        return conduct(ctx, jobs=Path(words[0]) if file else None, **options)
    if directives(words[0]):
        say(f"hpcsched: {words[0]}: #HPCSCHED lines are read by `submit` only", err=True)
    resume = goes_on(options)
    rundir = find_run(ctx, options["dir_"], begins=not resume)
    made = of_command(
        words,
        {},
        each=each,
        array=array,
        at_once=at_once,
        where="run",
        name=name,
        taken=[] if resume else waiting_names(rundir),
        numbered=not resume,
    )
    record = rundir.read_record() if resume else None
    if options["environment"] is None and not (record and record.environment):
        check_programs(made)
    return conduct(ctx, jobs=None, made=made, **options)


def _checked(metrics_file: Path) -> Path:
    """The file's absolute path; raises ConfigError for one that is not read, or that cannot be written."""
    path = metrics_file.absolute()
    if path.suffix != ".prom" or not is_folder(path.parent) or not os.access(path.parent, os.W_OK):
        accepted = "a file name that ends in .prom, in a folder that can be written"
        raise ConfigError(where="--metrics-file", got=str(metrics_file), accepted=accepted)
    return path


def conduct(
    ctx: click.Context,
    *,
    jobs: Path | None,
    made: tuple[JobSpec, ...] = (),
    dir_: str | None,
    devices: str,
    policy: str | None,
    policy_option: tuple[str, ...],
    profiles: tuple[str, ...],
    device_type: str | None,
    resume: bool,
    batch: str,
    hosts: str | Sequence[str] | None,
    launcher: str,
    interface: str | None,
    margin: float,
    requeue: bool,
    chain: bool,
    chain_script: Path | None,
    max_restarts: int,
    checkpoints: Path | None,
    pyslurm: str,
    warm: str,
    cpus_per_gpu: int,
    gantt: Path | None,
    compare: tuple[str, ...],
    grace: float,
    monitor: float,
    metrics_file: Path | None = None,
    joinable: bool = False,
    lead: tuple[str, int, str] | None = None,
    database: str | None,
    quiet: bool,
    as_json: bool,
    source: FindJobs | None = None,
    like: JobSpec | None = None,
    display: Callable[[Machine], Display] | None = None,
    check: Callable[[Machine], None] | None = None,
    report: Callable[[Any], int] | None = None,
    keep: Callable[[Any, Path], None] | None = None,
    update: bool = False,
    retry: bool = False,
    release_idle_nodes: float | None = None,
    environment: PythonEnvironment | None = None,
    stay_s: float | None = None,
    notify: Notify | None = None,
    share: str | None = None,
    command: str = "run",
    root: Path | None = None,
) -> int:
    """Run jobs as the options of `run` say; returns the exit code.

    `jobs` is a job file, `made` are jobs of a command line. `command` is the command that asks, and `root`
    the directory to give it next time, if not this run's.
    `source` gives more jobs, all of them `like` this one, `display` shows what happens, `check` raises when
    there is no sense in coming back, and `report` says in the place of `run`'s tables what has come of it; it
    returns the exit code of a run without work left. `keep` puts more of it into the database. `update`: what
    the job file says of jobs that the run has is taken. `retry`: failed jobs run again. `environment`:
    that of jobs that name none. `notify`: who is told of what. `share`: the group that may watch.
    """
    from hpcsched.agent import start
    from hpcsched.agent.allocation.requeue import RequeuePlan
    from hpcsched.agent.inbox import Inbox
    from hpcsched.agent.request import Leads, RunRequest
    from hpcsched.batch import open_batch
    from hpcsched.batch.kinds import restarted
    from hpcsched.cli.profile.lookup import layer_profile, parallel_programs, profile_finder, shared_uses
    from hpcsched.cli.run import waited
    from hpcsched.cli.run.live import Narrator
    from hpcsched.cli.run.live_table import LiveTable

    # The batch system's warnings are heard while the jobs run; before and after they would only end us.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    chain = chain or chain_script is not None
    if requeue and chain:
        raise click.UsageError("--requeue and --chain are two ways to come back: give one")
    if retry and (requeue or chain or not resume):
        raise click.UsageError("--retry goes with --resume, and not with --requeue or --chain")
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts or ())
    system = open_batch(batch, environ=os.environ, hosts=names, launcher=launcher, pyslurm=pyslurm)
    asked = {"resume": resume, "requeue": requeue, "chain": chain, "chain_script": chain_script}
    resume = goes_on(asked)
    rundir = find_run(ctx, dir_, begins=not resume)
    nothing = jobs is None and not made and source is None and stay_s is None
    if nothing and kind_of(rundir.journal) is None and not Inbox.waiting(rundir):
        raise click.UsageError(
            "name a job file (JOBS.toml) or a command; nothing is waiting in the run directory either"
        )
    if source is None and kind_of(rundir.root / run_folders.KEPT_SEARCH) is not None:
        accepted = "hpcsched tune SEARCH.toml --resume, or another --dir"
        raise ConfigError(where="--dir", got=f"{rundir.root} belongs to a search", accepted=accepted)
    record = rundir.read_record() if resume and kind_of(rundir.journal) is not None else None
    if record and ctx.get_parameter_source("devices") is click.core.ParameterSource.DEFAULT:
        devices = record.devices
    if record and record.environment and not was_said(ctx) and (environment is None or source is None):
        environment = record.environment
    file = jobfile.load(jobs, workdir=Path.cwd(), user=user_name()) if jobs else None
    if file and jobs:
        policies.check_file(file, jobs)
    given = file.jobs if file else made
    if not resume and (twice := sorted(waiting_names(rundir) & {job.name for job in given})):
        got = f"a job {twice[0]} waits in {rundir.root} already"
        accepted = f"another name, or `hpcsched cancel {twice[0]}` first"
        raise ConfigError(where=str(jobs or command), got=got, accepted=accepted)
    own = policies.of_run(rundir) if resume else None
    name, options = policies.for_run(ctx, policy, policy_option, file, own)
    others = policies.names_in(",".join(compare), where="--compare") if compare else []
    if gantt:
        check_chart(gantt)
    rules = ctx.obj.rules
    rules.check("dir", rundir.root, where="the run directory")
    if checkpoints:
        rules.check("checkpoints", checkpoints, where="--checkpoints")
    else:  # nobody has set anything, so no lock is touched
        rules.check_limit("checkpoints", rundir.root, where="checkpoints in --dir")
    group = group_of(share) if share else None
    if group is not None and (closed := closed_before(rundir.root, group)):
        say(f"hpcsched: --share: {share} cannot reach the run: {closed} is closed to it", err=True)
    mps = bool(ctx.obj.values.get("mps", True))
    if not mps and os.environ.get(LANE_MODE) == "mps":
        accepted = "another mode: the settings here have mps = false"
        raise ConfigError(where=LANE_MODE, got="mps", accepted=accepted)
    store = database_path(database)
    find = profile_finder(profiles, store)
    on_terminal = sys.stderr.isatty() and not quiet

    def shown(machine: Machine) -> Display:
        return LiveTable(machine) if on_terminal else Narrator(machine, quiet=quiet)

    observers = Observers(rundir, display=display or shown, notify=notify)
    order = RunRequest(
        dir=rundir.root,
        devices=devices,
        device_type=device_type,
        jobs=given,
        where=str(jobs or ("run" if made else "submit")),
        update=update,
        retry=retry and not restarted(os.environ),
        workdir=str(Path.cwd()),
        policy=name,
        policy_options=options,
        resume=resume,
        grace_s=grace,
        monitor_s=monitor,
        margin_s=margin,
        interface=interface,
        checkpoints=checkpoints.absolute() if checkpoints else None,
        standbys=warm_processes(warm),
        cpus_per_gpu=cpus_per_gpu,
        release_idle_s=None if release_idle_nodes is None else 60 * release_idle_nodes,
        stay_s=stay_s,
        environment=environment,
        source=source,
        like=like,
        metrics_file=_checked(metrics_file) if metrics_file else None,
        joinable=joinable,
        comes_back="requeue" if requeue else "chain" if chain else "",
        mps=mps,
        poll_s=ctx.obj.values.get("poll"),
        share=group,
        records=Path(ctx.obj.values["records"]) if "records" in ctx.obj.values else None,
        leads=Leads(lead[0], lead[1], tuple(filter(None, lead[2].split(",")))) if lead else None,
        words=words_of(ctx),
    )
    allocation = None if lead else waited.begun(system.kind)
    with observers:
        try:
            with naming_the_file(jobs):
                life = start.run(
                    order,
                    batch=system,
                    find_profiles=find,
                    find_parallel=lambda models: parallel_programs(store, models),
                    find_shared=lambda kind: shared_uses(store, kind),
                    find_layers=lambda model, kind: layer_profile(store, model, device_type or kind),
                    observe=observers.of,
                )
        finally:
            observers.close()
        code = life.exit_code
        if check is not None:
            check(life.machine)
        if code == WORK_LEFT:  # first of all: nothing that happens to a report must keep us from coming back
            plan = RequeuePlan(how=order.comes_back, most=max_restarts, script=chain_script)
            code = _stopped(life, system, rundir, plan, root or rundir.root, observers)
        meant = run_folders.named(root or rundir.root)
        again = f"hpcsched {command} --resume{meant}"
        try:
            if report is not None:
                code = report(life) if code in (0, 1, 2) else code
            elif not life.moved or as_json:  # of a run that goes on elsewhere `status` tells
                listed = f"hpcsched status{meant}"
                tell_result(life, as_json=as_json, gantt=gantt, compare=others, again=again, listed=listed)
                if code == 2 and life.edits.said:
                    edited = ", ".join(life.machine.run.jobs[job_id].spec.name for job_id in life.edits.said)
                    say(
                        f"hpcsched: {jobs or command}: what differs of {edited} (see above) was not run",
                        err=True,
                    )
        except OSError as error:
            with contextlib.suppress(OSError):
                say(f"hpcsched: the report cannot be written: {error.strerror}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor what is still buffered
            code = code or 1
        _put_away(life, store, str(rundir.root), allocation, keep)
        observers.over(life)
    return code


def _stopped(
    life: Any, batch: BatchSystem, rundir: RunDir, plan: RequeuePlan, root: Path, observers: Observers
) -> int:
    """Stopped with work left: come back if that is wanted and makes sense; the exit code."""
    from dataclasses import replace

    from hpcsched.agent.allocation.requeue import ALREADY_REQUEUED, requeue_or_chain, why_not_requeued
    from hpcsched.batch.base import EndReason
    from hpcsched.core.transitions.deadline import FROM_BATCH

    def tell(text: str) -> None:
        observers.last_word(text)
        with contextlib.suppress(OSError):
            say(f"hpcsched: {text}", err=True)

    if life.moved:
        tell("the run goes on in other allocations")
        return WORK_LEFT
    cause = life.machine.deadline.cause
    if cause == FROM_BATCH + EndReason.REQUEUED:
        tell(ALREADY_REQUEUED)
        return WORK_LEFT
    if not plan.how and cause == FROM_BATCH + EndReason.PREEMPTED and life.requeued_when_preempted:
        # By leaving before it is made to, it must not lose what it would have got.
        plan = replace(plan, how="requeue")
    reason = (
        why_not_requeued(life.machine, plan, before=life.before, short_of_hosts=life.short_of_hosts)
        if plan.how
        else None
    )
    if plan.how and reason is None:
        return requeue_or_chain(batch, plan, rundir, tell)
    left, why = life.machine.run.unfinished, f" (not by itself: {reason})" if reason else ""
    tell(f"stopped with {left} job{'s' * (left != 1)} left; go on with `{run_folders.go_on(root)}`{why}")
    return WORK_LEFT


def _put_away(
    life: Any,
    store: Path,
    directory: str,
    allocation: AllocationEntry | None,
    keep: Callable[[Any, Path], None] | None = None,
) -> None:
    """Finished jobs and learnt profiles into the database; without one the run is no less done."""
    from hpcsched.cli.run import waited
    from hpcsched.cli.run.archive import archive

    try:
        archive(life, store, directory)
        if allocation is not None:
            waited.keep(allocation, store)
        if keep is not None:
            keep(life, store)
    except HpcschedError as error:
        say(f"hpcsched: {error}; history and learnt profiles of this run are not kept", err=True)
