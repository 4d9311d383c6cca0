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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import hpcsched
from hpcsched.accounts import user_name
from hpcsched.agent.allocation.ending import AllocationEnd, on_run_clock
from hpcsched.agent.allocation.moving import Moving
from hpcsched.agent.allocation.release import HostReleases, release_after_s
from hpcsched.agent.allocation.requeue import TIME_OVER_CAUSES, RunProgress
from hpcsched.agent.allocation.watch import AllocationWatch
from hpcsched.agent.alongside import alongside
from hpcsched.agent.clock import RunClock
from hpcsched.agent.compacting import Compacting
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
from hpcsched.agent.life import LifeResult
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
from hpcsched.agent.requested_jobs import admission_for, edits_of, submitted
from hpcsched.agent.resources import Observer, Resources
from hpcsched.agent.run_lock import refuse_other_run, take_run_lock
from hpcsched.agent.shared_use import SharedUseMeter
from hpcsched.agent.staying import Staying
from hpcsched.agent.taking_over import TakenOver, clock_at, devices_before, is_joinable, may_run_on, take_over
from hpcsched.agent.wakeup import signals_wake
from hpcsched.agent.watched import open_to
from hpcsched.batch.base import Allocation, BatchSystem
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.dialects import what_was_recognised
from hpcsched.errors import ConfigError
from hpcsched.launch.plans import claim_checkpoints
from hpcsched.open_files import raise_limit
from hpcsched.policy import make_policy
from hpcsched.store.device_use import UseRecord
from hpcsched.store.heads import Superseded, claim_number, give_up_number, keep_options, must_lead
from hpcsched.store.registry import register
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter

