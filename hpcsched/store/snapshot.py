"""The snapshot of a run, status.json, for login nodes: replaced atomically on every change.

It holds the jobs that are not over, and the newest of the others; the rest goes into rows beside it, written
once. So it costs what the changed jobs do, and the bytes of those that it holds.
"""

from __future__ import annotations

import os
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from hpcsched.contract.progress import Batching
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import Device, Ended, JobState, Progress
from hpcsched.core.nouns import SLOT
from hpcsched.core.plan import Plan
from hpcsched.core.saving import how_suspended
from hpcsched.core.states import ENDS
from hpcsched.core.transitions.hosts import Joined
from hpcsched.errors import StoreError
from hpcsched.store.files import write_atomically
from hpcsched.store.rows import JobRows
from hpcsched.store.rundir import RunDir, last_status
from hpcsched.store.spare import SpareFile
from hpcsched.store.status import (
    NO_REASON,
    AgentStatus,
    CoresStatus,
    GpuStatus,
    Idle,
    JobStatus,
    JoinedHost,
    LeftOver,
    MeasuredGpu,
    RunStatus,
    ShortDisk,
    StatusPage,
    iso,
    read_file,
)
from hpcsched.watchers import mode_in

MOST_ENDED = 500
"""Jobs that are over in status.json, at most (chosen): then all of them become rows."""


