"""Actions into processes and signals, and what becomes of those back into events."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from selectors import EVENT_READ, BaseSelector, SelectorKey
from typing import TypedDict

from hpcsched.agent import disk_space
from hpcsched.agent.abandon import abandon
from hpcsched.agent.allocation.release import HostReleases
from hpcsched.agent.attempts import Resizing, WatchedAttempt, remove_attempt_files
from hpcsched.agent.clock import RunClock
from hpcsched.agent.exits import exited, launch_failed, not_launched
from hpcsched.agent.gpu_faults import GpuFaults
from hpcsched.agent.gpu_memory import GpuMemory, time_to_wait_s
from hpcsched.agent.job_folder import gpus_named, make_job_folder, mark_attempt, put_aside
from hpcsched.agent.launch_plans import Site, joining_plan, launch_plan, pack_name, put_layers, seat_devices
from hpcsched.agent.leaving import ask_to_leave
from hpcsched.agent.progress import ProgressMeter
from hpcsched.agent.rendezvous_check import NOT_MET_AFTER_S, RendezvousCheck
from hpcsched.agent.resuming import Resuming
from hpcsched.agent.timers import Timers
from hpcsched.agent.waiting_launches import WaitingLaunches
from hpcsched.contract import orders, variables
from hpcsched.contract.progress import Batching
from hpcsched.core import events as ev
from hpcsched.core.actions import (
    Action,
    AttemptAction,
    Kill,
    Launch,
    Pace,
    ReleaseHosts,
    Resize,
    SetTimer,
    Suspend,
    Terminate,
)
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import Kind, Progress
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Launcher, Workers
from hpcsched.printing import printable

RECORD_PERIOD_S = 1.0
"""How often the records of running jobs are looked at for periodic checkpoints."""


class _About(TypedDict):
    job_id: int
    attempt: int


class Effects:
    """Performs the core's actions on this host. Doing one twice does no harm."""

    def __init__(
        self,
        *,
        machine: Machine,
        launcher: Launcher,
        site: Site,
        clock: RunClock,
        selector: BaseSelector,
        memory: GpuMemory | None = None,
        releases: HostReleases | None = None,
    ) -> None:
        self._machine, self._launcher, self._site = machine, launcher, site
        self._clock, self._selector, self._memory = clock, selector, memory
        self._releases = releases
        if memory:
            selector.register(memory, EVENT_READ, ("memory", None))
        self._attempts: dict[int, WatchedAttempt] = {}
        self._timers, self._records_due = Timers(), 0.0
        self._gpu_faults = GpuFaults()
        self._resuming = Resuming(site)
        self._waiting = WaitingLaunches(self.perform, launcher, machine, clock)
        self._launched: set[int] = set()
        """Ids of jobs that may have left something in memory."""
        self.outputs: dict[int, Path] = {}
        """Where each job launched by this agent writes."""

    # --- actions ----------------------------------------------------------------------------

    def perform(self, action: Action) -> list[ev.Event]:
        """Do what the core asked for; returns what is known at once of how it went."""
        if isinstance(action, AttemptAction) and (told := self._waiting.takes(action)) is not None:
            return told
        match action:
            case Launch():
                return self._launch(action) if self._attempt_of(action) is None else []
            case SetTimer(key=key, due=due):
                self._timers.set(key, due)
            case ReleaseHosts(hosts=hosts) if self._releases:
                self._releases.begin(hosts)
            case Resize():
                attempt = self._attempt_of(action)
                return self._resize(attempt, action) if attempt else []
            case Pace(share=share):
                if attempt := self._attempt_of(action):
                    attempt.workers.tell(orders.Pace(share))
            case Suspend() | Terminate() | Kill():
                if attempt := self._attempt_of(action):
                    ask_to_leave(attempt, action, self._machine.run.jobs[action.job_id], self._clock)
        return []

    def _attempt_of(self, action: AttemptAction) -> WatchedAttempt | None:
        attempt = self._attempts.get(action.job_id)
        return attempt if attempt and attempt.attempt == action.attempt else None

    def _launch(self, action: Launch) -> list[ev.Event]:
        job = self._machine.run.jobs[action.job_id]
        devices = tuple(self._machine.ledger.devices[gpu] for gpu in action.gpus) or seat_devices(
            action.seats
        )
        about = _About(job_id=job.id, attempt=action.attempt)
        folder = self._site.rundir.job(job.id)
        try:
            plan = launch_plan(
                job,
                action,
                site=self._site,
                devices=devices,
                profile=self._machine.estimates.profile(job),
                shared=self._machine.mechanism(Background).used,
                continues=self._machine.run.by_name.get(job.spec.continues or ""),
                pack=pack_name(job, action, self._machine, self._site),
                room_mib=self._machine.ledger.room_mib(job),
            )
            told = self._resuming.planned(job, action, plan, self._machine.run.jobs.since)
            if told is None or not self._launcher.ready_for(told):
                self._waiting.put_off(action)
                return []
            if make_job_folder(folder, lambda: self._site.checkpoints_of(job.id)):
                told = replace(told, new=True)
            else:
                remove_attempt_files(folder, action.attempt, held=job.id not in self._launcher.keeping())
            put_layers(job, self._site, devices[0].kind, folder)
            if action.anew:
                self._launcher.forget(job.id)
                put_aside(folder, self._site.checkpoints_of(job.id), action.attempt)
            if action.attempt > 1:
                resumed = told.env.get(variables.RESUME) == "1"
                step = job.step if job.reports else None
                where = gpus_named(action.gpus, self._machine.ledger.noun)
                mark_attempt(plan.output, action.attempt, where=where, resumed=resumed, step=step)
            workers = self._launcher.launch(told)
        except MemoryError:
            raise
        except Exception as error:  # whatever is wrong with a job, the others go on
            where = disk_space.full_directory(error, folder)
            failed = launch_failed(not_launched(error), self._clock.now(), no_room=where, **about)
            return [*self._waiting.over(**about), failed]
        attempt = WatchedAttempt(
            job_id=job.id,
            attempt=action.attempt,
            workers=workers,
            ranks=len(devices),
            gpus=action.gpus,
            folder=folder,
            output=plan.output,
            checkpoints=self._site.checkpoints_of(job.id),
            measured=job.spec.kind is not Kind.REPLAY and not self._site.stand_ins,
            self_saving=self._resuming.watch(job, workers),
            followed=self._resuming.followed(job),
        )
        if job.spec.kind is Kind.COMMAND and plan.per_rank and len(devices) > 1:
            here, _, port = workers.where.rpartition(":")
            if here == "127.0.0.1":
                attempt.rendezvous = RendezvousCheck(int(port), len(devices))
        self.follow(attempt)
        host, at = devices[0].host, self._clock.now()
        spawned = ev.WorkersSpawned(at=at, processes=workers.processes, host=host, **about)
        return [*self._waiting.over(**about), spawned]

    def follow(self, attempt: WatchedAttempt) -> None:
        """Watch an attempt that was launched, or that runs on from another agent."""
        for group in attempt.groups:
            self._watch(attempt, group)
        if (descriptor := attempt.workers.progress_fd) is not None:
            attempt.meter = ProgressMeter(descriptor, speed=self._clock.speed)
            if attempt.taken_over:
                job = self._machine.run.jobs[attempt.job_id]
                attempt.meter.begin(job.step, again=job.current.again)
            attempt.watched.add(descriptor)
            self._selector.register(descriptor, EVENT_READ, ("progress", attempt))
        self._attempts[attempt.job_id] = attempt
        self._launched.add(attempt.job_id)
        self.outputs[attempt.job_id] = attempt.output

    def _watch(self, attempt: WatchedAttempt, group: Workers) -> None:
        for descriptor in group.pidfds:
            attempt.watched.add(descriptor)
            self._selector.register(descriptor, EVENT_READ, ("exit", attempt))

    def _resize(self, attempt: WatchedAttempt, action: Resize) -> list[ev.Event]:
        """Start who is to join, and tell rank 0; the training goes on until all are there."""
        if attempt.resizing:
            return []
        new = tuple(self._machine.ledger.devices[gpu] for gpu in action.gpus) or seat_devices(action.seats)
        keep = list(action.keep) or [rank for rank, gpu in enumerate(attempt.gpus) if gpu in action.gpus]
        joining = new[len(keep) :]
        one_host = len({device.host for device in new}) == 1
        where = attempt.workers.where
        if one_host and where:
            where = f"127.0.0.1:{where.rpartition(':')[2]}"
        group: Workers | None = None
        try:
            remove_attempt_files(attempt.folder, action.attempt + 1)
            if joining:
                plan = joining_plan(
                    self._machine.run.jobs[action.job_id],
                    action,
                    site=self._site,
                    devices=joining,
                    staying=len(keep),
                    where=where,
                    shared=self._machine.mechanism(Background).used,
                )
                group = self._launcher.launch(plan)
                self._watch(attempt, group)
        except (LaunchError, OSError, ValueError) as error:
            about = _About(job_id=action.job_id, attempt=action.attempt)
            return [ev.ResizeFailed(at=self._clock.now(), **about, error=str(error))]
        order = orders.Resize(
            attempt=action.attempt + 1,
            world_size=len(new),
            keep=tuple(keep),
            one_host=one_host,
            seats=tuple(action.seats),
            where=where,
        )
        attempt.resize(Resizing(action.attempt + 1, action.gpus, len(new), group), order)
        return []

    # --- events -----------------------------------------------------------------------------

    def on_readable(self, key: SelectorKey) -> list[ev.Event]:
        """The events of a readable descriptor of an attempt: a rank has ended, or progress was reported."""
        kind, attempt = key.data
        if kind == "memory" and self._memory:  # `collect` sees whose GPUs have become free
            self._memory.heard()
            return []
        if key.fd not in attempt.watched:
            return []  # told together with what ended the attempt
        if kind == "progress":
            if attempt.meter is None or not attempt.meter.read():
                self._unwatch(attempt, key.fd)
            return []
        self._unwatch(attempt, key.fd)
        return self._reap(attempt)

    def _unwatch(self, attempt: WatchedAttempt, descriptor: int) -> None:
        attempt.watched.remove(descriptor)
        self._selector.unregister(descriptor)

    def _reap(self, attempt: WatchedAttempt) -> list[ev.Event]:
        """Look whether an attempt is over; its end is told once its GPUs can be given on."""
        if not attempt.ends():
            return list(self._resized(attempt))
        if attempt.meter:
            attempt.meter.read()
        for descriptor in list(attempt.watched):
            self._unwatch(attempt, descriptor)
        return self._end(attempt)

    def _end(self, attempt: WatchedAttempt) -> list[ev.Event]:
        """The end of an attempt that is over; none yet while its GPUs are still in use."""
        if not attempt.looked():
            return []
        if not self._can_give_on(attempt, attempt.held_gpus, "end"):
            return []
        if self._memory:
            self._memory.forget((attempt.job_id, "resize"))  # its GPUs were among those
        news = list(self._resized(attempt))
        attempt.close()
        del self._attempts[attempt.job_id]
        if isinstance(attempt.over, LaunchError):
            about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
            no_room = disk_space.full_directory(attempt.over, attempt.folder)
            return [*news, launch_failed(attempt.over, self._clock.now(), no_room=no_room, **about)]
        assert attempt.over is not None
        job, at = self._machine.run.jobs[attempt.job_id], self._clock.now()
        unusable = self._gpu_faults.judge(attempt, attempt.over, job.spec, self._attempts.values())
        if unusable and unusable.lost is not None:  # before the end, which is no failure of the job then
            news.append(ev.DeviceLost(at=at, gpu=unusable.lost, why=unusable.why))
        news += self._seen_of(attempt, at)
        known, blamed = job.saved_step or 0, unusable.why if unusable else ""
        steps = job.spec.steps
        return [*news, exited(attempt, attempt.over, at=at, known_step=known, blamed=blamed, steps=steps)]

    def _seen_of(self, attempt: WatchedAttempt, now: float) -> Iterator[ev.Event]:
        """What is new of an attempt that is watched from outside."""
        saving, meter = attempt.self_saving, attempt.meter
        if meter and (watched := saving or attempt.followed):
            meter.seen(watched.report)
        if saving:
            about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
            trains = meter is not None and meter.last is not None
            yield from saving.news(now, time.time(), speed=self._clock.speed, trains=trains, **about)

    def _can_give_on(self, attempt: WatchedAttempt, gpus: set[int], what: str) -> bool:
        """Whether what an attempt has had can be given on: the memory of its GPUs is free, or time is up.

        GPUs that another attempt uses are not asked, nor those that were lost.
        """
        if self._memory is None or (attempt.over == 0 and self._machine.run.unfinished == 1):
            return True  # the last job of the run: nobody gets them
        within_s = time_to_wait_s(self._machine.deadline, self._clock)
        others = (other for other in self._attempts.values() if other is not attempt and other.over is None)
        own = gpus.difference(*(other.held_gpus for other in others))
        devices = [self._machine.ledger.devices[gpu] for gpu in own & self._machine.ledger.devices.keys()]
        return self._memory.free((attempt.job_id, what), devices, attempt.left, within_s=within_s)

    def _resized(self, attempt: WatchedAttempt) -> Iterator[ev.Event]:
        """How a resize has ended, if it has."""
        about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
        began = attempt.resizing.began if attempt.resizing else 0.0
        over = attempt.over is not None
        end = attempt.resized(lambda gpus: over or self._can_give_on(attempt, gpus, "resize"))
        while attempt.ended:
            group = attempt.ended.pop()
            for descriptor in attempt.watched.intersection(group.pidfds):
                self._unwatch(attempt, descriptor)
            group.close()
        if isinstance(end, Resizing):
            at, error = self._clock.now(), printable(end.failed)
            yield ev.ResizeFailed(at=at, **about, error=error, refused=end.refused)
        elif end is not None:
            lasted_s = time.monotonic() - began
            yield ev.WorkersResized(
                at=self._clock.now(),
                **about,
                step=end.step or 0,
                stopped_s=end.stopped_s,
                built_s=max(0.0, lasted_s - (end.stopped_s or 0.0)),
            )

    def collect(self) -> Iterator[ev.Event]:
        """Events that no descriptor reports: due timers, ready files, periodic checkpoints."""
        now = self._clock.now()
        rings = filter(self._waiting.counts, self._timers.rings(now))
        yield from (ev.TimerFired(at=now, key=key) for key in rings)
        yield from chain.from_iterable(self._waiting.again())
        if self._releases:
            yield from self._releases.events(now)
        self._launcher.keeping()  # it begins what is due, and sees to what hangs
        look_at_records = time.monotonic() >= self._records_due
        if look_at_records:
            self._records_due = time.monotonic() + RECORD_PERIOD_S
            self._forget_the_finished()
        for attempt in list(self._attempts.values()):
            if attempt.over is not None:
                yield from self._end(attempt)
                continue
            yield from self._resized(attempt)
            about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
            if not attempt.ready and (word := attempt.ready_report()):
                attempt.ready = True
                self._gpu_faults.note_ready(self._machine.run.jobs[attempt.job_id].spec)
                took_s = time.monotonic() - attempt.began if attempt.measured else None
                in_place, parallel = word.in_place, word.parallel
                yield ev.WorkersReady(at=now, **about, in_place=in_place, parallel=parallel, took_s=took_s)
            if attempt.rendezvous and (met := attempt.rendezvous.news(ready=attempt.ready)) is not None:
                ranks = attempt.rendezvous.ranks
                yield ev.WorkersApart(at=now, **about, processes=ranks, seconds=NOT_MET_AFTER_S, met=met)
            yield from self._seen_of(attempt, now)
            went_back = look_at_records and attempt.meter is not None and attempt.meter.new_repeats()
            if went_back and (seen := attempt.progress(self._clock)):
                yield ev.ProgressObserved(at=now, progress=(seen,))
            if attempt.meter and (scaling := attempt.meter.new_scaling()):
                yield ev.ScalingProposed(at=now, **about, rates=scaling.rates, batch=scaling.batch)
            if attempt.meter and (usage := attempt.meter.new_usage(attempt.attempt)):
                yield ev.UsageMeasured(at=now, **about, **usage)
            if attempt.kill_at is not None and time.monotonic() >= attempt.kill_at:
                attempt.kill_at = None
                attempt.send(signal.SIGKILL)
            record = attempt.new_record() if look_at_records else None
            if record and record.attempt == attempt.attempt:
                yield ev.CheckpointSaved(at=now, **about, step=record.step)

    def _forget_the_finished(self) -> None:
        """What is kept in memory for a job's next attempt goes when there will be none."""
        over = set(filter(self._machine.run.jobs.is_over, self._launched))
        self._launched -= over
        for job_id in over:
            self._launcher.forget(job_id)
        self._timers.forget(over)

    def keeping(self) -> set[int]:
        """Ids of the jobs whose newest state is still on its way from memory to disk."""
        return self._launcher.keeping()

    def signal(self, job_id: int, sig: signal.Signals) -> bool:
        """Send a user's signal to a job's processes; whether it has any."""
        mine = [one for one in self._attempts.values() if one.job_id == job_id]
        for group in (group for one in mine for group in (one.workers, *one.joined)):
            group.signal(sig)
        return bool(mine)

    def progress(self) -> tuple[Progress, ...]:
        """The progress of the running attempts that report it."""
        told = (attempt.progress(self._clock) for attempt in self._attempts.values())
        return tuple(one for one in told if one is not None)

    def attempt(self, job_id: int) -> WatchedAttempt | None:
        """The attempt of a job whose processes are watched."""
        return self._attempts.get(job_id)

    def batchings(self) -> dict[int, Batching]:
        """How each job with adaptive batches computes its global batch, by job id."""
        lines = {attempt.job_id: attempt.meter.last for attempt in self._attempts.values() if attempt.meter}
        return {job_id: line.batching for job_id, line in lines.items() if line and line.batching}

    def wait_s(self) -> float:
        """Real seconds until `collect` should be called again, at most a quarter of one."""
        now = time.monotonic()
        soon = self._waiting or any(attempt.news_expected(now) for attempt in self._attempts.values())
        soonest = 0.05 if soon else 0.25
        first = self._timers.first
        return soonest if first is None else min(soonest, self._clock.until(first))

    def kill(self) -> None:
        """Kill all workers; their ends are reported like any other."""
        for attempt in self._attempts.values():
            attempt.send(signal.SIGKILL)

    def abandon(
        self, grace_s: float, between: Callable[[], None] = lambda: None
    ) -> list[tuple[int, int | None]]:
        """Have all workers save and leave, without the journal; see `abandon.abandon`."""
        return abandon(self._attempts, grace_s, between)
