"""One life of an agent from beginning to end: take the run over, run it, put the results away."""

from __future__ import annotations

import getpass
import itertools
import os
import selectors
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcsched
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
        """0 all good, 1 a job failed, 75 stopped with work left."""
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
    journal cannot be written any more.
    """
    rundir = RunDir(order.dir.resolve())
    resuming = rundir.journal.exists()
    if resuming and not order.resume:
        raise ConfigError(
            where=str(rundir.root),
            got="holds a run already",
            accepted="--resume to go on with it, or another --dir",
        )
    make_policy(order.policy or "marble", order.policy_options)
    host = socket.gethostname()
    devices = open_devices(order.devices, host)
    rundir.make()
    lock = RunLock(rundir)
    try:
        stand_ins = isinstance(devices, ReplayDevices)
        before = rundir.read_record()
        recovered = open_run(rundir, make_policy)
        machine = recovered.machine
        grace_s = order.grace_s * devices.speed
        end_orphans(machine, before, host=host, grace_s=order.grace_s)
        policy = order.policy or (machine.policy.name if machine.policy else "marble")
        options = order.policy_options
        if order.policy is None and not options:
            options = machine.policy_options
        record = RunRecord(
            id=before.id if before and resuming else uuid.uuid4().hex,
            version=hpcsched.__version__,
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=time.time(),
            devices=order.devices,
            policy=policy,
            allocation={"kind": allocation.kind, "id": allocation.id},
        )
        clock = RunClock(at=machine.now, speed=devices.speed)
        user = getpass.getuser()
        site = Site(
            rundir=rundir,
            run_id=record.id,
            host=host,
            user=user,
            speed=devices.speed,
            stand_ins=stand_ins,
        )
        with selectors.DefaultSelector() as selector:
            effects = Effects(
                machine=machine,
                launcher=LocalLauncher(cpus=devices.cpus),
                devices=devices,
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
            monitor = Monitor(devices.sample, interval_s=order.monitor_s, wake=lambda: None)
            resources = Resources(
                machine=machine,
                journal=recovered.journal,
                effects=effects,
                inbox=Inbox(rundir),
                snapshot=snapshot,
                monitor=monitor,
                clock=clock,
                selector=selector,
                observer=observe(machine, devices.speed),
                find_profiles=lambda models: find_profiles(models, devices.kind),
                stand_ins=stand_ins,
            )
            agent = Agent(resources, commands=recovered.commands)
            started = ev.AgentStarted(
                at=clock.now(),
                wall=time.time(),
                devices=devices.inventory(),
                policy=policy,
                policy_options=options,
                grace_s=grace_s,
                saved_steps=saved_steps(rundir, machine),
            )
            new = [job for job in order.jobs if job.name not in machine.by_name]
            first = agent.beginning(started, new, where=order.where)
            rundir.write_record(record)
            try:
                outcome = agent.run(first)
            finally:
                monitor.close()
        outputs = {job.id: output_path(job, site, job.attempt) for job in machine.jobs.values()}
        return Life(
            outcome=outcome,
            machine=machine,
            run=record,
            speed=devices.speed,
            device_kind=devices.kind,
            outputs=outputs,
        )
    finally:
        devices.close()
        lock.release()
