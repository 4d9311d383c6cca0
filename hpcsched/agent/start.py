"""The life of an agent from beginning to end: take the run over, run it, return the results."""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import hpcsched
from hpcsched.accounts import user_name
from hpcsched.agent.admission import Admission, JobEdits
from hpcsched.agent.allocation.ending import AllocationEnd, on_run_clock
from hpcsched.agent.allocation.release import HostReleases, release_after_s
from hpcsched.agent.allocation.requeue import RunProgress
from hpcsched.agent.allocation.watch import AllocationWatch
from hpcsched.agent.alongside import alongside
from hpcsched.agent.clock import RunClock
from hpcsched.agent.effects import Effects
from hpcsched.agent.gpu_memory import FREE_WITHIN_S, GpuMemory
from hpcsched.agent.gpu_watch import GpuWatch, compute_modes, keep_samples, prohibited
from hpcsched.agent.host_changes import HostChanges
from hpcsched.agent.hosts import (
    Hosts,
    describe_allocation,
    node_agent_times,
    node_agents,
    this_host,
    without_exec,
)
from hpcsched.agent.inbox import Inbox
from hpcsched.agent.launch_plans import FindLayers, Site, output_path
from hpcsched.agent.life import LifeResult, attempts_made
from hpcsched.agent.loop import Agent, RunOutcome
from hpcsched.agent.monitor import Monitor
from hpcsched.agent.recovery import (
    Left,
    end_orphans,
    open_run,
    put_unknown_jobs_aside,
    refuse_lost_journal,
    saved_steps,
    seen_steps,
)
from hpcsched.agent.request import FindParallel, FindProfiles, FindShared, RunRequest
from hpcsched.agent.resources import Observer, Resources
from hpcsched.agent.run_lock import refuse_other_run, take_run_lock
from hpcsched.agent.shared_use import SharedUseMeter
from hpcsched.agent.staying import Staying
from hpcsched.agent.watched import is_watched, open_to
from hpcsched.batch.base import Allocation, BatchSystem
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import most_cores
from hpcsched.core.model import JobSpec
from hpcsched.core.resources.gpus import own_type
from hpcsched.dialects import what_was_recognised
from hpcsched.launch.spawn import ignoring_signals
from hpcsched.policy import make_policy
from hpcsched.store.device_use import UseRecord
from hpcsched.store.registry import register
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter


def run(
    request: RunRequest,
    *,
    batch: BatchSystem,
    find_profiles: FindProfiles,
    find_layers: FindLayers,
    find_parallel: FindParallel = lambda models: (),
    find_shared: FindShared = lambda kind: (),
    observe: Callable[[Machine], Observer],
) -> LifeResult:
    """Begin the run in `request.dir`, or take it over, and follow it until it ends or is drained.

    Raises ConfigError, BatchError and StoreError before anything is started, StoreError later only if the
    journal cannot be written any more. Bad input for a new run leaves no run behind.
    """
    rundir = RunDir(request.dir.resolve())
    allocation = batch.allocation()
    refuse_other_run(rundir, resume=request.resume)
    make_policy(request.policy or "marble", request.policy_options if request.policy else {})
    host, user = socket.gethostname(), user_name()
    with contextlib.ExitStack() as stack:
        # Its warnings would end us while the loop does not listen; the end time is followed anyway.
        stack.enter_context(ignoring_signals(frozenset({signal.SIGUSR1, signal.SIGUSR2})))
        several = len(allocation.hosts) > 1 or allocation.here is None or request.joinable
        hosts = None if several else _here(request, allocation)
        if hosts:
            stack.callback(hosts.close)
            if not rundir.begun:
                # Bad input leaves nothing behind.
                _submitted(request, Machine(make_policy), hosts, find_profiles, find_parallel, find_shared)
        rundir.make(share=None if rundir.begun else request.share)
        stack.callback(take_run_lock(rundir, resume=request.resume).release)
        begun = rundir.begun
        # `clean` may have removed folders before we had the lock.
        rundir.make(share=None if begun else request.share)
        refuse_other_run(rundir, resume=request.resume)  # begun and ended meanwhile
        refuse_lost_journal(rundir)
        rundir.sweep()
        before = rundir.read_record() if rundir.begun else None
        machine, journal, commands = open_run(rundir, make_policy)
        stack.callback(journal.close)
        if begun and request.share is not None:
            open_to(rundir, request.share)
        standing, attempts_before = RunProgress.of(machine), attempts_made(machine)
        count = max(1, len(allocation.hosts))
        left = dict[int, Left]()
        end_orphans(rundir, machine, before, host=host, grace_s=request.grace_s, hosts=count, left=left)
        run_id = before.id if before else machine.run.run_id or uuid.uuid4().hex
        observer = observe(machine)

        def say(text: str) -> None:
            with contextlib.suppress(OSError):  # nobody reads standard error any more
                observer.message(text)

        if hosts is None:
            hosts = node_agents(
                request.devices,
                batch,
                allocation,
                run_id=run_id,
                run_dir=rundir.root,
                interface=request.interface,
                grace_s=request.grace_s,
                say=say,
                standbys=request.standbys,
                cpus_per_gpu=request.cpus_per_gpu,
                joinable=request.joinable,
                reserve_s=request.margin_s,
                **node_agent_times(batch, allocation),
            )
            stack.callback(hosts.close)
        policy, options = _policy(request, machine)
        record = RunRecord(
            id=run_id,
            version=hpcsched.__version__,
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=time.time(),
            devices=request.devices,
            policy=policy,
            allocation=described(allocation),
            environment=request.environment,
            checkpoints=str(request.checkpoints or ""),
            python=platform.python_version(),
        )
        new_jobs = _submitted(request, machine, hosts, find_profiles, find_parallel, find_shared)
        admission = _admission(machine, hosts, find_profiles, find_parallel, find_shared, request)
        edits = _edits(request, machine, admission, hosts)
        unfinished = [job.spec for job in machine.run.jobs.values() if not job.state.final]
        clock = RunClock(at=machine.run.now, speed=hosts.speed)
        started = ev.AgentStarted(
            **machine.decides_by,
            at=machine.run.now,
            wall=time.time(),
            devices=hosts.inventory,
            policy=policy,
            policy_options=options,
            grace_s=request.grace_s * hosts.speed,
            saved_steps=saved_steps(rundir, machine, left=left, say=say),
            profiles=(*admission.better_profiles(), *edits.profiles),
            parallel=admission.parallel([*unfinished, *edits.updated.values()]),
            deadline=on_run_clock(clock, allocation.deadline),
            reserve_s=request.margin_s * hosts.speed,
            cores=hosts.cores,
            seen_steps=seen_steps(rundir, machine),
            updated=edits.updated,
            kept=edits.kept,
            again=edits.again,
            run_id=run_id,
            release_after_s=release_after_s(
                request.release_idle_s, batch, allocation, hosts.speed, say, joinable=request.joinable
            ),
            stays=allocation.here or "",
            reads_inbox=bool(Inbox.waiting(rundir)),
        )
        site = Site(
            rundir=rundir,
            run_id=record.id,
            user=user,
            speed=hosts.speed,
            stand_ins=hosts.stand_ins,
            checkpoints=request.checkpoints,
            environment=request.environment,
            layers=find_layers,
            arrays=lambda: machine.run.arrays,
        )
        for line in put_unknown_jobs_aside(rundir, machine, site.checkpoints_of):
            say(line)
        selector = stack.enter_context(selectors.DefaultSelector())
        if hosts.remote:
            selector.register(hosts.remote.fileno(), selectors.EVENT_READ, ("hosts", None))
        snapshot = SnapshotWriter(
            rundir,
            machine,
            allocation=record.allocation,
            deadline=allocation.deadline,
            speed=hosts.speed,
            user=user,
        )
        machine.run.touch_all()
        ran = [job for job in machine.run.jobs.values() if job.attempt]
        for job, first in zip(ran, hosts.first_of_each(ran), strict=True):
            snapshot.output_of(job.id, str(output_path(job, site, job.attempt, first)))
        monitor = Monitor(hosts.sample, interval_s=request.monitor_s)
        gpu_watch = GpuWatch(
            monitor,
            machine.ledger,
            publish=lambda samples: setattr(snapshot, "samples", samples),
            keep=partial(keep_samples, UseRecord(rundir.device_use)),
            tell=say,
        )
        memory = GpuMemory(hosts.free, tell=say, used_mib=gpu_watch.used_mib) if hosts.free else None
        if memory:
            stack.callback(memory.close)
        effects = Effects(
            machine=machine,
            launcher=hosts.launcher,
            site=site,
            clock=clock,
            selector=selector,
            memory=memory,
            releases=HostReleases(batch, hosts.remote, tell=say) if hosts.remote else None,
        )
        watch = None
        if allocation.kind != "none":
            watch = AllocationWatch(
                batch,
                at_once=allocation.deadline is None,
                deadline=allocation.deadline,
                preemption=allocation.preemption,
                least_s=request.poll_s,
            )
            stack.callback(watch.close)
        ending = AllocationEnd(
            machine,
            clock,
            watch=watch,
            tell=say,
            publish=lambda deadline: setattr(snapshot, "deadline", deadline),
        )
        shared_use = SharedUseMeter(
            machine,
            gpu_watch.sample,
            host="" if hosts.remote else hosts.host_names[0],
            settle_s=request.monitor_s + FREE_WITHIN_S,
        )
        host_changes = HostChanges(hosts.remote, machine, clock, admission.joined) if hosts.remote else None
        resources = Resources(
            machine=machine,
            journal=journal,
            effects=effects,
            inbox=Inbox(rundir),
            snapshot=snapshot,
            gpu_watch=gpu_watch,
            shared_use=shared_use,
            clock=clock,
            selector=selector,
            observer=observer,
            admission=admission,
            ending=ending,
            staying=Staying(request.stay_s, snapshot, tell=say),
            ends_by=allocation.ends_by,
            signals_all=allocation.signals_all,
            hosts=hosts.remote,
            host_changes=host_changes,
            source=request.source,
            alongside=alongside(
                site,
                effects,
                machine,
                snapshot,
                sample=gpu_watch.sample,
                here=not hosts.remote,
                metrics_file=request.metrics_file,
                records=request.records,
                allocation=record.allocation,
                tell=observer.message,
                closing=stack,
            ),
        )
        agent = Agent(resources, commands=commands)
        rundir.write_record(record)
        if note := register(record.id, rundir.root):
            say(note)
        for job_id, what in edits.said.items():
            say(f"job {machine.run.jobs[job_id].spec.name}: {what}")
        submitted = (event.jobs for event in new_jobs if isinstance(event, ev.JobsSubmitted))
        for line in what_was_recognised(spec for jobs in submitted for spec in jobs):
            say(line)
        for line in compute_modes(hosts.inventory).values():
            say(line)
        if allocation.kind != "none":
            say(describe_allocation(allocation, hosts))
            for note in allocation.notes:
                say(note)
            if why := allocation.refused.get(request.comes_back):
                say(f"--{request.comes_back} will not bring this run back: {why}")
            if without_exec(batch):
                say("started without exec: the batch system's signals end the script's shell, and us with it")
        try:
            at, there = started.at, hosts.inventory
            outcome = agent.run([started, *prohibited(there, at), *admission.joined(there, at), *new_jobs])
            if outcome is RunOutcome.STOPPED:
                # From here on the batch system's signals would only keep us from coming back.
                for number in allocation.ends_by:
                    signal.signal(number, signal.SIG_IGN)
        finally:
            if not monitor.close():
                stack.pop_all()  # a driver that hangs would hang us too; the system lets go of most of it
                hosts.close_launcher()
        jobs = list(machine.run.jobs.values())
        return LifeResult(
            outcome=outcome,
            machine=machine,
            run=record,
            speed=hosts.speed,
            device_kind=hosts.kind,
            outputs={
                job.id: output_path(job, site, job.attempt, first)
                for job, first in zip(jobs, hosts.first_of_each(jobs), strict=True)
            },
            checkpoints={job_id: site.checkpoints_of(job_id) for job_id in machine.run.jobs},
            folders={job_id: site.rundir.job(job_id) for job_id in machine.run.jobs},
            before=standing,
            edits=edits,
            attempts_before=attempts_before,
            short_of_hosts=hosts.remote is not None and hosts.remote.short,
            requeued_when_preempted=allocation.preemption is not None and allocation.preemption.requeues,
            killed=agent.killed,
            refused=resources.inbox.refused,
        )


