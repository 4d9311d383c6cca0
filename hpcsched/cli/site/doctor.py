"""`hpcsched doctor`: what was found on this machine and in this allocation, and what is missing."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

import hpcsched
from hpcsched.cli.common import (
    database_path,
    dir_option,
    json_option,
    option,
    plural,
    run_folder,
    say,
    say_json,
)
from hpcsched.cli.run.environments import environment_options
from hpcsched.cli.site.bundle import USUAL
from hpcsched.cli.site.bundle import write as write_bundle
from hpcsched.durations import clock
from hpcsched.errors import BadEnvironment, BatchError, HpcschedError

if TYPE_CHECKING:
    from hpcsched.batch.base import Allocation, BatchSystem
    from hpcsched.core.model import Device, PythonEnvironment
    from hpcsched.launch.interpreters import Interpreter, Interpreters

_BUNDLE = f"Write all that a ticket needs ({USUAL}), at most 16 MiB before compression."

Finding = tuple[str, bool, str]
"""What was looked at, whether it is as it should be, and what was found."""


@click.command()
@dir_option
@option(
    "--devices",
    metavar="SPEC",
    default="auto",
    help="Devices: auto, cuda[:N], cpu:N, replay:N[@SPEED] or replay:NODE.toml[@SPEED].",
)
@option("--batch", metavar="KIND", default="auto", help="Batch system: auto, slurm, lsf, sge or none.")
@option(
    "--launcher",
    metavar="L",
    default="auto",
    help="Start of node agents: auto, srun, blaunch, jsrun, qrsh, ssh or local.",
)
@option("--hosts", metavar="A,B,...", default="", help="Hosts, where no batch system grants them.")
@option("--pyslurm", metavar="auto|off", default="auto", help="auto, or off: Slurm's commands only.")
@option("--database", metavar="F", help="SQLite file with profiles and history.")
@click.option(
    "--bundle",
    is_flag=False,
    flag_value=USUAL,
    type=click.Path(path_type=Path),
    metavar="[F.tar.gz]",
    help=_BUNDLE,
)
@click.option("--with-logs", is_flag=True, help="With --bundle: also the ends of the newest jobs' outputs.")
@click.option(
    "--anonymise", is_flag=True, help="With --bundle: replace names of user, home, hosts and account."
)
@json_option
@click.pass_context
@environment_options
def doctor(
    ctx: click.Context,
    dir_: str | None,
    devices: str,
    batch: str,
    launcher: str,
    hosts: str,
    pyslurm: str,
    database: str | None,
    bundle: Path | None,
    with_logs: bool,
    anonymise: bool,
    as_json: bool,
    environment: PythonEnvironment | None,
) -> int:
    """Check this machine: batch system, devices, hosts, run directory, database, optional parts, and the
    Python that runs trainers (of the environment named, or of jobs that name none).

    Inside an allocation with several hosts each of them is asked. Exit code 1 if something that a run
    needs does not work.
    """
    from hpcsched.batch import open_batch

    if bundle is None and (with_logs or anonymise):
        raise click.UsageError("--with-logs and --anonymise say what --bundle writes: give that too")
    root = run_folder(ctx, dir_)
    path = database_path(database)
    named = [name.strip() for name in hosts.split(",") if name.strip()]
    system = open_batch(batch, environ=os.environ, hosts=named, launcher=launcher, pyslurm=pyslurm)
    found: list[Finding] = [_python()]
    allocation = _allocation(system, found)
    several = allocation is not None and (len(allocation.hosts) > 1 or allocation.here is None)
    checks: list[Callable[[], Finding]] = [
        lambda: _directory(root),
        lambda: _database(path),
        lambda: _zmq(needed=several),
        lambda: _pyslurm(pyslurm),
        lambda: _module("matplotlib", "Gantt charts", "report"),
        lambda: _module("jinja2", "reports", "report"),
    ]
    if allocation is None or allocation.here is not None:
        here = [h.gpus for h in allocation.hosts if h.name == allocation.here] if allocation else []
        found += _devices(devices, environment, granted=len(here[0] or ()) if here else 0)
    found += _environments(environment)
    findings = [*found, *(check() for check in checks)]
    if several and allocation is not None:
        findings += _hosts(system, allocation, root, devices)
    lines = [f"{'ok     ' if ok else 'PROBLEM'}  {what}: {text}" for what, ok, text in findings]
    if as_json:
        page = {
            "schema": 1,
            "version": hpcsched.__version__,
            "findings": [{"what": w, "ok": ok, "found": text} for w, ok, text in findings],
        }
        say_json(page)
    else:
        say("\n".join(lines), lines=True)
    if bundle is not None:
        from hpcsched.cli.site.settings import rows, shown

        settings = "".join(f"{key} = {shown(value)}    # {origin}\n" for key, value, origin in rows(ctx.obj))
        held = write_bundle(
            bundle,
            root=root,
            findings="\n".join(lines) + "\n",
            settings=settings,
            environ=os.environ,
            with_logs=with_logs,
            anonymise=anonymise,
        )
        click.echo(f"{bundle} holds {', '.join(held)}", err=True)
        click.echo("look through it before you send it: secrets are found by their names only", err=True)
    return int(not all(ok for _, ok, _ in findings))


def _python() -> Finding:
    where = f"hpcsched {hpcsched.__version__}, Python {platform.python_version()} on {socket.gethostname()}"
    linux = sys.platform == "linux" and hasattr(os, "pidfd_open")
    return "version", linux, where + ("" if linux else "; needs Linux with pidfd (5.3 or later)")


def _environments(environment: PythonEnvironment | None) -> Iterator[Finding]:
    """The interpreters that may run trainers, and what each has."""
    from hpcsched.launch.interpreters import InterpreterInfo

    used = _trainers(environment)
    for python, has in _interpreters().candidates(environment):
        if not isinstance(has, InterpreterInfo):
            yield f"python {python}", environment is None, has
            continue
        worker = f"hpcsched-worker {has.worker}" if has.worker else "no hpcsched-worker"
        text = f"Python {has.python}, {worker}, {f'torch {has.torch}' if has.torch else 'no torch'}"
        why = has.why_not(python)
        if used and used.python == has.executable:
            text += "; runs trainers" if environment else "; runs trainers of jobs that name no environment"
        # One that means to train, and cannot, is not passed over by a run either.
        refused = bool(why) and (environment is not None or (used is None and has.trains))
        yield f"python {python}", not refused, f"{text}; {why}" if why else text


def _interpreters() -> Interpreters:
    from hpcsched.launch.environment import inherited
    from hpcsched.launch.interpreters import Interpreters

    return Interpreters(inherited(os.environ))


def _trainers(environment: PythonEnvironment | None) -> Interpreter | None:
    """The interpreter that runs trainers; None: there is none that can."""
    try:
        return _interpreters().trainers(environment)
    except BadEnvironment:
        return None


def _devices(spec: str, environment: PythonEnvironment | None, *, granted: int) -> list[Finding]:
    """What there is, and of each GPU whether the torch of trainers can use it."""
    from hpcsched.cli.site.gpu_check import check_gpus
    from hpcsched.devices import open_devices

    try:
        opened = open_devices(spec, socket.gethostname())
    except HpcschedError as error:
        return [("devices", False, str(error))]
    try:
        inventory = opened.inventory()
        handles = ", ".join(opened.visibility.short(device.handle) for device in inventory)
        text = f"{len(inventory)} x {opened.kind} ({handles})"
        if spec == "auto" and granted and opened.kind == "cpu":
            said = f"{plural(granted, 'GPU')} granted, but NVML sees none: it would be {text}"
            return [("devices", False, said)]
        gpus = opened.environment(inventory).get(opened.visibility.variable)
        interpreter = _trainers(environment) if gpus else None
        checked = check_gpus(opened, inventory, interpreter) if interpreter else []
        return [("devices", bool(inventory), text), *_compute_modes(inventory), *checked]
    finally:
        opened.close()


def _compute_modes(devices: Sequence[Device]) -> Iterator[Finding]:
    """What GPUs do not let processes do."""
    from hpcsched.agent.gpu_watch import compute_modes
    from hpcsched.core.model import ComputeMode

    for mode, line in compute_modes(devices).items():
        yield "compute mode", mode is not ComputeMode.PROHIBITED, line


def _allocation(system: BatchSystem, findings: list[Finding]) -> Allocation | None:
    """The allocation around us, if there is one; what was found of it goes onto `findings`."""
    if system.kind == "none":
        from hpcsched.batch.kinds import COMMANDS

        there = [n for n, tool in COMMANDS.items() if shutil.which(tool)]
        said = f"not inside a job; commands found: {', '.join(there) or 'none'}"
        findings.append(("batch system", True, said))
        allocation = system.allocation()
        if len(allocation.hosts) > 1:
            names = ", ".join(host.name for host in allocation.hosts)
            findings.append(("allocation", True, f"the hosts named: {names}"))
        if shutil.which("scontrol"):
            findings += _slurm_limits()
        return allocation
    try:
        findings.append(("batch system", True, system.version()))
    except BatchError as error:
        findings.append(("batch system", False, str(error)))
    try:
        allocation = system.allocation()
    except BatchError as error:
        findings.append(("allocation", False, str(error)))
        return None
    names = ", ".join(host.name for host in allocation.hosts[:8])
    names += ", ..." if len(allocation.hosts) > 8 else ""
    parts = [f"{allocation.kind} job {allocation.id} on {plural(len(allocation.hosts), 'host')} ({names})"]
    if allocation.here is None:
        parts.append("this is a launch node, not one of them")
    parts.append(f"started again {plural(allocation.restart_count, 'time')} so far")
    findings.append(("allocation", True, ", ".join(parts)))
    if allocation.deadline is None:
        findings.append(("time left", True, f"no end known: {allocation.kind} names none, or did not answer"))
    else:
        left = allocation.deadline - time.time()
        end = datetime.fromtimestamp(allocation.deadline).astimezone().strftime("%Y-%m-%dT%H:%M:%S%z")
        findings.append(("time left", left > 0, f"{clock(max(0.0, left))}, until {end}"))
    findings.append(("requeue", True, system.requeueable()))
    if why := allocation.refused.get("chain"):
        findings.append(("chain", True, f"not possible: {why}"))
    findings.append(("time to save", True, _ending(system, allocation)))
    findings += [("note", True, note) for note in allocation.notes]
    if allocation.kind == "slurm":
        findings += _slurm_limits()
    return allocation


def _slurm_limits() -> Iterator[Finding]:
    """What the site and the user's accounts allow, as far as Slurm tells; no limit is a fault."""
    from hpcsched.batch.slurm_limits import limits

    for what, words in limits(os.environ):
        yield what, True, words