class SnapshotWriter:
    """Keeps status.json up to date with a machine.

    `find_output` tells where a job that this agent has not started writes. `most_ended`: see `MOST_ENDED`.
    """

    def __init__(
        self,
        rundir: RunDir,
        machine: Machine,
        *,
        allocation: Mapping[str, str | None],
        deadline: float | None = None,
        speed: float,
        user: str,
        find_output: Callable[[Job], str] = lambda job: "",
        most_ended: int = MOST_ENDED,
    ) -> None:
        self._rundir, self._machine = rundir, machine
        self._allocation, self._speed, self._user = dict(allocation), speed, user
        self.deadline = deadline
        """The Unix time at which the allocation ends; None: never, or not known."""
        self._agent = AgentStatus(host=socket.gethostname(), pid=os.getpid())
        self._find_output = find_output
        self._outputs: dict[int, str] = {}
        self._devices: dict[int, Mapping[int, Device]] = {}
        self._head: int | None = None
        self._late: set[int] = set()
        self._draining = False
        self._plan: tuple[Plan | None, Mapping[str, int]] = None, {}
        """The plan, and the free GPUs by host, that rows were last written by."""
        self._encoder = msgspec.json.Encoder()
        self._spare = SpareFile(rundir.status)
        self._mode = mode_in(rundir.root)
        self._rows = JobRows(rundir.root, self._mode, most_ended)
        self._named: str | None = None
        """The file of rows that status.json names ("": none; None: one of an earlier agent)."""
        before = last_status(rundir)
        self.seq = before.seq if before else 0
        self.idle: Idle | None = None
        """Set while the agent stays with nothing to do."""
        self.short_disks: Sequence[ShortDisk] = ()
        """Where the next saves may not find room."""
        self.samples: Mapping[int, MeasuredGpu] = {}
        """What samples say, by GPU."""
        self.progress: Mapping[int, Progress] = {}
        """The progress of the running jobs, newer than in the journal, by job."""
        self.batchings: Mapping[int, Batching] = {}
        """The batches of jobs with adaptive batches, by job."""

    def output_of(self, job_id: int, path: str) -> None:
        """Set the path of a job's output."""
        self._outputs[job_id] = path
        self._machine.run.touch(job_id)

    def write(self, state: str, now: float, *, durable: bool = False) -> None:
        """Replace status.json. Raises StoreError if that fails; the old one is still there then."""
        self._refresh(now)
        self.seq += 1
        for job_id in self._rows.move(self.seq):
            self._outputs.pop(job_id, None)
        machine = self._machine
        policy = machine.decisions.policy
        run = RunStatus(
            dir=str(self._rundir.root),
            state=state,
            stale=False,
            seq=self.seq,
            written_at=iso(time.time()) or "",
            policy=policy.name if policy else "",
            agent=self._agent,
            allocation={**self._allocation, "deadline": iso(self.deadline)},
            clock_s=round(now, 3),
            speed=self._speed,
            lost_gpus={str(gpu): why for gpu, why in machine.ledger.lost.items()},
            left_over=[
                LeftOver(host=idle.host, gpus=list(idle.gpus), since_s=round(idle.since, 3))
                for idle in machine.leftover.idle()
            ],
            given_back={back.host: round(back.at, 3) for back in machine.hosts.gone},
            joined=[self._joined(one, now) for one in machine.hosts.guests],
            idle=None if machine.run.active else self.idle,
            short_disks=list(self.short_disks) if machine.run.active else [],
        )
        ended = self._rows.ended(machine.run.jobs.counts)
        page = StatusPage(run=run, gpus=list(self._gpus()), jobs=self._rows.jobs(), ended=ended)
        data = self._encoder.encode(page)
        try:
            write_atomically(self._rundir.status, data, durable=durable, mode=self._mode)
        except StoreError:
            if not self._spare.replace(data):
                raise
            return
        if self._named != (named := ended.file if ended else ""):
            self._rows.remove_others()
            self._named = named
        if state in ("STOPPED", "FINISHED"):
            self._spare.drop()
        else:
            self._spare.keep(len(data))

    def _joined(self, one: Joined, now: float) -> JoinedHost:
        hosts = self._machine.hosts
        end = hosts.end_of(one.host) if one.left is None else None
        return JoinedHost(
            host=one.host,
            gpus=list(one.gpus),
            since_s=round(one.at, 3),
            end=None if end is None else iso(time.time() + (end - now) / self._speed),
            closing=one.left is None and (one.host in hosts.closing or one.host in hosts.leaving),
            left_s=None if one.left is None else round(one.left, 3),
        )

    def _refresh(self, now: float) -> None:
        machine = self._machine
        changed = machine.run.take_changed()
        head = machine.own.queue.first()
        # Its reason tells how many GPUs are free.
        changed |= {i for i in (self._head, head) if i is not None}
        self._head = head
        late = self._late_background()
        changed |= late ^ self._late
        self._late = late
        if (plan := (machine.run.plan, machine.ledger.free_by_host().by_host())) != self._plan:
            ids = _may_start(*self._plan) | _may_start(*plan)
            changed |= {i for i in ids if not machine.run.jobs.is_over(i)}
            self._plan = plan
        if machine.deadline.draining != self._draining:  # what all that wait are waiting for
            changed |= {job.id for job in machine.run.jobs.left()}
            self._draining = machine.deadline.draining
        changed |= machine.run.active.keys()
        if self._rows.lacks():
            changed |= {job.id for job in machine.run.jobs.in_state(*ENDS)}
        run = machine.run
        for job_id in sorted(changed):
            job = run.jobs[job_id]
            row = self._encoder.encode(self._job(job, now))
            # `status` tells of these.
            stays = job_id in run.kept or job_id in run.updated
            self._rows.put(job_id, row, job.state, stays=stays)

    def _late_background(self) -> set[int]:
        """The background jobs that wait and are too late for this allocation: that comes by time alone."""
        machine = self._machine
        if machine.deadline.at is None:
            return set()
        waiting = (machine.run.jobs[job_id] for job_id in machine.mechanism(Background).queue)
        return {job.id for job in waiting if machine.deadline.too_late(job)}

    def _gpus(self) -> Iterable[GpuStatus]:
        """The foreground of each GPU, and its background lane where that is taken."""
        foreground, background = (
            self._machine.own.holder,
            self._machine.mechanism(Background).lanes.holder,
        )
        loans = self._machine.mechanism(Cpu).cores.loans
        for index, device in sorted(self._machine.ledger.devices.items()):
            seen = self.samples.get(index, MeasuredGpu())
            lanes = [("foreground", foreground.get(index))]
            if index in background:
                lanes.append(("background", background[index]))
            for lane, job in lanes:
                yield GpuStatus(
                    index=index,
                    host=device.host,
                    job=job,
                    lane=lane,
                    utilisation=seen.utilisation,
                    memory_mib=seen.memory_mib,
                    loan=index in loans,
                    sample_age_s=seen.sample_age_s,
                    health=seen.health,
                    kind=SLOT if device.kind == SLOT else "gpu",
                )

    def _job(self, job: Job, now: float) -> JobStatus:
        machine = self._machine
        reason = machine.waiting_reason(job) or job.reason
        seen = self.progress.get(job.id) if job.state.active else None
        if seen and seen.attempt != job.attempt:
            seen = None
        step = max(job.step, seen.step) if seen else job.step
        held = job.current.gpus if job.state.active else ()
        cores = cores_status(job)
        return JobStatus(
            id=job.id,
            name=job.spec.name,
            state=job.state,
            reason=str(reason.why) if reason else NO_REASON if job.state.final else None,
            role=str(job.role) if job.role and job.state.active else None,
            gpus=list(held),
            hosts=sorted(self._hosts(job)),
            step=step if seen or job.reports else None,
            steps=job.steps,
            elapsed_s=round(elapsed_s(job, now), 3),
            eta_s=self._eta_s(job, step),
            attempt=job.attempt,
            suspensions=job.suspensions,
            resizes=sum(attempt.ended is Ended.RESIZED for attempt in job.attempts),
            exit=job.exit,
            model=job.spec.model,
            user=job.spec.user or self._user,
            submit_s=job.submit_s,
            start_s=job.started_s,
            end_s=job.ended_s,
            rate=(seen and seen.rate) or job.rate,
            ready=job.ready and job.state.active,
            detail=reason.said(machine.ledger.noun) if reason else None,
            output=self._output(job),
            metrics=dict(job.metrics),
            batching=self.batchings.get(job.id),
            cores=cores,
            array=job.spec.array.name if job.spec.array else "",
            array_index=job.spec.array.index if job.spec.array else None,
            priority=job.spec.priority,
            nodes=job.spec.nodes,
            time_limit_s=job.spec.needs.time_s if job.spec.needs else None,
            kept=list(machine.run.kept.get(job.id, ())),
            updated=list(machine.run.updated.get(job.id, ())),
            saves=self._saves(job, now) if job.spec.restart else "",
        )

    def _output(self, job: Job) -> str:
        known = self._outputs.get(job.id)
        return known if known is not None else self._find_output(job) if job.attempt else ""

    def _hosts(self, job: Job) -> set[str]:
        """The hosts of a job: where it runs; of one that is over where it ran last."""
        if not job.attempts or not (job.state.active or job.state.final):
            return set()
        last, machine = job.current, self._machine
        if not job.state.final:
            hosts = {host for gpu in last.gpus if (host := machine.ledger.host_of(gpu))}
        else:  # a later agent may have had other devices
            life = bisect_right(machine.run.lives, last.start_s, key=lambda life: life.at) - 1
            there = self._devices_of(life)
            hosts = {there[gpu].host for gpu in last.gpus if gpu in there}
        return hosts | {seat.host for seat in last.seats if seat.host}

    def _devices_of(self, life: int) -> Mapping[int, Device]:
        """The devices with which a life began, by number."""
        devices = self._machine.hosts.devices[life]
        if len(self._devices.get(life, ())) != len(devices):  # hosts have joined since
            self._devices[life] = {device.index: device for device in devices}
        return self._devices[life]

    def _saves(self, job: Job, now: float) -> str:
        return how_suspended(job, now, self._machine.estimates.unsaved_s(job, now=now))

    def _eta_s(self, job: Job, step: int) -> float | None:
        """Seconds of training left for a running job, by its own rate, else by its profile; on CPU cores by
        the rate measured there."""
        if job.state not in (JobState.STARTING, JobState.RUNNING) or job.steps is None:
            return None
        profile, usage = self._machine.estimates.profile(job), job.current.usage
        rate = job.rate or (profile.rate(job.width) if profile else usage.rate if usage else None)
        return round(max(0, job.steps - step) / rate, 1) if rate else None


