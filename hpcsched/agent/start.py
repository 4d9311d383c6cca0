"""One life of an agent from beginning to end: take the run over, run it, put the results away."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcsched
from hpcsched.accounts import user_name
from hpcsched.agent.admission import Admission, Edits
from hpcsched.agent.allocation.ending import Ending, forced_s, on_run_clock
from hpcsched.agent.allocation.requeue import Standing
from hpcsched.agent.allocation.watch import AllocationWatch
from hpcsched.agent.clock import RunClock
from hpcsched.agent.cpu_cores import CPUS_PER_GPU
from hpcsched.agent.effects import Effects
from hpcsched.agent.hosts import Place, described, node_agents, this_host
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.launch_plans import FindLayers, Site, output_path
from hpcsched.agent.loop import Agent, Outcome
from hpcsched.agent.monitor import Monitor
from hpcsched.agent.recovery import (
    end_orphans,
    open_run,
    put_strangers_aside,
    refuse_lost_journal,
    saved_steps,
    seen_steps,
)
from hpcsched.agent.resources import Observer, Resources, Source
from hpcsched.agent.run_lock import lock, refuse_other_run
from hpcsched.batch.base import Allocation, BatchSystem
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import most_cores
from hpcsched.core.model import JobSpec, PythonEnvironment
from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.launch.remote.keys import SERVE_ON_S
from hpcsched.launch.spawn import ignoring
from hpcsched.policy import make_policy
from hpcsched.store.registry import register
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter

UNTOLD_GRACE_S = 3600.0
"""What a time of grace may be that we are not told; whether there still is a head is another matter."""

Finder = Callable[[set[str], str], tuple[Profile, ...]]
"""Gives the profiles of these models for this device type, as far as there are any."""


FindParallel = Callable[[set[str]], Sequence[Program]]
"""Gives the programs of these models that have said that they are parallel."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What `hpcsched run` was asked for.

    `policy` None: the policy of the run's earlier life, else marble. `grace_s` is the least time,
    in real seconds, that a worker has to save before it is ended by force. `margin_s` is kept before the
    end of the allocation besides what saving is known to take. `interface` is the network interface (or
    address) that hosts meet on, `checkpoints` a directory to use for them instead of the run directory,
    `standbys` the most warm processes that wait on a host, None for none at all (see `LocalLauncher`).
    `cpus_per_gpu` cores are kept for the jobs of each GPU: the others are for jobs that need none.
    `environment`: of jobs that name none. `source` gives more jobs as the run goes on. `update`: what `jobs`,
    read in `workdir`, say of jobs that the run has already is taken; else it keeps its own.
    """

    dir: Path
    devices: str
    jobs: tuple[JobSpec, ...] = ()
    where: str = "submit"
    update: bool = False
    workdir: str = ""
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    grace_s: float = 30.0
    monitor_s: float = 5.0
    margin_s: float = 60.0
    interface: str | None = None
    checkpoints: Path | None = None
    standbys: int | None = None
    cpus_per_gpu: int = CPUS_PER_GPU
    environment: PythonEnvironment | None = None
    source: Source | None = None


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a life left: how it ended, the machine, and what the report needs besides."""

    outcome: Outcome
    machine: Machine
    run: RunRecord
    speed: float
    device_kind: str
    outputs: Mapping[int, Path]
    checkpoints: Mapping[int, Path]
    """Where the checkpoints of each job are."""
    before: Standing
    """How far the run was when this life began."""
    edits: Edits
    """What became of what the job file says of jobs that the run had already."""
    attempts_before: int
    """Attempts of all jobs, before this life."""
    short_of_hosts: bool = False
    """Whether hosts of the allocation did not come, or were lost."""
    requeued_when_preempted: bool = False
    """Whether the batch system puts this job back into its queue by itself when it takes its hosts away."""
    killed: bool = False

    @property
    def downtime_s(self) -> float:
        """Real seconds between the lives of the run's agents."""
        lives = self.machine.run.lives
        return sum(
            max(0.0, new.wall - old.wall - (new.at - old.at) / self.speed)
            for old, new in itertools.pairwise(lives)
        )

    @property
    def exit_code(self) -> int:
        """0 all good, 1 a job failed, 2 an edit of the job file came to nothing, WORK_LEFT stopped with work
        left, 130 killed by the user.

        An edit that was kept out is never covered by a 0; where nothing was left to do, by a 1 neither.
        """
        if self.killed:
            return 128 + signal.SIGINT
        if self.outcome is Outcome.STOPPED and not self.machine.run.finished:
            return WORK_LEFT
        failed = any(job.state == "FAILED" for job in self.machine.run.jobs.values())
        idle = _attempts(self.machine) == self.attempts_before
        if (idle and self.edits.said) or (self.edits.ignored and not failed):
            return 2
        return int(failed)


