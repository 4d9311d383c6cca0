"""Actions into processes and signals, and what becomes of those back into events."""

from __future__ import annotations

import errno
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import TypedDict

import msgspec

from hpcsched.agent.clock import RunClock
from hpcsched.agent.orders import Site, plan_of
from hpcsched.agent.progress import MOST_STEPS, ProgressMeter
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Kill, Launch, MakePlan, SetTimer, Suspend, Terminate
from hpcsched.core.machine import Machine
from hpcsched.core.model import Kind, Progress
from hpcsched.errors import LaunchError, StoreError
from hpcsched.launch.base import Launcher, Workers

REST_OF_GROUP_S = 5.0
"""How long the other ranks may live once one has failed, before they are killed."""

RECORD_PERIOD_S = 1.0
"""How often the records of running jobs are looked at for periodic checkpoints."""

READY_SOON_S = 10.0
"""So long after its launch an attempt is looked at often, so that a promotion does not wait for it."""

TAIL_BYTES = 4096

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class _About(TypedDict):
    job_id: int
    attempt: int


class JobRecord(msgspec.Struct, kw_only=True):
    """STATE.json as programs write it; what we do not know of it is left alone."""

    step: int
    attempt: int | None = None
    samples: int | None = None
    checkpoint: str | None = None
    metrics: dict[str, float] = {}


def read_record(folder: Path, data: bytes | None = None) -> JobRecord | None:
    """A job's STATE.json (or `data`, where that is newer), or None if there is none or it makes no sense."""
    try:
        data = (folder / "STATE.json").read_bytes() if data is None else data
        record = msgspec.json.decode(data, type=JobRecord)
    except (OSError, msgspec.MsgspecError):
        return None
    return record if 0 <= record.step <= MOST_STEPS else None


def last_line(path: Path) -> str:
    """The last line with something on it of a job's output, shortened; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            # Progress bars end their lines with a carriage return.
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def no_room(error: Exception, folder: Path) -> bool:
    """Whether something failed because the file system of a job's folder is full or read-only."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _FULL:
        return False
    return str(cause.filename or "").startswith(str(folder))


@dataclass(slots=True)
class _Attempt:
    """An attempt's processes and what we watch of them."""

    job_id: int
    attempt: int
    workers: Workers
    folder: Path
    output: Path
    meter: ProgressMeter | None
    watched: set[int]
    teaches: bool
    """Whether its throughput is its own: a stand-in only follows a profile."""
    ready: bool = False
    soon: float = 0.0
    record_seen: int | bytes = 0
    kill_at: float | None = None


