"""Starts the process in which the members of a pack train. No torch.

It is nobody's: in a session of its own it outlives the job's process that has started it, hears nothing of
what is sent to that one's process group, and has none of its descriptors. What it writes for itself goes into
a log file of the run's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hpcsched.contract import variables
from hpcsched.worker.background import settings
from hpcsched.worker.packing.environment import common
from hpcsched.worker.process.startup import run_to_the_end

PROGRAM = "hpcsched.worker.packing.host_start"

BACKLOG = 128
"""So many jobs may call before the host hears them."""

PROBED_WITHIN_S = 5
"""How long a forked process may take to compute something."""


def address_of(environ: Mapping[str, str]) -> str | None:
    """The abstract socket of the pack that the environment names; None: there is none."""
    name = environ.get(variables.PACK)
    if not name:
        return None
    # Hashed, for an address is at most 107 bytes long.
    known = hashlib.sha256(f"{environ.get(variables.RUN_ID, '')}/{name}".encode()).hexdigest()
    return f"\0hpcsched/pack/{known[:32]}"


def log_of(environ: Mapping[str, str]) -> Path:
    """The file that the host of this rank's device writes to."""
    run_dir = environ.get(variables.RUN_DIR) or Path(environ[variables.JOB_DIR]).parent.parent
    return Path(run_dir) / "packs" / f"{settings.device_of(environ) or '0'}.log"


def start_host(listener: socket.socket, environ: Mapping[str, str]) -> None:
    """Start a host at an address that was taken (`wire.take`). Raises OSError if that cannot be done."""
    path = log_of(environ)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _can_be_forked():
            _fork(listener, log, common(environ))
        else:
            _spawn(listener, log, common(environ))
    finally:
        os.close(log)


def _spawn(listener: socket.socket, log: int, environ: dict[str, str]) -> None:
    """From nothing."""
    os.set_inheritable(listener.fileno(), True)
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", PROGRAM, str(listener.fileno())],
        environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
            *((os.POSIX_SPAWN_CLOSE, number) for number in _others(listener) if os.get_inheritable(number)),
        ],
        setsid=True,
        setsigmask=(),
    )


def _fork(listener: socket.socket, log: int, environ: dict[str, str]) -> None:
    """From this process, which has imported torch already."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if os.fork():
        return
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for heard in (signal.SIGTSTP, signal.SIGTERM):
            signal.signal(heard, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nowhere, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for number in _others(listener):
            os.close(number)
        os.environ.clear()
        os.environ.update(environ)
        code = _serve(listener)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _serve(listener: socket.socket) -> int:
    listener.listen(BACKLOG)  # who calls from now on knows that somebody is there
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    from hpcsched.worker.packing.host.host import serve  # imports torch

    return serve(listener)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _others(listener: socket.socket) -> list[int]:
    """All open descriptors but the standard ones and the listener's."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names are all that is needed
        if number > 2 and number != listener.fileno():
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.fstat(number)
                found.append(number)
    return found


def _can_be_forked() -> bool:
    """Whether torch is here to be passed on, and nothing was computed yet: its threads do not survive a fork.

    Computing in a fork is the only way to know: it fails, or never ends, where it must not be done.
    """
    if "torch" not in sys.modules or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return False
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTSTP, signal.SIGTERM):  # which are for the job's own process to hear
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PROBED_WITHIN_S)
        import torch

        weights = torch.ones(64, 64, requires_grad=True)
        (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
        code = int(torch.cuda._is_in_bad_fork())
    finally:
        os._exit(code)


if __name__ == "__main__":
    run_to_the_end(lambda: _serve(socket.socket(fileno=int(sys.argv[1]))))
