"""No batch system: this machine, for as long as we like."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, BatchSystem, EndReason
from hpcsched.errors import BatchError


class Local(BatchSystem):
    """This host without a deadline, or the hosts named.

    Args:
        hosts: names; none means this host alone.
        launcher: how node agents are started there: "ssh", or "local", which starts them all on this
            machine under those names (to try out what several hosts would do).
    """

    kind = "none"
    launchers = ("ssh", "local")
    says_none = True

    def __init__(self, hosts: Sequence[str] = (), *, launcher: str = "ssh") -> None:
        self._hosts = tuple(hosts) or (socket.gethostname(),)
        self._launcher = launcher

    def allocation(self) -> Allocation:
        hosts = tuple(AllocatedHost(name=name) for name in self._hosts)
        return Allocation(kind=self.kind, id=None, hosts=hosts, here=self._hosts[0])

    def end_time(self) -> float | None:
        return None

    def reason(self) -> EndReason:
        return EndReason.NONE

    def job_state(self, job_id: str) -> BatchJobState:
        return BatchJobState.UNKNOWN

    def requeue(self) -> int:
        raise BatchError("there is no batch system here that could put the job back into its queue")

    def submit_next(self, script: Path | None) -> str:
        raise BatchError("there is no batch system here to submit a follow-up job to")

    def release(self, names: Sequence[str]) -> None:
        raise BatchError("there is no batch system here to give hosts back to")

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        if self._launcher == "local":
            return [(*argv, "--name", host.name) for host in hosts]
        return [ssh(host.name, (*argv, "--name", host.name)) for host in hosts]

    def version(self) -> str:
        return "none"


def ssh(host: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Runs `argv` on a host through ssh, never asking for a password; -tt: it ends with the connection."""
    import shlex

    return ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, shlex.join(argv))
