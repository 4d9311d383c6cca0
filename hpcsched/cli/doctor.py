"""`hpcsched doctor`: what was found on this machine, and what is missing."""

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
from collections.abc import Callable
from pathlib import Path

import click

import hpcsched
from hpcsched.cli.common import database_path, dir_option, find_run, json_option, option
from hpcsched.errors import HpcschedError

Finding = tuple[str, bool, str]
"""What was looked at, whether it is as it should be, and what was found."""


@click.command()
@dir_option
@option("--devices", metavar="SPEC", default="auto", help="auto, cuda[:N], cpu:N or replay:N[@SPEED].")
@option("--database", metavar="F", help="SQLite file with profiles and history.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, dir_: str | None, devices: str, database: str | None, as_json: bool) -> int:
    """What was found here: devices, batch system, run directory, database, optional parts.

    Exit code 1 if something that a run needs does not work.
    """
    root = find_run(ctx, dir_).root
    path = database_path(database)
    checks: list[Callable[[], Finding]] = [
        _python,
        lambda: _devices(devices),
        _batch_system,
        lambda: _directory(root),
        lambda: _database(path),
        lambda: _module("torch", "trainer jobs", "torch"),
        lambda: _module("matplotlib", "Gantt charts", "report"),
    ]
    findings = [check() for check in checks]
    if as_json:
        import msgspec

        page = {
            "schema": 1,
            "version": hpcsched.__version__,
            "findings": [{"what": w, "ok": ok, "found": found} for w, ok, found in findings],
        }
        sys.stdout.buffer.write(msgspec.json.encode(page) + b"\n")
    else:
        for what, ok, found in findings:
            click.echo(f"{'ok     ' if ok else 'PROBLEM'}  {what}: {found}")
    return int(not all(ok for _, ok, _ in findings))


def _python() -> Finding:
    where = f"hpcsched {hpcsched.__version__}, Python {platform.python_version()} on {socket.gethostname()}"
    linux = sys.platform == "linux" and hasattr(os, "pidfd_open")
    return "version", linux, where + ("" if linux else "; needs Linux with pidfd (5.3 or later)")


def _devices(spec: str) -> Finding:
    from hpcsched.devices import open_devices

    try:
        opened = open_devices(spec, socket.gethostname())
    except HpcschedError as error:
        return "devices", False, str(error)
    try:
        inventory = opened.inventory()
        handles = ", ".join(device.handle for device in inventory)
        return "devices", bool(inventory), f"{len(inventory)} x {opened.kind} ({handles})"
    finally:
        opened.close()


def _batch_system() -> Finding:
    for name, variable in (("Slurm", "SLURM_JOB_ID"), ("LSF", "LSB_JOBID")):
        if job := os.environ.get(variable):
            return "batch system", True, f"inside {name} job {job} (its deadline is not followed yet)"
    there = [n for n, tool in (("Slurm", "squeue"), ("LSF", "bjobs")) if shutil.which(tool)]
    return "batch system", True, f"not inside a job; commands found: {', '.join(there) or 'none'}"


def _directory(root: Path) -> Finding:
    """Writing, renaming and locking where the run directory is, or would be."""
    base = next(p for p in (root, *root.parents) if p.is_dir())
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
