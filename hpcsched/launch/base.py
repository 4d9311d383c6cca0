"""The seam to processes: how an attempt's workers are started, signalled, and seen to end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Order
from hpcsched.core.model import Device, PythonEnvironment

LOST = 255
"""Stands for the exit code of a process that somebody else has reaped: not known, so never success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start for one attempt.

    `argv` is what the processes run; or they run `module`, one of the worker's, by the Python of
    `environment` (None: see `launch.interpreters`), whose programs come first for any other program too.

    `env` is laid over the launcher's own environment: the job's variables and those of the contract
    that all ranks share. The launcher adds what differs by host or rank: what shows the devices to the
    program (below `env`), whom to notify, the rank's numbers, and where the ranks meet.
    `folder` is the job's folder in the run directory.
    `output` is opened for appending, created with mode 0600, missing folders made. `per_rank` True:
    one process a device, each pinned to its device's cores; False: `processes` on each host, which see all of
    the attempt's devices there; `once`: on the first host only. `parallel`: the processes are ranks of one
    program, and are told which; False for a single process, and for launchers that start the ranks. `devices`
    lie host by host.

    `first_rank`, `world_size` (None: these are all) and `joins` are for ranks that join a running attempt:
    their numbers are those after the resize, and `joins` ("host:port") is where its rank 0 awaits them.
    `arena`: the ranks get the job's arena, shared memory that outlives them. `idle`: they get processor time
    only when nobody else wants their cores. `share`: how much of its cores' time a program that is not ours
    may use, in cores; None: it is not held to any.
    """

    job_id: int
    attempt: int
    argv: tuple[str, ...] = ()
    module: str = ""
    environment: PythonEnvironment | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path
    folder: Path
    output: Path
    devices: tuple[Device, ...]
    per_rank: bool = True
    processes: int = 1
    once: bool = False
    parallel: bool = True
    first_rank: int = 0
    world_size: int | None = None
    joins: str | None = None
    arena: bool = False
    idle: bool = False
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one host's ranks stand among all of an attempt.

    `port` None: the launcher picks a free one, and the others are told. `world_size` None: these are all.
    `node_rank`: the host's number among the `nodes` that the attempt is on.
    """

    first_rank: int = 0
    world_size: int | None = None
    node_rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int | None = None


class Workers(Protocol):
    """The processes of one attempt, from launch until `close`; rank 0 first."""

    @property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """(pid, start time in clock ticks since boot) of each rank that is a process of this host."""

    @property
    def pidfds(self) -> tuple[int, ...]:
        """Descriptors, one a rank or one a host, each readable for good once what it stands for has ended."""

    @property
    def living(self) -> int:
        """How many of the processes live, as far as is known."""

    @property
    def where(self) -> str:
        """Where the ranks meet, "host:port" as other hosts can reach it; "" while that is not known."""

    @property
    def ready(self) -> bytes | None:
        """The newest expected ready file as the host of rank 0 saw it; None: look at the file itself."""

    @property
    def refused(self) -> bytes | None:
        """Why rank 0 will not do the resize that is expected; None: look at the file itself."""

    @property
    def held(self) -> bytes | None:
        """The file that tells of a state left in the arena, as its host saw it; None: look at the file."""

    @property
    def record(self) -> bytes | None:
        """STATE.json as the host of rank 0 last saw it; None where the file itself is to be read."""

    @property
    def progress_fd(self) -> int | None:
        """Non-blocking read end of what rank 0 writes to its progress descriptor; None if there is none."""

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to each rank's process group; to nothing that is not surely ours."""

    def tell(self, order: Order) -> None:
        """Give rank 0 an order, on its control pipe; lost if rank 0 is gone or does not read.

        Never blocks, never raises.
        """

    def expect(self, attempt: int) -> None:
        """From now on the files of `attempt` count too: these processes are told to become it."""

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live. Never blocks."""

    def reap(self) -> int | None:
        """None while a rank lives; else the attempt's exit code (see `attempt_code`). Never blocks.

        When the last rank has ended, what the ranks left behind in their process groups is killed:
        the devices go to the next job. Raises LaunchError once nothing lives if, as it turned out only
        after `launch`, not all ranks could be started.
        """

    def close(self) -> None:
        """Close the descriptors; ends no process; may be called twice."""


class Launcher(Protocol):
    """Starts workers on one kind of place."""

    def launch(self, plan: LaunchPlan) -> Workers:
        """Start all ranks, or none.

        Raises LaunchError: transient when a resource was short for a moment, not transient when the
        command, the directory or the output cannot be used as they are.
        """

    def ready_for(self, plan: LaunchPlan) -> bool:
        """Whether `launch` would not wait: what has to be found out before is being found out from now on.

        Never blocks, never raises.
        """

    def forget(self, job_id: int) -> None:
        """The job is over: let go of what is kept for its next attempt."""

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state of a quick suspend is not durable yet.

        To be called again and again: keepers are begun, and looked after, here. Hardly ever blocks.
        """


def attempt_code(codes: Sequence[int]) -> int:
    """One exit code for all ranks, from theirs in order of time: the first failure, else 75, else 0."""
    failures = (code for code in codes if code not in (0, SUSPENDED))
    return next(failures, SUSPENDED if SUSPENDED in codes else 0)
