"""Shared memory (arenas) that outlives a job's attempts, and the keepers that make states in it durable."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcsched.contract import files
from hpcsched.errors import LaunchError
from hpcsched.launch.proc import wait_ended
from hpcsched.launch.zygote import KEEPER
from hpcsched.patience import PATIENCE_S, TRANSIENT

MAX_IDLE_STATES = 64
"""The most arenas kept for jobs without an attempt (chosen): each is a descriptor and a training's state."""

KEEPER_DELAY_S = 0.1
"""Time from a quick suspend to the start of its keeper (chosen): the launches that it was for go first."""

KEEPER_HANGS_AFTER_S = 120.0
"""Time without any activity after which a keeper counts as hung (chosen)."""

KEEPER_CHECK_EVERY_S = 5.0
"""How often keepers are checked for activity, and their held files touched (chosen). A process that waits for
such a state gives up when the file was not touched for a minute."""

KEEPER_TRIES = 2
"""How often a keeper is started for a state (chosen)."""

BEGUN_AGAIN_S = 0.5
"""When one is started again that could not be, for PATIENCE_S, where the error may pass (chosen)."""

Begin = Callable[["KeeperTask"], tuple[int, int]]
"""Starts a keeper; returns its pid and pidfd. Raises OSError, LaunchError."""


class SharedMemoryStore:
    """The arenas of jobs: shared memory that outlives their attempts. It is empty at first."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()  # by job; launched longest ago first
        self._used: Counter[int] = Counter()

    def take(self, job_id: int) -> int:
        """The descriptor of a job's arena, for an attempt; `leave` is to be called when that is over."""
        if job_id not in self._held:
            self._held[job_id] = os.memfd_create(f"hpcsched-{job_id}", os.MFD_CLOEXEC)
        self._held.move_to_end(job_id)
        self._used[job_id] += 1
        self._forget_some()
        return self._held[job_id]

    def leave(self, job_id: int) -> None:
        """Note that an attempt of the job is over."""
        self._used[job_id] -= 1
        self._forget_use(job_id)
        self._forget_some()

    def forget(self, job_id: int) -> None:
        """Close a job's arena; its memory is freed when the last process that has it ends."""
        descriptor = self._held.pop(job_id, None)
        if descriptor is not None:
            os.close(descriptor)
        self._forget_use(job_id)

    def close(self) -> None:
        """Close all arenas."""
        for job_id in list(self._held):
            self.forget(job_id)

    def _forget_some(self) -> None:
        idle = [job_id for job_id in self._held if self._used[job_id] <= 0]
        for job_id in idle[: max(0, len(idle) - MAX_IDLE_STATES)]:
            self.forget(job_id)

    def _forget_use(self, job_id: int) -> None:
        if self._used[job_id] <= 0 and job_id not in self._held:
            del self._used[job_id]