class Effects:
    """Performs the core's actions on this host. Doing one twice does no harm."""

    def __init__(
        self,
        *,
        machine: Machine,
        launcher: Launcher,
        site: Site,
        clock: RunClock,
        selector: selectors.BaseSelector,
    ) -> None:
        self._machine, self._launcher = machine, launcher
        self._site, self._clock, self._selector = site, clock, selector
        self._attempts: dict[int, _Attempt] = {}
        self._timers: list[tuple[float, tuple[str, int, int]]] = []
        self._due: dict[tuple[str, int, int], float] = {}
        self._records_due = 0.0
        self.outputs: dict[int, Path] = {}
        """Where each job launched by this agent writes."""

    # --- actions ----------------------------------------------------------------------------

    def perform(self, action: Action) -> list[ev.Event]:
        """Do what the core asked for; returns what is known at once of how it went.

        Raises StoreError when there is no room to launch in: a job must not fail for that.
        """
        match action:
            case Launch():
                return [self._launch(action)] if self._attempt_of(action) is None else []
            case MakePlan():
                return [ev.PlanMade(at=self._clock.now(), plan=self._machine.make_plan())]
            case SetTimer(key=key, due=due):
                self._due[key] = due
                heappush(self._timers, (due, key))
            case Suspend() | Terminate() | Kill():
                attempt = self._attempt_of(action)
                if attempt:
                    attempt.workers.signal(_SIGNALS[type(action)])
        return []

    def _attempt_of(self, action: Launch | Suspend | Terminate | Kill) -> _Attempt | None:
        attempt = self._attempts.get(action.job_id)
        return attempt if attempt and attempt.attempt == action.attempt else None

    def _launch(self, action: Launch) -> ev.Event:
        job = self._machine.jobs[action.job_id]
        devices = tuple(self._machine.devices[gpu] for gpu in action.gpus)
        about = _About(job_id=job.id, attempt=action.attempt)
        folder = self._site.rundir.job(job.id)
        try:
            plan = plan_of(
                job,
                action,
                site=self._site,
                devices=devices,
                profile=self._machine.profile(job),
            )
            folder.mkdir(mode=0o700, exist_ok=True)
            # A journal that lost its tail gives an attempt's number twice.
            (folder / f"ready.{action.attempt}").unlink(missing_ok=True)
            workers = self._launcher.launch(plan)
        except (LaunchError, OSError, ValueError) as error:
            if no_room(error, folder):
                raise StoreError(f"cannot start job {job.id} ({job.spec.name}): {error}") from error
            if not isinstance(error, LaunchError):
                error = LaunchError(str(error), transient=False)
            return self._failed(error, about)
        attempt = _Attempt(
            job_id=job.id,
            attempt=action.attempt,
            workers=workers,
            folder=folder,
            output=plan.output,
            meter=None,
            watched=set(workers.pidfds),
            teaches=job.spec.kind is not Kind.REPLAY,
            soon=time.monotonic() + READY_SOON_S,
        )
        for descriptor in workers.pidfds:
            self._selector.register(descriptor, selectors.EVENT_READ, ("exit", attempt))
        if workers.progress_fd is not None:
            attempt.meter = ProgressMeter(workers.progress_fd, speed=self._clock.speed)
            attempt.watched.add(workers.progress_fd)
            self._selector.register(workers.progress_fd, selectors.EVENT_READ, ("progress", attempt))
        self._attempts[job.id] = attempt
        self.outputs[job.id] = plan.output
        return ev.WorkersSpawned(
            at=self._clock.now(), processes=workers.processes, host=devices[0].host, **about
        )

    def _failed(self, error: LaunchError, about: _About) -> ev.LaunchFailed:
        return ev.LaunchFailed(
            at=self._clock.now(),
            error=str(error),
            transient=error.transient,
            host_fault=error.host_fault,
            **about,
        )

    # --- events -----------------------------------------------------------------------------

    def on_readable(self, key: selectors.SelectorKey) -> list[ev.Event]:
        """A descriptor of an attempt has news: a rank ended, or progress was reported."""
        kind, attempt = key.data
        if key.fd not in attempt.watched:
            return []  # told together with what ended the attempt
        if kind == "progress":
            if attempt.meter is None or not attempt.meter.read():
                self._unwatch(attempt, key.fd)
            return []
        self._unwatch(attempt, key.fd)
        return self._reap(attempt)

    def _unwatch(self, attempt: _Attempt, descriptor: int) -> None:
        attempt.watched.remove(descriptor)
        self._selector.unregister(descriptor)

    def _reap(self, attempt: _Attempt) -> list[ev.Event]:
        failure = None
        try:
            code = attempt.workers.reap()
        except LaunchError as error:
            code, failure = 1, error
        if code is None:
            if attempt.workers.failed_early() and attempt.kill_at is None:
                # Its peers would wait in a collective for ever.
                attempt.workers.signal(signal.SIGTERM)
                attempt.kill_at = time.monotonic() + REST_OF_GROUP_S
            return []
        if attempt.meter:
            attempt.meter.read()
        last = attempt.meter.last if attempt.meter else None
        for descriptor in list(attempt.watched):
            self._unwatch(attempt, descriptor)
        attempt.workers.close()
        del self._attempts[attempt.job_id]
        about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
        if failure is not None:
            return [self._failed(failure, about)]
        record = self._record(attempt)
        saved = record.step if record else None
        steps = [] if last is None else [last.step]
        if saved is not None and code in (0, 75):
            steps.append(saved)
        return [
            ev.WorkersExited(
                at=self._clock.now(),
                **about,
                code=code,
                step=max(steps, default=None),
                saved_step=saved,
                detail="" if code in (0, 75) else last_line(attempt.output),
                metrics=record.metrics if record and code == 0 else {},
            )
        ]

    def collect(self) -> Iterator[ev.Event]:
        """What is not told by a descriptor: due timers, ready files, periodic checkpoints."""
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            due, key = heappop(self._timers)
            if self._due.get(key) == due:  # else a later one has replaced it
                del self._due[key]
                yield ev.TimerFired(at=now, key=key)
        look_at_records = time.monotonic() >= self._records_due
        if look_at_records:
            self._records_due = time.monotonic() + RECORD_PERIOD_S
        for attempt in self._attempts.values():
            about = _About(job_id=attempt.job_id, attempt=attempt.attempt)
            if not attempt.ready and self._is_ready(attempt):
                attempt.ready = True
                yield ev.WorkersReady(at=now, **about)
            if attempt.kill_at is not None and time.monotonic() >= attempt.kill_at:
                attempt.kill_at = None
                attempt.workers.signal(signal.SIGKILL)
            if look_at_records and self._record_changed(attempt):
                record = self._record(attempt)
                if record and record.attempt == attempt.attempt:
                    yield ev.CheckpointSaved(at=now, **about, step=record.step)

    @staticmethod
    def _record(attempt: _Attempt) -> JobRecord | None:
        """The newest record: what the host of rank 0 sees may not have reached us yet, or the reverse."""
        told = attempt.workers.record
        records = [read_record(attempt.folder), read_record(attempt.folder, told) if told else None]
        found = [record for record in records if record]
        return max(found, key=lambda record: (record.attempt or 0, record.step), default=None)

    @staticmethod
    def _is_ready(attempt: _Attempt) -> bool:
        return attempt.workers.ready or (attempt.folder / f"ready.{attempt.attempt}").exists()

    @staticmethod
    def _record_changed(attempt: _Attempt) -> bool:
        seen: int | bytes | None = attempt.workers.record
        if seen is None:
            try:
                seen = (attempt.folder / "STATE.json").stat().st_mtime_ns
            except OSError:
                return False
        changed = seen != attempt.record_seen
        attempt.record_seen = seen
        return changed

    def progress(self) -> tuple[Progress, ...]:
        """How far the running attempts are, of those that tell."""
        return tuple(
            Progress(
                job_id=attempt.job_id,
                attempt=attempt.attempt,
                step=attempt.meter.last.step,
                rate=attempt.meter.rate,
                done_s=self._done_s(attempt.meter.last.t) if attempt.teaches else None,
            )
            for attempt in self._attempts.values()
            if attempt.meter and attempt.meter.last
        )

    def _done_s(self, wall: float) -> float:
        """When a step was done that a program reported for a Unix time: it may say anything."""
        return max(0.0, min(self._clock.now(), self._clock.at_wall(wall)))

    def wait_s(self) -> float:
        """Real seconds until `collect` should be called again, at most a quarter of one."""
        now = time.monotonic()
        soonest = 0.05 if any(not a.ready and now < a.soon for a in self._attempts.values()) else 0.25
        if self._timers:
            soonest = min(soonest, self._clock.until(self._timers[0][0]))
        return soonest

    def kill(self) -> None:
        """Kill all workers; that they are gone is told like any other end."""
        for attempt in self._attempts.values():
            attempt.workers.signal(signal.SIGKILL)

    def abandon(
        self, grace_s: float, between: Callable[[], None] = lambda: None
    ) -> list[tuple[int, int | None]]:
        """The store is gone: have all workers save and leave without it; job ids and exit codes.

        Those that have not left after `grace_s` are killed. `between` is called again and again meanwhile.
        """
        codes: list[tuple[int, int | None]] = []
        deadline = time.monotonic() + grace_s
        for attempt in self._attempts.values():
            attempt.workers.signal(signal.SIGTSTP if attempt.ready else signal.SIGTERM)
        killed = False
        while self._attempts:
            for attempt in list(self._attempts.values()):
                try:
                    code = attempt.workers.reap()
                except LaunchError:
                    code = 1
                if code is not None:
                    codes.append((attempt.job_id, code))
                    attempt.workers.close()
                    del self._attempts[attempt.job_id]
            if time.monotonic() > deadline and not killed:
                killed = True
                for attempt in self._attempts.values():
                    attempt.workers.signal(signal.SIGKILL)
            elif time.monotonic() > deadline + REST_OF_GROUP_S:
                return [*codes, *((job_id, None) for job_id in self._attempts)]
            between()
            time.sleep(0.02)
        return codes


_SIGNALS = {Suspend: signal.SIGTSTP, Terminate: signal.SIGTERM, Kill: signal.SIGKILL}
