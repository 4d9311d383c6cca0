"""A small process beside a node agent that ends the node agent's workers if it is killed.

Programs that are not ours do not notice that their parent has gone, and would go on using devices and
writing checkpoints while their job starts again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

from hpcsched.contract.variables import NODE
from hpcsched.launch.orphans import Process, end_processes, find_orphans
from hpcsched.launch.proc import environment

GRACE_S = 2.0
"""Time that workers get to save after SIGTERM (chosen): the head waits little longer (`host.FENCE_S`)."""

_BYE = b"."


def mark(life: str, name: str) -> str:
    """The value of `NODE` for the workers of this host's node agent in this life of the head."""
    return f"{life}:{name}"


def marked(processes: list[Process], marks: Iterable[str] = (), *, life: str | None = None) -> set[Process]:
    """The processes with one of these marks, or of any host in this life."""
    wanted, begins = {f"{NODE}={one}".encode() for one in marks}, f"{NODE}={life}:".encode()

    def is_one(pid: int) -> bool:
        try:
            variables = environment(pid)
        except OSError:
            return False
        of_life = life is not None and any(one.startswith(begins) for one in variables)
        return of_life or not wanted.isdisjoint(variables)

    return {process for process in processes if is_one(process[0])}


class Guard:
    """A fork that watches this process; to be made before the process has threads."""

    def __init__(self, run_id: str, name_mark: str) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._writer)
                _stand_guard(reader, run_id, name_mark)
            finally:
                os._exit(0)
        os.close(reader)

    def dismiss(self) -> None:
        """End the guard: the node agent leaves by itself, and no worker is left."""
        with contextlib.suppress(OSError):
            os.write(self._writer, _BYE)
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_guard(reader: int, run_id: str, name_mark: str) -> None:
    # Out of reach of what is sent to the node agent's group, or to all of a job, or comes from its terminal.
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # srun and ssh wait for the last one who holds theirs
        os.dup2(nowhere, descriptor)
    if os.read(reader, 1) == _BYE:
        return
    end_processes(marked(find_orphans(run_id, []), [name_mark]), GRACE_S)