@dataclass(slots=True, eq=False)
class KeeperTask:
    """The task of making one quick suspend's state durable.

    `arena`: a descriptor of its own. `env`: that of the attempt's rank 0. `python`: the interpreter of the
    keeper. `due`: the time at which it is to start or, once it runs, counts as hung. `patient_until`: until
    when errors are waited for that keep it from being started. `moved`: the activity counts of its process
    at the last check.
    """

    job_id: int
    attempt: int
    folder: Path
    cwd: Path
    output: Path
    env: Mapping[str, str]
    arena: int
    python: str
    due: float = 0.0
    look_at: float = 0.0
    tries: int = 0
    patient_until: float = 0.0
    moved: tuple[int, ...] = ()
    pid: int = 0
    pidfd: int = -1

    @property
    def argv(self) -> tuple[str, ...]:
        """The keeper's command."""
        return self.python, "-m", KEEPER

    @property
    def held(self) -> Path:
        """The held file; it is removed when the state is durable, or given up."""
        return self.folder / files.held(self.attempt)

    def close(self) -> None:
        """Close its descriptors."""
        for descriptor in (self.arena, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self.arena = self.pidfd = -1


class Keepers:
    """Processes that write durable checkpoints from arenas in the background; one for each job at a time."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._running: dict[int, KeeperTask] = {}
        self._next: dict[int, KeeperTask] = {}

    def keep(self, task: KeeperTask) -> None:
        """Have a state made durable, soon. It replaces an older one whose keeper has not started."""
        task.due = time.monotonic() + KEEPER_DELAY_S
        before = self._next.pop(task.job_id, None)
        if before:
            self._drop(before)
        self._next[task.job_id] = task

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state is not durable yet. Starts keepers that are due, kills hung ones."""
        now = time.monotonic()
        for task in (*self._running.values(), *self._next.values()):
            if now >= task.look_at:
                task.look_at = now + KEEPER_CHECK_EVERY_S
                with contextlib.suppress(OSError):  # gone: it is durable
                    os.utime(task.held)
                self._see_moving(task, now)
        for task in list(self._running.values()):
            self._look(task, now)
        for job_id, task in list(self._next.items()):
            if job_id not in self._running and now >= task.due:
                del self._next[job_id]
                self._start(task, now)
        return self._running.keys() | self._next.keys()

    def wait(self, timeout_s: float) -> set[int]:
        """Wait until all states are durable, or the time is over; ids of the jobs that are left."""
        deadline = time.monotonic() + timeout_s
        for task in self._next.values():
            task.due = 0.0
        while (left := self.keeping()) and time.monotonic() < deadline:
            wait_ended([task.pidfd for task in self._running.values()], 0.05)
            time.sleep(0 if self._running else 0.005)
        return left

    def close(self) -> None:
        """Stop looking after keepers: those that run go on by themselves, the others are not started."""
        for task in self._next.values():
            self._drop(task)
        for task in self._running.values():
            task.close()
        self._running.clear()
        self._next.clear()

    def _start(self, task: KeeperTask, now: float) -> None:
        task.tries += 1
        try:
            task.pid, task.pidfd = self._begin(task)
        except (OSError, LaunchError) as error:
            task.patient_until = task.patient_until or now + PATIENCE_S
            if _transient(error) and now < task.patient_until:
                task.tries -= 1
                task.due = now + BEGUN_AGAIN_S
                self._next[task.job_id] = task
            else:
                self._failed(task)
            return
        task.due, task.moved = now + KEEPER_HANGS_AFTER_S, ()
        self._running[task.job_id] = task

    def _look(self, task: KeeperTask, now: float) -> None:
        if not wait_ended([task.pidfd], 0):
            if now >= task.due and not self._see_moving(task, now):
                self._kill(task)
            return
        self._kill(task)  # what it may have left behind
        code = -1
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(task.pid, 0)[1])
        del self._running[task.job_id]
        if code == 0:
            self._drop(task)
        else:
            self._failed(task)

    def _see_moving(self, task: KeeperTask, now: float) -> bool:
        """Whether a running keeper was active since the last check; then its time begins anew."""
        if self._running.get(task.job_id) is not task:
            return False
        moved = _moved(task.pid)
        if moved == task.moved:
            return False
        task.due, task.moved = now + KEEPER_HANGS_AFTER_S, moved
        return True

    def _failed(self, task: KeeperTask) -> None:
        if task.tries < KEEPER_TRIES and task.job_id not in self._next:
            if task.pidfd >= 0:
                os.close(task.pidfd)
            task.due, task.pidfd = 0.0, -1
            self._next[task.job_id] = task
        else:
            self._drop(task)

    def _drop(self, task: KeeperTask) -> None:
        """End a task, and remove its held file."""
        task.close()
        with contextlib.suppress(OSError):
            task.held.unlink(missing_ok=True)

    @staticmethod
    def _kill(task: KeeperTask) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(task.pid, signal.SIGKILL)


def _transient(error: OSError | LaunchError) -> bool:
    return error.transient if isinstance(error, LaunchError) else error.errno in TRANSIENT


def _moved(pid: int) -> tuple[int, ...]:
    """Counts that change while a process is active: bytes written, CPU time used."""
    try:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # While it waits for storage, as at the end of a long fsync, that is at work; a second try waits too.
        waiting = [time.monotonic_ns()] if state == "D" else []
        return (int(counts["wchar"]), int(counts["write_bytes"]), *map(int, fields[10:12]), *waiting)
    except (OSError, KeyError, ValueError):
        return ()
