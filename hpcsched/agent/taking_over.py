"""What runs on from one agent to the next (ADR 58): found, gone on with, or ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.agent.abandon import abandon
from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.launch_plans import Site
from hpcsched.agent.resuming import Resuming
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, Kind
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.launch.remote.survivors import Survivor
from hpcsched.store.rundir import RunDir, RunRecord, last_status, snapshot_age_s

MAY_LIVE_S = 600.0
"""Age of the last snapshot from which nothing of the run runs on any more (chosen): batch systems end what is
left of a job, and node agents that have lost their head are gone in a fraction of that."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What has become of what runs on: the attempts that are `adopted`, as they are watched from now on, and
    by job the seconds for which its processes may still live on a host that has not come (`unsure_s`)."""

    adopted: tuple[WatchedAttempt, ...] = ()
    unsure_s: Mapping[int, float] = field(default_factory=dict)
    store_keys: Mapping[int, str] = field(default_factory=dict)


def is_joinable(rundir: RunDir) -> bool:
    """Whether a run that has begun takes hosts of other allocations in."""
    record = rundir.read_record() if rundir.begun else None
    return record is not None and record.joinable


def may_run_on(rundir: RunDir, machine: Machine, record: RunRecord | None) -> bool:
    """Whether jobs may run on without the agent before: not where it has ended in good order."""
    if record is None or not record.joinable or not machine.run.lives:
        return False
    word = last_status(rundir)
    return word is not None and word.state in ("RUNNING", "DRAINING") and snapshot_age_s(rundir) <= MAY_LIVE_S


def devices_before(machine: Machine) -> tuple[Device, ...]:
    """The devices of hosts that the agent before had last."""
    there = {device.host for device in machine.ledger.devices.values()} | {*machine.hosts.closing}
    return tuple(device for device in machine.hosts.devices[-1] if device.host in there)


def clock_at(machine: Machine, speed: float) -> float:
    """The time on the run's clock, if it has gone on since the agent before began."""
    life = machine.run.lives[-1]
    return max(machine.run.now, life.at + (time.time() - life.wall) * speed)


def ends_before(machine: Machine, speed: float) -> dict[str, float]:
    """When the hosts of the agent before end, by the monotonic clock; those that had no end are not in it."""
    life, hosts, run_end = machine.run.lives[-1], machine.hosts, machine.deadline.at
    since_s = time.time() - time.monotonic()
    joined = {one.host for one in hosts.guests}
    ends = {
        host: run_end if (end := hosts.end_of(host)) is None and host not in joined else end
        for host in {device.host for device in hosts.devices[-1]}
    }
    return {
        host: life.wall + (end - life.at) / speed - since_s for host, end in ends.items() if end is not None
    }


def take_over(
    machine: Machine, remote: RemoteLauncher[Any], site: Site, *, grace_s: float, say: Callable[[str], None]
) -> TakenOver:
    """Sort out what runs on. What cannot go on is asked to save, and has ended when this returns."""
    remote.guests.ended_at(ends_before(machine, site.speed))
    resuming, may = Resuming(site), {*machine.adoptable()}
    adopted, others = dict[int, WatchedAttempt](), dict[int, WatchedAttempt]()
    keys = dict[int, str]()
    for one in remote.survivors:
        job = machine.run.jobs.get(one.job_id)
        goes_on = job is not None and job.id in may and _is_whole(one, job)
        (adopted if goes_on else others)[one.job_id] = _watched(one, job, site, resuming)
        keys[one.job_id] = one.store_key
    if adopted:
        say(f"{len(adopted)} training{'s' * (len(adopted) > 1)} ran on without an agent, and go on")
    unsure_s = {
        job.id: remote.silence_s for job in _on_silent_hosts(machine, remote) if job.id not in adopted
    }
    if others:
        names = ", ".join(str(job_id) for job_id in others)
        say(f"jobs {names} cannot go on as they run: they save, and start again")
    for job_id, code in abandon(others, grace_s, remote.pump):
        if code is None:
            unsure_s[job_id] = remote.silence_s
    by = time.monotonic() + grace_s
    while remote.keeping() and time.monotonic() < by:  # a state that is on its way to disk counts
        remote.pump()
        time.sleep(0.02)
    return TakenOver(tuple(adopted.values()), unsure_s, {job_id: key for job_id, key in keys.items() if key})


def _is_whole(one: Survivor, job: Job) -> bool:
    """Whether all ranks of a job's attempt run on."""
    if not one.whole or one.attempt != job.attempt:
        return False
    resized = len(one.groups) > 1 or one.attempt != one.order.attempt
    return not resized or (one.order.per_rank and one.living == len(job.current.gpus))


def _watched(one: Survivor, job: Job | None, site: Site, resuming: Resuming) -> WatchedAttempt:
    first, *joined = one.groups
    began = time.monotonic()
    attempt = WatchedAttempt(
        job_id=one.job_id,
        attempt=one.attempt,
        workers=first,
        gpus=job.current.gpus if job else (),
        ranks=one.living,
        folder=Path(one.order.folder),
        output=Path(one.order.output),
        taken_over=True,
        measured=not site.stand_ins and (job is None or job.spec.kind is not Kind.REPLAY),
        checkpoints=site.checkpoints_of(one.job_id),
        joined=list(joined),
        began=began,
    )
    attempt.ready = attempt.ready_report() is not None
    if job is not None and not site.stand_ins:
        resuming.runs_on(job, attempt, Path(one.order.cwd))
    return attempt


def _on_silent_hosts(machine: Machine, remote: RemoteLauncher[Any]) -> list[Job]:
    """The jobs that had GPUs or cores on hosts that are not here: these have not come, or were lost already
    to the agent before, which may not have waited until nothing could live there any more."""
    host_of = {device.index: device.host for device in (machine.hosts.devices or [()])[-1]}

    def hosts(job: Job) -> Sequence[str]:
        return [
            *(host_of.get(gpu, "") for gpu in job.current.gpus),
            *(seat.host for seat in job.current.seats),
        ]

    return [
        job
        for job in machine.run.active.values()
        if any(host and not remote.is_up(host) for host in hosts(job))
    ]
