"""Workers that are clients of NVIDIA's multi-process service: how they are killed, and the daemons' end.

A client that is killed while it has work on the GPU may take the other clients along, says NVIDIA's guide:
the daemon has to end that work first. It is asked from a thread, as it may take its time to answer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Mapping

from hpcsched.contract import variables
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.orphans import end_processes, find_orphans
from hpcsched.launch.workers import LocalWorkers
from hpcsched.mps_control import ANSWERS_WITHIN_S, PIPE_DIRECTORY, QUITS_WITHIN_S, daemons, home
from hpcsched.threads import started

TERMINATES_WITHIN_S = 2.0
"""How long the daemons of a run may take to end a client's work, before the client is killed all the same
(chosen): a launch that failed half-way waits 5 s for its end."""

_CLIENT = "hpcsched.worker.background.mps_client"


class MpsClients:
    """The clients that one launcher starts, and the daemons of its runs on this host."""

    def __init__(self) -> None:
        self._runs: set[str] = set()

    def watch(self, workers: LocalWorkers, environ: Mapping[str, str]) -> None:
        """Have `workers`, which get `environ`, killed as clients if that is what they are to be."""
        run_id = environ.get(variables.RUN_ID)
        if not run_id:
            return
        self._runs.add(run_id)  # an earlier agent that was killed has left a daemon, maybe
        if _is_client(environ):
            workers.kill = _Killing(run_id)

    def close(self) -> None:
        """End the daemons, but those that still have clients; removes their folders."""
        while self._runs:
            _end_daemons(self._runs.pop())


def as_client(
    plan: LaunchPlan, program: str, argv: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """What is started in place of `program`, with `argv`, where it is to share a GPU as a client; a worker of
    ours makes itself one. Raises LaunchError."""
    ours = plan.module or variables.STANDIN in environ
    if ours or environ.get(variables.LANE) != "shared" or not _is_client(environ):
        return program, argv
    if plan.container:
        where = f"{variables.LANE_MODE}=mps in a container"
        raise LaunchError(f"environment: {where}; accepted: a program outside of one", transient=False)
    # Not from the working directory (-P): a file of the user's may have the name of a library.
    return sys.executable, (sys.executable, "-P", "-m", _CLIENT, program, *argv)


def _is_client(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(variables.LANE)) and environ.get(variables.LANE_MODE) == "mps"


class _Killing:
    """Kills the workers of one attempt, once their work on the GPU has been ended, or that takes too long."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._thread: threading.Thread | None = None

    def __call__(self, pids: Collection[int], pidfds: Collection[int]) -> None:
        """`pids`: the leaders; what they leave in their groups is killed when they have ended."""
        if self._thread is not None and self._thread.is_alive():
            return
        held: list[int] = []
        try:
            for descriptor in pidfds:  # by pid it might be another's by then
                held.append(os.dup(descriptor))
            about = (frozenset(pids), held)
            self._thread = started(self._kill, "kills MPS clients", *about, daemon=False)
        except OSError:  # no descriptor or no thread is to be had
            _send_kill(pidfds)
            for descriptor in held:
                os.close(descriptor)

    def _kill(self, leaders: frozenset[int], pidfds: list[int]) -> None:
        try:
            found = daemons(self._run_id)
            for daemon in found:
                within_s = TERMINATES_WITHIN_S / len(found)
                clients = daemon.clients(os.environ, within_s=within_s / 2)
                ours = {pid for pid in clients if _group(pid) in leaders}
                daemon.terminate({pid: clients[pid] for pid in ours}, os.environ, within_s=within_s / 2)
        finally:
            _send_kill(pidfds)
            for descriptor in pidfds:
                os.close(descriptor)


def _send_kill(pidfds: Iterable[int]) -> None:
    for descriptor in pidfds:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _end_daemons(run_id: str) -> None:
    found = daemons(run_id)
    for daemon in found:
        if daemon.clients(os.environ, within_s=ANSWERS_WITHIN_S):
            return  # workers that outlive us: whoever ends them ends the daemon
        daemon.quit(os.environ)
        pipe = daemon.variables()[PIPE_DIRECTORY]
        if left := find_orphans(pipe, [], by=PIPE_DIRECTORY):
            end_processes(left, QUITS_WITHIN_S)
    if found:
        shutil.rmtree(home(run_id), ignore_errors=True)