def run(
    order: Order,
    *,
    batch: BatchSystem,
    find_profiles: Finder,
    find_layers: FindLayers,
    find_parallel: FindParallel = lambda models: (),
    observe: Callable[[Machine], Observer],
) -> Life:
    """Take over (or begin) the run in `order.dir` and stay with it until it ends or is drained.

    Raises ConfigError, BatchError and StoreError before anything is started, StoreError later only if the
    journal cannot be written any more. Bad input for a new run leaves no run behind.
    """
    rundir = RunDir(order.dir.resolve())
    allocation = batch.allocation()
    refuse_other_run(rundir, resume=order.resume)
    make_policy(order.policy or "marble", order.policy_options if order.policy else {})
    host, user = socket.gethostname(), user_name()
    with contextlib.ExitStack() as stack:
        # Its warnings would end us while the loop does not listen; the end time is followed anyway.
        stack.enter_context(ignoring(frozenset({signal.SIGUSR1, signal.SIGUSR2})))
        several = len(allocation.hosts) > 1 or allocation.here is None
        place = None if several else _here(order, allocation)
        if place:
            stack.callback(place.close)
            if not rundir.begun:
                # Bad input leaves nothing behind.
                _submitted(order, Machine(make_policy), place, find_profiles, find_parallel)
        rundir.make()
        stack.callback(lock(rundir, resume=order.resume).release)
        refuse_other_run(rundir, resume=order.resume)  # begun and ended meanwhile
        refuse_lost_journal(rundir)
        rundir.sweep()
        before = rundir.read_record() if rundir.begun else None
        machine, journal, commands = open_run(rundir, make_policy)
        stack.callback(journal.close)
        standing, attempts_before = Standing.of(machine), _attempts(machine)
        hosts = max(1, len(allocation.hosts))
        end_orphans(rundir, machine, before, host=host, grace_s=order.grace_s, hosts=hosts)
        run_id = before.id if before else machine.run.run_id or uuid.uuid4().hex
        observer = observe(machine)

        def say(text: str) -> None:
            with contextlib.suppress(OSError):  # nobody reads standard error any more
                observer.message(text)

        if place is None:
            place = node_agents(
                order.devices,
                batch,
                allocation,
                run_id=run_id,
                run_dir=rundir.root,
                interface=order.interface,
                grace_s=order.grace_s,
                say=say,
                standbys=order.standbys,
                cpus_per_gpu=order.cpus_per_gpu,
                **serving(batch, allocation),
            )
            stack.callback(place.close)
        policy, options = _policy(order, machine)
        record = RunRecord(
            id=run_id,
            version=hpcsched.__version__,
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=time.time(),
            devices=order.devices,
            policy=policy,
            allocation={"kind": allocation.kind, "id": allocation.id, "cluster": allocation.cluster},
        )
        new_jobs = _submitted(order, machine, place, find_profiles, find_parallel)
        admission = _admission(machine, place, find_profiles, find_parallel)
        edits = _edits(order, machine, admission, place)
        unfinished = [job.spec for job in machine.run.jobs.values() if not job.state.final]
        clock = RunClock(at=machine.run.now, speed=place.speed)
        started = ev.AgentStarted(
            rules=ev.RULES,
            at=machine.run.now,
            wall=time.time(),
            devices=place.inventory,
            policy=policy,
            policy_options=options,
            grace_s=order.grace_s * place.speed,
            saved_steps=saved_steps(rundir, machine),
            profiles=(*admission.known_better(), *edits.profiles),
            parallel=admission.parallel([*unfinished, *edits.updated.values()]),
            deadline=on_run_clock(clock, allocation.deadline),
            reserve_s=order.margin_s * place.speed,
            cores=place.cores,
            seen_steps=seen_steps(rundir, machine),
            updated=edits.updated,
            kept=edits.kept,
            again=edits.again,
            run_id=run_id,
        )
        site = Site(
            rundir=rundir,
            run_id=record.id,
            user=user,
            speed=place.speed,
            stand_ins=place.stand_ins,
            checkpoints=order.checkpoints,
            environment=order.environment,
            layers=find_layers,
        )
        for line in put_strangers_aside(rundir, machine, site.checkpoints_of):
            say(line)
        selector = stack.enter_context(selectors.DefaultSelector())
        if place.hosts:
            selector.register(place.hosts.fileno(), selectors.EVENT_READ, ("hosts", None))
        effects = Effects(machine=machine, launcher=place.launcher, site=site, clock=clock, selector=selector)
        snapshot = SnapshotWriter(
            rundir,
            machine,
            allocation=record.allocation,
            deadline=allocation.deadline,
            speed=place.speed,
            user=user,
        )
        machine.run.touch_all()
        for job in machine.run.jobs.values():
            if job.attempt:
                snapshot.output_of(job.id, str(output_path(job, site, job.attempt, _host_of(job, place))))
        monitor = Monitor(place.sample, interval_s=order.monitor_s, wake=lambda: None)
        watch = None
        if allocation.kind != "none":
            watch = AllocationWatch(
                batch,
                at_once=allocation.deadline is None,
                deadline=allocation.deadline,
                preemption=allocation.preemption,
            )
            stack.callback(watch.close)
        ending = Ending(
            machine,
            clock,
            watch=watch,
            tell=say,
            publish=lambda deadline: setattr(snapshot, "deadline", deadline),
        )
        resources = Resources(
            machine=machine,
            journal=journal,
            effects=effects,
            inbox=Inbox(rundir),
            snapshot=snapshot,
            monitor=monitor,
            clock=clock,
            selector=selector,
            observer=observer,
            admission=admission,
            ending=ending,
            ends_by=allocation.ends_by,
            signals_all=allocation.signals_all,
            hosts=place.hosts,
            source=order.source,
        )
        agent = Agent(resources, commands=commands)
        rundir.write_record(record)
        if note := register(record.id, rundir.root):
            say(note)
        for job_id, what in edits.said.items():
            say(f"job {machine.run.jobs[job_id].spec.name}: {what}")
        if allocation.kind != "none":
            say(described(allocation, place))
            if _without_exec(os.environ):
                say("started without exec: the batch system's signals end the script's shell, and us with it")
        try:
            outcome = agent.run([started, *new_jobs])
            if outcome is Outcome.STOPPED:
                # From here on the batch system's signals would only keep us from coming back.
                for number in allocation.ends_by:
                    signal.signal(number, signal.SIG_IGN)
        finally:
            if not monitor.close():
                stack.pop_all()  # a driver that hangs would hang us too; the system lets go of it all
        return Life(
            outcome=outcome,
            machine=machine,
            run=record,
            speed=place.speed,
            device_kind=place.kind,
            outputs={
                job.id: output_path(job, site, job.attempt, _host_of(job, place))
                for job in machine.run.jobs.values()
            },
            checkpoints={job_id: site.checkpoints_of(job_id) for job_id in machine.run.jobs},
            before=standing,
            edits=edits,
            attempts_before=attempts_before,
            short_of_hosts=bool(place.hosts and place.hosts.lost()),
            requeued_when_preempted=allocation.preemption is not None and allocation.preemption.requeues,
            killed=agent.killed,
        )