def _ending(system: BatchSystem, allocation: Allocation) -> str:
    """How long there is to save when the batch system ends the job."""
    wait_s, preemption = system.kill_wait(), allocation.preemption
    wait = "a time that is not known" if wait_s is None else f"{wait_s:g} s"
    text = f"SIGKILL comes {wait} after the first signal"
    if preemption is None:
        return text
    grace = "a grace" if preemption.grace_s is None else f"a grace of {preemption.grace_s:g} s"
    then = "requeued" if preemption.requeues else "cancelled"
    return f"{text}; jobs may be preempted: with {grace}, and {then}"


def _hosts(system: BatchSystem, allocation: Allocation, root: Path, devices: str) -> Iterable[Finding]:
    from hpcsched.cli.site.host_check import check_hosts

    granted = any(host.gpus for host in allocation.hosts)
    need = devices.startswith("cuda") or (devices == "auto" and granted)
    try:
        verdicts = check_hosts(system, allocation.hosts, _existing(root), need_gpus=need)
    except (BatchError, OSError) as error:
        return [("hosts", False, str(error))]
    return [(verdict.what, verdict.ok, verdict.found) for verdict in verdicts]


def _existing(root: Path) -> Path:
    """The run directory, or what there is of the path to it."""
    return next(path for path in (root, *root.parents) if path.is_dir())