WAITS_FOR_HOSTS_S = 600.0
"""Time that a joinable run in which nothing can run waits for hosts to join (chosen)."""


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
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        # A warning before the loop listens neither ends us nor is lost: what follows can take long.
        stack.enter_context(signals_wake(selector, (signal.SIGUSR1, signal.SIGUSR2)))
        allocation = batch.allocation()
        refuse_other_run(rundir, resume=request.resume)
        make_policy(request.policy or "marble", request.policy_options if request.policy else {})
        host, user = socket.gethostname(), user_name()
        joinable = request.joinable or is_joinable(rundir)
        movable = joinable and request.source is None  # a search is one of `tune`
        if request.leads and not is_joinable(rundir):
            raise ConfigError(where="--lead", got=str(rundir.root), accepted="what `hpcsched join` says")
        several = len(allocation.hosts) > 1 or allocation.here is None or joinable
        hosts = None if several else _here(request, allocation)
        brought: list[ev.Event] | None = None
        if hosts:
            stack.callback(hosts.close)
            if not rundir.begun:
                # Bad input leaves nothing behind.
                new = Machine(make_policy)
                brought = submitted(request, new, hosts, find_profiles, find_parallel, find_shared)
        rundir.make(share=None if rundir.begun else request.share)
        if lock := take_run_lock(rundir, resume=request.resume, follows=request.leads is not None):
            stack.callback(lock.release)
        begun = rundir.begun
        # `clean` may have removed folders before we had the lock.
        rundir.make(share=None if begun else request.share)
        refuse_other_run(rundir, resume=request.resume)  # begun and ended meanwhile
        refuse_lost_journal(rundir)
        rundir.sweep()
        before = rundir.read_record() if begun else None
        epoch = request.leads.epoch if request.leads else claim_number(rundir) if joinable else 0
        if epoch:
            stack.callback(give_up_number, rundir, epoch)
        machine, journal, commands = open_run(rundir, make_policy, detach=joinable)
        stack.callback(journal.close)
        if begun and request.share is not None:
            open_to(rundir, request.share)
        standing, attempts_before = RunProgress.of(machine), machine.run.attempts
        count = max(1, len(allocation.hosts))
        left = dict[int, Left]()
        orphans = partial(
            end_orphans, rundir, machine, before, host=host, grace_s=request.grace_s, hosts=count, left=left
        )
        earlier = devices_before(machine) if may_run_on(rundir, machine, before) else None
        if earlier is None:
            orphans()
        run_id = before.id if before else machine.run.run_id or uuid.uuid4().hex
        if request.checkpoints:
            claim_checkpoints(request.checkpoints, run_id)
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
                joinable=joinable,
                movable=movable,
                reserve_s=request.margin_s,
                epoch=epoch,
                before=earlier or (),
                active={job.id: job.attempt for job in machine.run.active.values()},
                leads=request.leads is not None,
                **node_agent_times(batch, allocation),
            )
            stack.callback(hosts.close)
        if earlier is not None and hosts.remote:
            orphans(spared=hosts.remote.spared)
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
            joinable=joinable,
            epoch=epoch,
        )
        new_jobs = None if begun else brought  # it may have been begun, and ended, meanwhile
        if new_jobs is None:
            new_jobs = submitted(request, machine, hosts, find_profiles, find_parallel, find_shared)
        admission = admission_for(machine, hosts, find_profiles, find_parallel, find_shared, request)
        edits = edits_of(request, machine, admission, hosts)
        unfinished = [job.spec for job in machine.run.jobs.left()]
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
        taken = TakenOver()
        if earlier is not None and hosts.remote:
            taken = take_over(machine, hosts.remote, site, grace_s=request.grace_s, say=say)
            site = replace(site, store_keys=taken.store_keys)
        now = clock_at(machine, hosts.speed) if taken.adopted else machine.run.now
        clock = RunClock(at=now, speed=hosts.speed)
        started = ev.AgentStarted(
            **machine.decides_by,
            at=now,
            wall=time.time(),
            devices=hosts.inventory,
            policy=policy,
            policy_options=options,
            grace_s=request.grace_s * hosts.speed,
            saved_steps=saved_steps(rundir, machine, left=left, alone=not hosts.remote, say=say),
            profiles=(*admission.better_profiles(), *edits.profiles),
            parallel=admission.parallel([*unfinished, *edits.updated.values()]),
            deadline=None if request.leads else on_run_clock(clock, allocation.deadline),
            reserve_s=request.margin_s * hosts.speed,
            cores=hosts.cores,
            seen_steps=seen_steps(rundir, machine),
            updated=edits.updated,
            kept=edits.kept,
            again=edits.again,
            run_id=run_id,
            release_after_s=release_after_s(
                request.release_idle_s, batch, allocation, hosts.speed, say, joinable=joinable
            ),
            stays=hosts.own_name if request.leads else allocation.here or "",
            reads_inbox=earlier is not None or bool(Inbox.waiting(rundir)),
            adopted=tuple(attempt.job_id for attempt in taken.adopted),
            unsure={job_id: now + left_s * hosts.speed for job_id, left_s in taken.unsure_s.items()},
            epoch=epoch,
        )
        for line in put_unknown_jobs_aside(rundir, machine, site.checkpoints_of):
            say(line)
        if hosts.remote:
            selector.register(hosts.remote.fileno(), selectors.EVENT_READ, ("hosts", None))
        snapshot = SnapshotWriter(
            rundir,
            machine,
            allocation=record.allocation,
            deadline=allocation.deadline,
            speed=hosts.speed,
            user=user,
            find_output=lambda job: str(_outputs([job], site, hosts)[job.id]),
        )
        machine.run.touch_all()
        monitor = Monitor(hosts.sample, interval_s=request.monitor_s)
        gpu_watch = GpuWatch(
            monitor,
            machine,
            publish=lambda samples: setattr(snapshot, "samples", samples),
            keep=partial(keep_samples, UseRecord(rundir.device_use)),
            tell=say,
        )
        memory = GpuMemory(hosts.free, tell=say, used_mib=gpu_watch.used_mib) if hosts.free else None
        if memory:
            stack.callback(memory.close)
        raise_limit()  # not before: `srun` hands on the limits of who starts it
        effects = Effects(
            machine=machine,
            launcher=hosts.launcher,
            site=site,
            clock=clock,
            selector=selector,
            memory=memory,
            releases=HostReleases(batch, hosts.remote, tell=say) if hosts.remote else None,
        )
        for attempt in taken.adopted:
            effects.follow(attempt)
        watch = None
        if allocation.kind != "none" and not request.leads:
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
            at=started.deadline,
            tell=say,
            publish=lambda deadline: setattr(snapshot, "deadline", deadline),
        )
        moving = None
        if movable and hosts.remote:
            token, lent = (request.leads.token, request.leads.hosts) if request.leads else ("", ())
            moving = Moving(hosts.remote, machine, clock, ending, token=token, lent=lent, tell=say)
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
            staying=Staying(
                request.stay_s,
                snapshot,
                tell=say,
                for_hosts_s=(request.release_idle_s or WAITS_FOR_HOSTS_S) if joinable else None,
            ),
            ends_by=allocation.ends_by,
            signals_all=allocation.signals_all,
            hosts=hosts.remote,
            host_changes=host_changes,
            moving=moving,
            must_lead=partial(must_lead, rundir, epoch) if joinable else lambda: None,
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
                compacting=Compacting(journal, anew=not joinable),
            ),
        )
        agent = Agent(resources, commands=commands)
        if movable:
            keep_options(rundir, request.words)
        rundir.write_record(record)
        if note := register(record.id, rundir.root):
            say(note)
        for job_id, what in edits.said.items():
            say(f"job {machine.run.jobs[job_id].spec.name}: {what}")
        came = (event.jobs for event in new_jobs if isinstance(event, ev.JobsSubmitted))
        for line in what_was_recognised(spec for jobs in came for spec in jobs):
            say(line)
        for line in compute_modes(hosts.inventory).values():
            say(line)
        if allocation.kind != "none" and not request.leads:  # `join` has told of it
            say(describe_allocation(allocation, hosts))
            for note in allocation.notes:
                say(note)
            if why := allocation.refused.get(request.comes_back):
                say(f"--{request.comes_back} will not bring this run back: {why}")
            if without_exec(batch):
                say("started without exec: the batch system's signals end the script's shell, and us with it")
        try:
            there = hosts.inventory
            coming = (*admission.joined(there, now), *(replace(event, at=now) for event in new_jobs))
            outcome = agent.run([started, *prohibited(there, now), *coming])
            if outcome is RunOutcome.MOVED and hosts.remote:
                hosts.remote.moves = True
                rundir.write_record(msgspec.structs.replace(record, left=True))
                say("this agent leaves the run to another allocation")
            elif movable and not request.comes_back and machine.deadline.cause in TIME_OVER_CAUSES:
                rundir.write_record(msgspec.structs.replace(record, left=True))
            if outcome is not RunOutcome.FINISHED:
                # From here on the batch system's signals would only keep us from coming back.
                for number in allocation.ends_by:
                    signal.signal(number, signal.SIG_IGN)
        except Superseded:
            if hosts.remote:
                hosts.remote.leave_to_the_next()
            raise
        finally:
            if not monitor.close():
                stack.pop_all()  # a driver that hangs would hang us too; the system lets go of most of it
                hosts.close_launcher()
        machine.run.jobs.unpack()
        return LifeResult(
            outcome=outcome,
            machine=machine,
            run=record,
            speed=hosts.speed,
            device_kind=hosts.kind,
            outputs=_outputs(machine.run.jobs.values(), site, hosts),
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


def _outputs(jobs: Iterable[Job], site: Site, hosts: Hosts) -> dict[int, Path]:
    """By id where each of these jobs writes."""
    return {job.id: output_path(job, site, job.attempt, first) for job, first in hosts.first_of_each(jobs)}


def described(allocation: Allocation) -> dict[str, str | None]:
    """What is kept of the batch job."""
    known = {"account": allocation.account, "partition": allocation.partition}
    about = {"kind": allocation.kind, "id": allocation.id, "cluster": allocation.cluster}
    return about | {key: value for key, value in known.items() if value}


def _here(request: RunRequest, allocation: Allocation) -> Hosts:
    standbys, cpus_per_gpu = request.standbys, request.cpus_per_gpu
    return this_host(request.devices, allocation, standbys=standbys, cpus_per_gpu=cpus_per_gpu)


def _policy(request: RunRequest, machine: Machine) -> tuple[str, Mapping[str, Any]]:
    """Policy and options of this life: what is asked for, else the earlier life's; checked."""
    name = request.policy or (machine.decisions.policy.name if machine.decisions.policy else "marble")
    options = request.policy_options or ({} if request.policy else machine.decisions.options)
    make_policy(name, options)
    return name, options