def serving(batch: BatchSystem, allocation: Allocation) -> dict[str, float]:
    """How long node agents are needed after their SIGTERM, as `node_agents` takes it: batch systems send
    steps theirs when a time of grace begins."""
    notice_s = 0.0
    if allocation.preemption:
        grace_s = allocation.preemption.grace_s
        notice_s = UNTOLD_GRACE_S if grace_s is None else grace_s
    return {"serve_on_s": max(SERVE_ON_S, forced_s(batch.kill_wait())), "notice_s": notice_s}


def _here(order: Order, allocation: Allocation) -> Place:
    return this_host(order.devices, allocation, standbys=order.standbys, cpus_per_gpu=order.cpus_per_gpu)


def _admission(
    machine: Machine, place: Place, find_profiles: Finder, find_parallel: FindParallel
) -> Admission:
    def find(models: set[str]) -> tuple[Profile, ...]:
        return find_profiles(models, place.kind)

    sizes = (device.memory_mib for device in place.inventory)
    return Admission(
        machine=machine,
        find_profiles=find,
        find_parallel=find_parallel,
        stand_ins=place.stand_ins,
        hosts=place.granted,  # a job for more than have come waits for an allocation in which they do
        cores=most_cores(place.cores, place.inventory),
        memory_mib=max((size for size in sizes if size is not None), default=None),
    )