def _directory(root: Path) -> Finding:
    """Writing, renaming and locking where the run directory is, or would be."""
    base = _existing(root)
    try:
        with tempfile.TemporaryDirectory(prefix=".hpcsched-doctor-", dir=base) as folder:
            one, two = Path(folder, "a"), Path(folder, "b")
            one.write_text("x")
            one.rename(two)
            with two.open("r+") as first, two.open("r+") as second:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass
                else:
                    return "run directory", False, f"{root}: locks do not keep others out there"
    except OSError as error:
        return "run directory", False, f"{root}: {error.strerror}"
    free_gib = shutil.disk_usage(base).free / 2**30
    return "run directory", True, f"{root}: writing, renaming and locks work; {free_gib:.1f} GiB free"


def _database(path: Path) -> Finding:
    from hpcsched.store.database import Database

    if not path.exists():
        return "database", True, f"{path}: not there yet; made when first needed"
    try:
        with Database(path) as opened:
            return "database", True, f"{path}: {len(opened.profiles())} profiles, {len(opened.runs())} runs"
    except HpcschedError as error:
        return "database", False, str(error)


def _module(name: str, purpose: str, extra: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return name, True, f"not installed; {purpose} need it: pip install 'hpcsched[{extra}]'"
    return name, True, importlib.metadata.version(name)


def _zmq(*, needed: bool) -> Finding:
    """Several hosts talk by ZeroMQ, encrypted: its CURVE must be compiled in."""
    purpose = "several hosts need it"
    try:
        import zmq
    except ImportError as error:
        return "pyzmq", not needed, f"not usable ({error}); {purpose}"
    if not zmq.has("curve"):
        return "pyzmq", not needed, f"{zmq.__version__} without CURVE (encryption); {purpose}"
    return "pyzmq", True, f"{zmq.__version__} with CURVE"


def _pyslurm(wanted: str) -> Finding:
    """Optional: whatever is wrong with it, Slurm's commands serve as well."""
    if wanted == "off":
        return "pyslurm", True, "switched off; Slurm's commands are used"
    from hpcsched.batch.pyslurm import PySlurm

    why = PySlurm(os.environ).usable()
    return "pyslurm", True, "usable" if why is None else f"{why}; Slurm's commands are used"