def cores_status(job: Job) -> CoresStatus | None:
    """The cores of a job on CPU cores, and their measured usage; None for all others."""
    if job.spec.cpus is None:
        return None
    seats = job.current.seats if job.state.active else ()
    usage = job.current.usage if seats else None
    ranks = sorted(range(len(seats)), key=lambda rank: not seats[rank].server)
    return CoresStatus(
        budget=job.spec.cpus,
        host=seats[0].host if seats else None,
        servers=[seat.share for seat in seats if seat.server],
        workers=[seat.share for seat in seats if not seat.server],
        rate=usage.rate if usage else None,
        cpu=[usage.cpu[rank] for rank in ranks] if usage else None,
        net=[usage.net[rank] for rank in ranks] if usage else None,
    )


def name_successor(rundir: RunDir, job_id: str) -> None:
    """Put the batch job that goes on with the run into the last snapshot; the caller held its lock last.

    Raises StoreError.
    """
    page = read_file(rundir)
    page.run.allocation["next"] = job_id
    write_atomically(rundir.status, msgspec.json.encode(page), durable=True)


def elapsed_s(job: Job, now: float) -> float:
    """Seconds the job has had GPUs, or CPU cores."""
    return sum((now if a.end_s is None else a.end_s) - a.start_s for a in job.attempts)


def _may_start(plan: Plan | None, free: Mapping[str, int]) -> set[int]:
    """The jobs that a plan may keep from starting on free GPUs: their reason tells how many those are."""
    return set(plan.order) if plan is not None and plan.rule != "marble" and any(free.values()) else set()