def _submitted(
    order: Order, machine: Machine, place: Place, find_profiles: Finder, find_parallel: FindParallel
) -> list[ev.Event]:
    """What brings the order's jobs in that the run does not have yet; raises ConfigError."""
    new = [job for job in order.jobs if job.name not in machine.run.by_name]
    _check_environments(order, new, place)
    if not new:
        return []
    admission = _admission(machine, place, find_profiles, find_parallel)
    return admission.events(new, at=machine.run.now, gpus=place.gpus_per_host, where=order.where)


def _check_environments(order: Order, jobs: Sequence[JobSpec], place: Place) -> None:
    """Raises BadEnvironment where jobs, or those of the source, could not start on this host."""
    if place.interpreters is None or place.stand_ins:
        return  # node agents find out on their hosts
    for job in place.interpreters.unlike(jobs, order.environment):
        place.interpreters.check(job, order.environment)
    if order.source is not None:
        place.interpreters.trainers(order.environment)


def _edits(order: Order, machine: Machine, admission: Admission, place: Place) -> Edits:
    """What the order's jobs say of those that the run has already; raises ConfigError."""
    old = [job for job in order.jobs if job.name in machine.run.by_name]
    return admission.edits(
        old,
        update=order.update,
        called_in=order.workdir,
        gpus=place.gpus_per_host,
        where=order.where,
        living=False,
    )


def _attempts(machine: Machine) -> int:
    return sum(job.attempt for job in machine.run.jobs.values())


def _host_of(job: Job, place: Place) -> str:
    """The first host of a job's newest attempt."""
    if job.attempts and job.current.seats:
        return job.current.seats[0].host
    gpus = job.current.gpus if job.attempts else ()
    return place.host_of.get(gpus[0], place.host_names[0]) if gpus else place.host_names[0]


def _without_exec(environ: Mapping[str, str]) -> bool:
    """Whether we are the child of a batch script, whose shell gets the signals that are meant for us."""
    script = environ.get("SLURM_TASK_PID", "")
    return script.isdecimal() and "SLURM_STEP_ID" not in environ and int(script) != os.getpid()


def _policy(order: Order, machine: Machine) -> tuple[str, Mapping[str, Any]]:
    """Policy and options of this life: what is asked for, else the earlier life's; checked."""
    name = order.policy or (machine.decisions.policy.name if machine.decisions.policy else "marble")
    options = order.policy_options
    if order.policy is None and not options:
        options = machine.decisions.options
    make_policy(name, options)
    return name, options
