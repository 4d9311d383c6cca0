"""The start of one process, leader of its own session, from nothing.

posix_spawn is used, not subprocess: it takes less than half the time, and it is the only way to give a child
an empty signal mask and default actions, whatever the agent blocks or ignores, without running Python between
fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat as modes
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import ClassVar

from hpcsched.errors import LaunchError
from hpcsched.launch.proc import stat
from hpcsched.open_files import as_it_was
from hpcsched.threads import started

_NICE_EVERY_S, _NICE_TRIES = 0.13, 100

_FOUND_FOR_S = 0.1
"""How long a program that was found in PATH is not looked for anew (chosen)."""

_DEFAULTED = frozenset(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """The process to start: `program` is the file of `argv`, `output` a descriptor for both its streams.

    `inherited`: further descriptors, by the variables in which the process finds its numbers of them.
    `cores`: the cores that it is pinned to, or None. `idle`: the caller is to call `set_idle_priority`.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    output: int
    inherited: Mapping[str, int] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    idle: bool = False


class _SessionNice:
    """The nice value of a session among all sessions; `pid` leads the session.

    Linux may share cores among sessions first (autogroups): then SCHED_IDLE counts only within a session. The
    kernel accepts about ten changes a second in all, so one that is refused is repeated in a thread.
    """

    _latest: ClassVar[dict[int, _SessionNice]] = {}

    def __init__(self, pid: int, nice: int) -> None:
        self._pid, self._nice, self._process = pid, nice, stat(pid)

    def wish(self) -> None:
        """Have it set, soon; nothing where the kernel has no autogroups, or the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(self._pid) == self._pid:
                self._latest[self._pid] = self
                if not self._try():
                    with contextlib.suppress(OSError):  # it stays as it is
                        started(self._repeat, "session nice")

    def _repeat(self) -> None:
        for _ in range(_NICE_TRIES):
            time.sleep(_NICE_EVERY_S)
            if self._try():
                return

    def _try(self) -> bool:
        """Whether there is nothing left to be done."""
        now = stat(self._pid)
        latest = self._latest.get(self._pid) is self
        if latest and now and self._process and now.start_ticks == self._process.start_ticks:
            try:
                Path(f"/proc/{self._pid}/autogroup").write_text(f"{self._nice}\n")
            except BlockingIOError:
                return False
            except OSError:
                pass
        if latest:
            self._latest.pop(self._pid, None)
        return True


def spawn(start: ProcessStart, shielded: frozenset[signal.Signals]) -> int:
    """Start a process in the current directory; returns its pid. Raises OSError, ValueError."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, start.output, 1),
        (os.POSIX_SPAWN_DUP2, start.output, 2),
    ]
    env = dict(start.env)
    # Onto none that is still to be copied. A copy onto itself would stay close-on-exec with an older libc.
    numbers = (number for number in count(3) if number not in start.inherited.values())
    for (name, descriptor), number in zip(start.inherited.items(), numbers, strict=False):
        actions.append((os.POSIX_SPAWN_DUP2, descriptor, number))
        env[name] = str(number)
    with _on_cores(start.cores) if start.cores else contextlib.nullcontext():
        pid = os.posix_spawn(
            start.program,
            start.argv,
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULTED - shielded,
        )
        as_it_was(pid)
        return pid


@contextlib.contextmanager
def _on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Have this thread, and the process that it starts meanwhile, on these cores alone. Raises OSError.

    The process is pinned before its program begins; and as we wait until that has begun, it is fastest on our
    own core: moving a process that runs, or starting it on another core, takes several times as long.
    """
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # we were given other cores meanwhile
            os.sched_setaffinity(0, here)


def find_program(name: str, cwd: Path, path: str) -> str:
    """The file to run: by the job's own PATH, relative names from its directory. Raises LaunchError."""
    folders = [""] if "/" in name else path.split(os.pathsep)
    found = ""
    for folder in folders if name else []:
        candidate = os.path.join(cwd, folder, name)  # noqa: PTH118 - on the path of every launch
        try:
            regular = modes.S_ISREG(os.stat(candidate).st_mode)  # noqa: PTH116
        except OSError:
            continue
        if regular and os.access(candidate, os.X_OK):
            return candidate
        found = found or (candidate if regular else "")
    if found:
        raise LaunchError(f"not executable: {found}", transient=False)
    where = "" if "/" in name else f" in PATH={path}"
    raise LaunchError(f"command not found: {name!r}{where}", transient=False)


class FoundPrograms:
    """What `find_program` has just found: of many launches in a row not each goes through all of PATH."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Path, str], str] = {}
        self._since = 0.0

    def find(self, name: str, cwd: Path, path: str) -> str:
        """As `find_program`."""
        if time.monotonic() - self._since > _FOUND_FOR_S:
            self._found.clear()
            self._since = time.monotonic()
        key = (name, cwd, path)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = find_program(name, cwd, path)
        return found


def set_idle_priority(pid: int) -> None:
    """Give a process, and what it starts, CPU time only when no other process wants its cores.

    By SCHED_IDLE; nice 19 where the system does not allow that.
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except ProcessLookupError:
        return  # already over
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)
    _SessionNice(pid, 19).wish()


def lift_idle_priority(group: int) -> None:
    """Let a process group with idle priority use all cores of this process, as a session like others.

    On busy cores it could hardly save, and it cannot be given more time there: leaving SCHED_IDLE takes a
    privilege.
    """
    _SessionNice(group, 0).wish()
    cores = os.sched_getaffinity(0)
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal() and (seen := stat(int(name))) and seen.group == group:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for thread in os.listdir(f"/proc/{name}/task"):  # noqa: PTH208
                    os.sched_setaffinity(int(thread), cores)


_standing = threading.Lock()


@contextlib.contextmanager
def in_directory(directory: Path) -> Iterator[None]:
    """Change to `directory` and back; posix_spawn has no argument for a working directory."""
    with _standing:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chdir(directory)
            try:
                yield
            finally:
                os.fchdir(here)
        finally:
            os.close(here)


@contextlib.contextmanager
def ignoring_signals(signals: frozenset[signal.Signals]) -> Iterator[None]:
    """Ignore these signals meanwhile.

    Processes spawned here ignore them too, and so do their children: shells reset a signal mask, but not
    this.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
