"""One life of an agent from beginning to end: take the run over, run it, put the results away."""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcsched
from hpcsched.agent.admission import Admission
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.loop import Agent, Observer, Outcome, Resources
from hpcsched.agent.monitor import Monitor
from hpcsched.agent.orders import Site, output_path
from hpcsched.agent.recovery import end_orphans, open_run, saved_steps
from hpcsched.batch.base import Allocation
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile
from hpcsched.devices import open_devices
from hpcsched.devices.replay import ReplayDevices
from hpcsched.errors import ConfigError
from hpcsched.launch.local import LocalLauncher
from hpcsched.policy import make_policy
from hpcsched.store.rundir import RunDir, RunLock, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter

Finder = Callable[[set[str], str], tuple[Profile, ...]]
"""Gives the profiles of these models for this device type, as far as there are any."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What `hpcsched run` was asked for.

    `policy` None: the policy of the run's earlier life, else marble. `grace_s` is the least time,
    in real seconds, that a worker has to save before it is ended by force.
    """

    dir: Path
    devices: str
    jobs: tuple[JobSpec, ...] = ()
    where: str = "submit"
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    grace_s: float = 30.0
    monitor_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a life left: how it ended, the machine, and what the report needs besides."""

    outcome: Outcome
    machine: Machine
    run: RunRecord
    speed: float
    device_kind: str
    outputs: Mapping[int, Path]
    killed: bool = False

    @property
    def downtime_s(self) -> float:
        """Real seconds between the lives of the run's agents."""
        lives = self.machine.lives
        return sum(
            max(0.0, new.wall - old.wall - (new.at - old.at) / self.speed)
            for old, new in itertools.pairwise(lives)
        )

    @property
    def exit_code(self) -> int:
        """0 all good, 1 a job failed, 75 stopped with work left, 130 killed by the user."""
        if self.killed:
            return 128 + signal.SIGINT
        if self.outcome is Outcome.STOPPED and not self.machine.finished:
            return 75
        return int(any(job.state == "FAILED" for job in self.machine.jobs.values()))


def run(
    order: Order,
    *,
    allocation: Allocation,
    find_profiles: Finder,
    observe: Callable[[Machine, float], Observer],
) -> Life:
    """Take over (or begin) the run in `order.dir` and stay with it until it ends or is drained.

    Raises ConfigError and StoreError before anything is started, StoreError later only if the
    journal cannot be written any more. Bad input for a new run leaves no run directory behind.
    """
    rundir = RunDir(order.dir.resolve())
    _refuse_other_run(rundir, order)
    host, user = socket.gethostname(), getpass.getuser()
    with contextlib.ExitStack() as stack:
        devices = open_devices(order.devices, host)
        stack.callback(devices.close)
        stand_ins = isinstance(devices, ReplayDevices)
        inventory = devices.inventory()

        def admission(machine: Machine) -> Admission:
            def find(models: set[str]) -> tuple[Profile, ...]:
                return find_profiles(models, devices.kind)

            return Admission(machine=machine, find_profiles=find, stand_ins=stand_ins)

        def submitted(machine: Machine) -> list[ev.Event]:
            new = [job for job in order.jobs if job.name not in machine.by_name]
            if not new:
                return []
            return admission(machine).events(new, at=machine.now, gpus=len(inventory), where=order.where)

        make_policy(order.policy or "marble", order.policy_options if order.policy else {})
        if not rundir.begun:
            submitted(Machine(make_policy))  # bad input leaves nothing behind
        rundir.make()
        stack.callback(RunLock(rundir).release)
        _refuse_other_run(rundir, order)  # begun and ended meanwhile
        rundir.sweep()
        before = rundir.read_record() if rundir.begun else None
        machine, journal, commands = open_run(rundir, make_policy)
        stack.callback(journal.close)
        policy, options = _policy(order, machine)
        record = RunRecord(
            id=before.id if before else uuid.uuid4().hex,
            version=hpcsched.__version__,
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=time.time(),
            devices=order.devices,
            policy=policy,
            allocation={"kind": allocation.kind, "id": allocation.id},
        )
        new_jobs = submitted(machine)
        end_orphans(machine, before, host=host, grace_s=order.grace_s)
        started = ev.AgentStarted(
            at=machine.now,
            wall=time.time(),
            devices=inventory,
            policy=policy,
            policy_options=options,
            grace_s=order.grace_s * devices.speed,
            saved_steps=saved_steps(rundir, machine),
            profiles=admission(machine).known_better(),
        )
        clock = RunClock(at=machine.now, speed=devices.speed)
        site = Site(
            rundir=rundir,
            run_id=record.id,
            host=host,
            user=user,
            speed=devices.speed,
            stand_ins=stand_ins,
        )
        selector = stack.enter_context(selectors.DefaultSelector())
        effects = Effects(
            machine=machine,
            launcher=LocalLauncher(cpus=devices.cpus, device_env=devices.environment),
            site=site,
            clock=clock,
            selector=selector,
        )
        snapshot = SnapshotWriter(
            rundir,
            machine,
            allocation={**record.allocation, "deadline": None},
            speed=devices.speed,
            user=user,
        )
        machine.changed.update(machine.jobs)
        for job in machine.jobs.values():
            if job.attempt:
                snapshot.output_of(job.id, str(output_path(job, site, job.attempt)))
        monitor = Monitor(devices.sample, interval_s=order.monitor_s, wake=lambda: None)
        resources = Resources(
            machine=machine,
            journal=journal,
            effects=effects,
            inbox=Inbox(rundir),
            snapshot=snapshot,
            monitor=monitor,
            clock=clock,
            selector=selector,
            observer=observe(machine, devices.speed),
            admission=admission(machine),
        )
        agent = Agent(resources, commands=commands)
        rundir.write_record(record)
        try:
            outcome = agent.run([started, *new_jobs])
        finally:
            if not monitor.close():
                stack.pop_all()  # a driver that hangs would hang us too; the system lets go of it all
        return Life(
            outcome=outcome,
            machine=machine,
            run=record,
            speed=devices.speed,
            device_kind=devices.kind,
            outputs={job.id: output_path(job, site, job.attempt) for job in machine.jobs.values()},
            killed=agent.killed,
        )


def _refuse_other_run(rundir: RunDir, order: Order) -> None:
    if rundir.begun and not order.resume:
        raise ConfigError(
            where=str(rundir.root),
            got="holds a run already",
            accepted="--resume to go on with it, or another --dir",
        )


def _policy(order: Order, machine: Machine) -> tuple[str, Mapping[str, Any]]:
    """Policy and options of this life: what is asked for, else the earlier life's; checked."""
    name = order.policy or (machine.policy.name if machine.policy else "marble")
    options = order.policy_options
    if order.policy is None and not options:
        options = machine.policy_options
    make_policy(name, options)
    return name, options
