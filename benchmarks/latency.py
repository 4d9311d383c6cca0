"""What a user waits for at the shell: whole processes, started anew each time, with 10,000 jobs in the run.

    python benchmarks/latency.py [--json] [--quick] [--verbose]

The run directory is written by hpcsched's own journal and snapshot; this program plays the living agent.
Commands are measured in turn, so that a busy moment hits all alike. `python -c pass` is the floor, with
`import click` beside it. Files are in the page cache. --verbose lists the heaviest imports of `status` on
stderr.
"""

from __future__ import annotations

import argparse
import getpass
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import Report, Scratch, hpcsched, main, median, ms, percentile

from hpcsched import __version__
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, JobSpec, Kind
from hpcsched.policy import make_policy
from hpcsched.store.journal import Journal
from hpcsched.store.profiles import load_profiles
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter

JOBS, QUICK_JOBS = 10_000, 200
ROUNDS, QUICK_ROUNDS = 25, 1
GOAL_S = 0.1
TOO_HEAVY = ("torch", "numpy", "sqlalchemy")
"""Never to be imported by `status`."""


DEADLINE_S = 30.0


def measure(options: argparse.Namespace) -> Report:
    jobs, rounds = (QUICK_JOBS, QUICK_ROUNDS) if options.quick else (JOBS, ROUNDS)
    with Scratch.make() as scratch:
        rundir = scratch.folder / "run"
        write_run(rundir, jobs)
        commands = {
            "status": hpcsched("--dir", rundir, "status"),
            "status_json": hpcsched("--dir", rundir, "status", "--json"),
            "help": hpcsched("--help"),
            "explain": hpcsched("--dir", rundir, "explain", jobs // 2),
            "python": [sys.executable, "-c", "pass"],
            "python_click": [sys.executable, "-c", "import click"],
        }
        # Each once without being timed: it must work, and leaves its byte code behind.
        outputs = {name: scratch.run(command, deadline_s=30) for name, command in commands.items()}
        if (lines := outputs["status"].count(b"\n")) != jobs + 1:
            raise RuntimeError(f"status printed {lines} lines for {jobs} jobs")
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                samples[name].append(_wall_s(command, scratch))
        imports = imports_of(commands["status"], scratch)
    report = Report(results={f"{name}_s": taken for name, taken in samples.items()})
    goals = {"status": GOAL_S, "status_json": GOAL_S, "help": GOAL_S}
    names = {
        "status": f"`hpcsched status` with {jobs:,} jobs",
        "status_json": f"`hpcsched status --json` with {jobs:,} jobs",
        "help": "`hpcsched --help`",
        "explain": f"`hpcsched explain` with {jobs:,} jobs",
        "python": "... floor: `python -c pass`",
        "python_click": '... floor: `python -c "import click"`',
    }
    for name, taken in samples.items():
        typical, goal = median(taken), goals.get(name)
        report.row(
            names[name],
            f"median {ms(typical)}, p90 {ms(percentile(taken, 0.9))}",
            goal="at most 100 ms" if goal else "",
            ok=typical <= goal if goal else None,
        )
    heavy = too_heavy(imports)
    report.row(
        f"... `status` imports {', '.join(TOO_HEAVY)}", ", ".join(heavy) or "no", goal="no", ok=not heavy
    )
    if options.verbose:
        _show(imports)
    return report


def _wall_s(command: list[str], scratch: Scratch) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, env=scratch.env, cwd=scratch.folder, stdout=subprocess.DEVNULL) as child:
        # Not wait(timeout): that looks every 50 ms only, which is as long as what is measured.
        ended = os.pidfd_open(child.pid)
        try:
            if not select.select([ended], [], [], DEADLINE_S)[0]:
                child.kill()
                raise TimeoutError(f"{command} did not end within {DEADLINE_S} s")
            took_s = time.perf_counter() - start
        finally:
            os.close(ended)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return took_s


def write_run(folder: Path, count: int) -> None:
    """A run of `count` jobs, one of them running on both GPUs, whose agent is this process."""
    rundir = RunDir(folder.resolve())
    rundir.make()
    host = socket.gethostname()
    devices = tuple(Device(index=i, host=host, kind="pretended", handle=str(i)) for i in range(2))
    profiles = load_profiles("marble-summit")
    machine = Machine(make_policy)
    events: list[ev.Event] = []

    def feed(event: ev.Event) -> None:
        events.append(event)
        for action in machine.handle(event):
            if isinstance(action, Launch):
                about: dict[str, Any] = {"job_id": action.job_id, "attempt": action.attempt}
                feed(ev.WorkersSpawned(at=0.1, host=host, processes=(), **about))
                feed(ev.WorkersReady(at=0.2, **about))

    feed(ev.AgentStarted(at=0.0, wall=time.time(), devices=devices, policy="marble"))
    feed(ev.ProfilesLoaded(at=0.0, profiles=profiles))
    specs = tuple(
        JobSpec(name=f"job-{i}", kind=Kind.REPLAY, model=profiles[i % len(profiles)].model, steps=1000)
        for i in range(count)
    )
    feed(ev.JobsSubmitted(at=0.0, first_id=1, jobs=specs))
    journal = Journal(rundir.journal)
    journal.append(events)
    journal.close()
    allocation = {"kind": "local", "id": None, "deadline": None}
    SnapshotWriter(rundir, machine, allocation=allocation, speed=1.0, user=getpass.getuser()).write(
        "RUNNING", 1.0
    )
    rundir.write_record(
        RunRecord(
            id="benchmark",
            version=__version__,
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=time.time(),
            devices="replay:2",
            policy="marble",
        )
    )


class Import(NamedTuple):
    """One line of `python -X importtime`: seconds without and with what it imports itself."""

    own_s: float
    total_s: float
    name: str
    depth: int


def imports_of(command: list[str], scratch: Scratch) -> list[Import]:
    """What a Python command imports, in order of completion."""
    traced = [sys.executable, "-X", "importtime", *(command[1:] if command[0] == sys.executable else command)]
    done = subprocess.run(
        traced, env=scratch.env, cwd=scratch.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, check=True, timeout=30,
    )  # fmt: skip
    found = []
    for line in done.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and len(parts) == 3 and parts[0].strip().isdecimal():
            depth = (len(parts[2]) - len(parts[2].lstrip()) - 1) // 2
            found.append(Import(int(parts[0]) / 1e6, int(parts[1]) / 1e6, parts[2].strip(), depth))
    return found


def too_heavy(imports: list[Import]) -> list[str]:
    """Those of TOO_HEAVY that are among them."""
    top = {found.name.partition(".")[0] for found in imports}
    return [name for name in TOO_HEAVY if name in top]


def _show(imports: list[Import], most: int = 5) -> None:
    total_s = sum(found.own_s for found in imports)
    print(f"imports of status: {len(imports)} modules, {ms(total_s)} (traced, so slower)", file=sys.stderr)
    for title, key in (("with what they import", "total_s"), ("by themselves", "own_s")):
        print(f"heaviest {title}:", file=sys.stderr)
        for found in sorted(imports, key=lambda i: -getattr(i, key))[:most]:
            print(f"  {ms(getattr(found, key)):>8}  {found.name}", file=sys.stderr)


if __name__ == "__main__":
    main("latency of commands", measure, "--verbose")
