"""What `hpcsched report` says of the run itself: only what its record, its journal or its snapshot hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import datetime

from hpcsched.cli.common import plural
from hpcsched.cli.run.report_versions import of_trainings
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device
from hpcsched.errors import HpcschedError, NoSuchRun, StoreError
from hpcsched.printing import gpus
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_run

MOST_HOSTS = 16
"""Hosts that are named one by one; of more the first, and how many they are."""

MOST_VERSION = 64
"""Characters of a version."""

MOST_LIVES = 10
"""Agents whose times are told: the newest."""


def replayed(rundir: RunDir) -> Machine:
    """The run as its journal tells it. Raises NoSuchRun if it has not started."""
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    machine = replay(rundir.journal, make_policy).machine if rundir.begun else None
    if machine is None or machine.decisions.policy is None:
        raise NoSuchRun(f"the run in {rundir.root} has not started yet")
    return machine


def state_of(rundir: RunDir, machine: Machine) -> tuple[str, list[str]]:
    """The run's state by its snapshot, and what has to be said about it."""
    from hpcsched.cli.jobs import batch_job_status
    from hpcsched.durations import clock
    from hpcsched.store.status import age_s, read_run

    try:
        run = read_run(rundir)
    except (NoSuchRun, StoreError):
        return ("FINISHED" if machine.run.finished else "UNKNOWN"), []
    batch_job_status.ask(run)
    sentence = batch_job_status.sentence(run, clock(age_s(run)))
    return ("STALE" if run.stale else run.state), [sentence] if sentence else []


def began(machine: Machine) -> str:
    """The time at which the run began, and up to which it is shown."""
    first = datetime.fromtimestamp(machine.run.lives[0].wall).astimezone()
    text = f"Began {first.isoformat(sep=' ', timespec='seconds')}"
    if len(machine.run.lives) > 1:
        text += f", resumed {plural(len(machine.run.lives) - 1, 'time')}"
    if machine.run.finished:
        return f"{text}."
    from hpcsched.durations import clock

    return f"{text}. This shows it until {clock(machine.run.now)} into the run."


def facts_of(rundir: RunDir, machine: Machine) -> list[tuple[str, str]]:
    """The facts on a run that has begun, as (name, words)."""
    noun = machine.ledger.noun
    facts = [("run", machine.run.run_id)] if machine.run.run_id else []
    facts += [("policy", _policy(machine)), *_by_record(rundir), *of_trainings(rundir, machine)]
    facts += [("host", line) for line in _devices(machine.hosts.there_at_first)]
    facts += [("host joined", line) for line in _joined(machine)]
    facts += [("lost", f"{gpus([index], noun)}: {why}") for index, why in sorted(machine.ledger.lost.items())]
    facts += [
        ("CPU cores", f"{plural(len(cores.own), 'core')} on {host} for jobs without {noun}s")
        for host, cores in machine.ledger.host_cores.items()
        if cores.own
    ][:MOST_HOSTS]
    lives = machine.run.lives
    if len(lives) > 1:
        times = [datetime.fromtimestamp(life.wall).astimezone() for life in lives[-MOST_LIVES:]]
        shown = ", ".join(time.isoformat(sep=" ", timespec="seconds") for time in times)
        more = f"{len(lives) - MOST_LIVES} earlier ones, then " if len(lives) > MOST_LIVES else ""
        facts.append(("agents began", more + shown))
    return facts


def _joined(machine: Machine) -> Iterator[str]:
    from hpcsched.durations import clock

    for one in machine.hosts.joined[-MOST_HOSTS:]:
        until = "" if one.left is None else f", until {clock(one.left)}"
        of = plural(len(one.gpus), machine.ledger.noun)
        yield f"{one.host} with {of}, from {clock(one.at)} into the run{until}"


def _policy(machine: Machine) -> str:
    decisions = machine.decisions
    options = ", ".join(f"{name}={value}" for name, value in decisions.options.items())
    name = decisions.policy.name if decisions.policy else "-"
    return name + (f" with {options}" if options else "")


def _by_record(rundir: RunDir) -> Iterator[tuple[str, str]]:
    """What the newest agent has written of itself."""
    record = rundir.read_record()
    if record is None:
        return
    python = f" with Python {record.python[:MOST_VERSION]}" if record.python else ""
    yield "hpcsched", f"{record.version[:MOST_VERSION]}{python}, on {record.host}"
    yield "devices", record.devices
    if record.environment is not None:
        yield "environment", f"{record.environment.kind} {record.environment.name}"
    allocation = dict(record.allocation)
    with contextlib.suppress(HpcschedError):  # without a snapshot the record alone
        allocation |= read_run(rundir).allocation
    kind, job_id = allocation.get("kind"), allocation.get("id")
    if job_id:
        cluster = f" on {allocation['cluster']}" if allocation.get("cluster") else ""
        following = f"; {allocation['next']} goes on" if allocation.get("next") else ""
        yield "batch job", f"{kind} {job_id}{cluster}{following}"


def _devices(devices: Iterable[Device]) -> list[str]:
    """The hosts with their devices, as the newest agent found them."""
    hosts: dict[str, dict[str, int]] = {}
    for device in devices:
        memory = "" if device.memory_mib is None else f" with {device.memory_mib / 1024:.4g} GiB"
        kinds = hosts.setdefault(device.host, {})
        kinds[f"{device.kind}{memory}"] = kinds.get(f"{device.kind}{memory}", 0) + 1
    lines = [
        f"{host}: {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}"
        for host, kinds in list(hosts.items())[:MOST_HOSTS]
    ]
    return lines + ([f"and {len(hosts) - MOST_HOSTS} more hosts"] if len(hosts) > MOST_HOSTS else [])