def described(allocation: Allocation) -> dict[str, str | None]:
    """What is kept of the batch job."""
    known = {"account": allocation.account, "partition": allocation.partition}
    about = {"kind": allocation.kind, "id": allocation.id, "cluster": allocation.cluster}
    return about | {key: value for key, value in known.items() if value}


def _here(request: RunRequest, allocation: Allocation) -> Hosts:
    standbys, cpus_per_gpu = request.standbys, request.cpus_per_gpu
    return this_host(request.devices, allocation, standbys=standbys, cpus_per_gpu=cpus_per_gpu)


def _admission(
    machine: Machine,
    hosts: Hosts,
    find_profiles: FindProfiles,
    find_parallel: FindParallel,
    find_shared: FindShared,
    request: RunRequest,
) -> Admission:
    sizes = (device.memory_mib for device in hosts.inventory)
    own = request.device_type or own_type(hosts.inventory) or hosts.kind
    return Admission(
        machine=machine,
        find_profiles=lambda models, gpu_type: find_profiles(models, gpu_type or own),
        find_parallel=find_parallel,
        find_shared=lambda: find_shared(own),
        stand_ins=hosts.stand_ins,
        hosts=hosts.granted,  # a job for more than have come waits for an allocation in which they do
        cores=most_cores(hosts.cores, hosts.inventory),
        memory_mib=max((size for size in sizes if size is not None), default=None),
        devices=hosts.inventory,
        host_cores=hosts.cores,
        joinable=hosts.remote is not None and hosts.remote.joinable,
        mps=request.mps,
        watched=is_watched(RunDir(request.dir), request.share),
    )


