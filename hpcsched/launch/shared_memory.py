"""What outlives an attempt in memory: the arenas of jobs, and the keepers that make their content durable."""

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

MOST_IDLE = 64
"""So many arenas are kept of jobs that have no attempt: each is a descriptor, and the state of a training."""

KEEP_AFTER_S = 0.1
"""How long after a quick suspend its keeper starts: the launches that it was for go first."""

KEPT_WITHIN_S = 120.0
"""How long a keeper may do nothing at all, before it counts as hung."""

LOOK_EVERY_S = 5.0
"""How often it is seen whether keepers still move, and said that their states are on their way to disk. Who
waits for such a state gives up when that has not been said for a minute."""

TRIES = 2
"""How often a state is tried to be made durable."""

Begin = Callable[["Keep"], tuple[int, int]]
"""Starts a keeper; returns its pid and pidfd. Raises OSError, LaunchError."""


class Arenas:
    """Shared memory that outlives the attempts of a job: empty at first, ranks make of it what they want."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()  # by job; launched longest ago first
        self._used: Counter[int] = Counter()

    def take(self, job_id: int) -> int:
        """The descriptor of a job's arena, for an attempt of it; to be given back by `leave`."""
        if job_id not in self._held:
            self._held[job_id] = os.memfd_create(f"hpcsched-{job_id}", os.MFD_CLOEXEC)
        self._held.move_to_end(job_id)
        self._used[job_id] += 1
        self._forget_some()
        return self._held[job_id]

    def leave(self, job_id: int) -> None:
        """An attempt of the job is over."""
        self._used[job_id] -= 1
        self._forget_some()

    def forget(self, job_id: int) -> None:
        """Let go of a job's arena; its memory is freed when the last process that has it ends."""
        descriptor = self._held.pop(job_id, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of all."""
        for job_id in list(self._held):
            self.forget(job_id)

    def _forget_some(self) -> None:
        idle = [job_id for job_id in self._held if self._used[job_id] <= 0]
        for job_id in idle[: max(0, len(idle) - MOST_IDLE)]:
            self.forget(job_id)
            del self._used[job_id]


@dataclass(slots=True, eq=False)
class Keep:
    """The state of one quick suspend: what its keeper is given, and how far it is.

    `arena`: a descriptor of its own. `env`: that of the attempt's rank 0. `python`: the interpreter with the
    worker that reads what was left. `due`: when it is to start or, once it runs, counts as hung. `moved`: how
    far its process was when it was last looked at.
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
    moved: tuple[int, ...] = ()
    pid: int = 0
    pidfd: int = -1

    @property
    def argv(self) -> tuple[str, ...]:
        """What its keeper runs."""
        return self.python, "-m", KEEPER

    @property
    def held(self) -> Path:
        """What tells that there is a state to keep; removed when it is durable, or given up."""
        return self.folder / files.held(self.attempt)

    def close(self) -> None:
        """Let go of its descriptors."""
        for descriptor in (self.arena, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self.arena = self.pidfd = -1


class Keepers:
    """Processes that write durable checkpoints from arenas, behind everybody's back; one a job at a time."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._running: dict[int, Keep] = {}
        self._next: dict[int, Keep] = {}

    def keep(self, keep: Keep) -> None:
        """Make this state durable, soon. It replaces one of the same job that has not been begun."""
        keep.due = time.monotonic() + KEEP_AFTER_S
        before = self._next.pop(keep.job_id, None)
        if before:
            self._drop(before)
        self._next[keep.job_id] = keep

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state is not durable yet; begins what is due, ends what hangs."""
        now = time.monotonic()
        for keep in (*self._running.values(), *self._next.values()):
            if now >= keep.look_at:
                keep.look_at = now + LOOK_EVERY_S
                with contextlib.suppress(OSError):  # gone: it is durable
                    os.utime(keep.held)
                self._see_moving(keep, now)
        for keep in list(self._running.values()):
            self._look(keep, now)
        for job_id, keep in list(self._next.items()):
            if job_id not in self._running and now >= keep.due:
                del self._next[job_id]
                self._start(keep, now)
        return self._running.keys() | self._next.keys()

    def wait(self, timeout_s: float) -> set[int]:
        """Until all is durable or the time is over; ids of the jobs whose state is not."""
        deadline = time.monotonic() + timeout_s
        for keep in self._next.values():
            keep.due = 0.0
        while (left := self.keeping()) and time.monotonic() < deadline:
            wait_ended([keep.pidfd for keep in self._running.values()], 0.05)
            time.sleep(0 if self._running else 0.005)
        return left

    def close(self) -> None:
        """Look after them no more: those that run go on by themselves, the others will not be."""
        for keep in self._next.values():
            self._drop(keep)
        for keep in self._running.values():
            keep.close()
        self._running.clear()
        self._next.clear()

    def _start(self, keep: Keep, now: float) -> None:
        keep.tries += 1
        try:
            keep.pid, keep.pidfd = self._begin(keep)
        except (OSError, LaunchError):
            self._failed(keep)
            return
        keep.due, keep.moved = now + KEPT_WITHIN_S, ()
        self._running[keep.job_id] = keep

    def _look(self, keep: Keep, now: float) -> None:
        if not wait_ended([keep.pidfd], 0):
            if now >= keep.due and not self._see_moving(keep, now):
                self._kill(keep)
            return
        self._kill(keep)  # what it may have left behind
        code = -1
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(keep.pid, 0)[1])
        del self._running[keep.job_id]
        if code == 0:
            self._drop(keep)
        else:
            self._failed(keep)

    def _see_moving(self, keep: Keep, now: float) -> bool:
        """Whether a running keeper has done anything since it was last looked at; then it has time again."""
        if self._running.get(keep.job_id) is not keep:
            return False
        moved = _moved(keep.pid)
        if moved == keep.moved:
            return False
        keep.due, keep.moved = now + KEPT_WITHIN_S, moved
        return True

    def _failed(self, keep: Keep) -> None:
        if keep.tries < TRIES and keep.job_id not in self._next:
            if keep.pidfd >= 0:
                os.close(keep.pidfd)
            keep.due, keep.pidfd = 0.0, -1
            self._next[keep.job_id] = keep
        else:
            self._drop(keep)

    def _drop(self, keep: Keep) -> None:
        """Be done with it; nobody is to wait for it any more."""
        keep.close()
        with contextlib.suppress(OSError):
            keep.held.unlink(missing_ok=True)

    @staticmethod
    def _kill(keep: Keep) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(keep.pid, signal.SIGKILL)


def _moved(pid: int) -> tuple[int, ...]:
    """What changes while a process does something: bytes it has written, processor time it has used."""
    try:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # While it waits for storage, as at the end of a long fsync, that is at work; a second try waits too.
        waiting = [time.monotonic_ns()] if state == "D" else []
        return (int(counts["wchar"]), int(counts["write_bytes"]), *map(int, fields[10:12]), *waiting)
    except (OSError, KeyError, ValueError):
        return ()
