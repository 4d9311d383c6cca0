"""One process, leader of its own session: what it is given, and how it is started from nothing.

posix_spawn is used, not subprocess: it is less than half the price, and the only way to give a child an empty
signal mask and default actions whatever the agent blocks or ignores, without running Python between fork
and exec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hpcsched.launch.proc import stat

_DEFAULTED = frozenset(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a process is to be: `program` is the file of `argv`, `output` a descriptor for both its streams.

    `inherited`: further descriptors by the names of the variables in which the process finds its numbers of
    them. `cores`: what it is pinned to, or None. `idle`: see `only_when_idle`, which is for the caller to do.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    output: int
    inherited: Mapping[str, int] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    idle: bool = False


def spawn(start: Start, shielded: frozenset[signal.Signals]) -> int:
    """Start it in the directory that the caller stands in; returns its pid. Raises OSError, ValueError."""
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
    pid = os.posix_spawn(
        start.program,
        start.argv,
        env,
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=_DEFAULTED - shielded,
    )
    if start.cores:  # before the program has had time to start threads, which inherit it
        with contextlib.suppress(ProcessLookupError):  # already over
            os.sched_setaffinity(pid, start.cores)
    return pid


def only_when_idle(pid: int) -> None:
    """From now on the process, and what it starts, gets processor time only when nobody else wants its cores.

    Where the system does not allow that (SCHED_IDLE), as little as it can be given (nice 19).
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except ProcessLookupError:
        return  # already over
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def on_any_core(group: int) -> None:
    """Let a process group use all cores that we may use, where it had some of them.

    Whoever gets processor time only when others want none can hardly save on cores that are busy, and cannot
    be given more of it: leaving SCHED_IDLE takes a privilege.
    """
    cores = os.sched_getaffinity(0)
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal() and (seen := stat(int(name))) and seen.group == group:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for thread in os.listdir(f"/proc/{name}/task"):  # noqa: PTH208
                    os.sched_setaffinity(int(thread), cores)


_standing = threading.Lock()


@contextlib.contextmanager
def standing_in(directory: Path) -> Iterator[None]:
    """Be in `directory`, and back after; posix_spawn has no working directory of its own to give."""
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
def ignoring(signals: frozenset[signal.Signals]) -> Iterator[None]:
    """Hear none of these signals meanwhile.

    What is spawned here ignores them too, and so does what it starts: shells do not undo that, as they do a
    signal mask.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