def _submitted(
    request: RunRequest,
    machine: Machine,
    hosts: Hosts,
    find_profiles: FindProfiles,
    find_parallel: FindParallel,
    find_shared: FindShared,
) -> list[ev.Event]:
    """What brings the order's jobs in that the run does not have yet; raises ConfigError."""
    new = [job for job in request.jobs if job.name not in machine.run.by_name]
    _check_environments(request, new, hosts)
    if not new:
        return []
    admission = _admission(machine, hosts, find_profiles, find_parallel, find_shared, request)
    return admission.events(new, at=machine.run.now, gpus=hosts.gpus_per_host, where=request.where)


def _check_environments(request: RunRequest, jobs: Sequence[JobSpec], hosts: Hosts) -> None:
    """Raises BadEnvironment where jobs, or those of the source, could not start on this host."""
    if hosts.interpreters is None or hosts.stand_ins:
        return  # node agents find out on their hosts
    like = (request.like,) if request.like else ()
    for job in hosts.interpreters.unlike((*jobs, *like), request.environment):
        hosts.interpreters.check(job, request.environment)


def _edits(request: RunRequest, machine: Machine, admission: Admission, hosts: Hosts) -> JobEdits:
    """What the order's jobs say of those that the run has already; raises ConfigError."""
    old = [job for job in request.jobs if job.name in machine.run.by_name]
    return admission.edits(
        old,
        update=request.update,
        retry=request.retry,
        called_in=request.workdir,
        gpus=hosts.gpus_per_host,
        where=request.where,
        living=False,
    )


def _policy(request: RunRequest, machine: Machine) -> tuple[str, Mapping[str, Any]]:
    """Policy and options of this life: what is asked for, else the earlier life's; checked."""
    name = request.policy or (machine.decisions.policy.name if machine.decisions.policy else "marble")
    options = request.policy_options or ({} if request.policy else machine.decisions.options)
    make_policy(name, options)
    return name, options
