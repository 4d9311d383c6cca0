"""The seam to processes: the start, the signals and the end of an attempt's workers."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Protocol

from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Order
from hpcsched.core.model import Container, Device, PythonEnvironment
from hpcsched.core.needs import Needs

LOST = 255
"""The exit code of a process whose own is not known, as somebody else has reaped it: never success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The processes to start for one attempt.

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
    may use, in cores; None: it is not held to any. `needs`: its cores for each GPU, its memory on each host,
    its modules. `container`: what they run in, where `argv` and the Python of `module` are looked up (None:
    the host). `new`: the job's folder has just been made, so there is nothing of an earlier attempt in it.
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
    container: Container | None = None
    asks: signal.Signals | None = None
    needs: Needs | None = None
    new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The numbers of one host's ranks among all ranks of an attempt.

    `port` None: the launcher picks a free one, and the other hosts are told. `world_size` None: these are all
    ranks. `node_rank`: the host's number among the `nodes` of the attempt.
    """

    first_rank: int = 0
    world_size: int | None = None
    node_rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int | None = None


class Rendezvous(Protocol):
    """Where the ranks of an attempt meet. The port may be looked for when it is asked for."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...


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
        """The number of processes that live, as far as is known."""

    @property
    def where(self) -> str:
        """The rendezvous of the ranks, "host:port" as other hosts reach it; "" while it is not known."""

    @property
    def ready(self) -> bytes | None:
        """The expected attempt's ready file, as the host of rank 0 saw it; None: read the file itself."""

    @property
    def refused(self) -> bytes | None:
        """The expected attempt's refused file, as the host of rank 0 saw it; None: read the file itself."""

    @property
    def held(self) -> bytes | None:
        """The held file (a state is left in shared memory), as its host saw it; None: read the file."""

    @property
    def record(self) -> bytes | None:
        """STATE.json, as the host of rank 0 last saw it; None: read the file itself."""

    @property
    def told_after_s(self) -> float:
        """How many seconds after the last rank's end `reap` has told of it, as another host waited for the
        memory of its GPUs."""

    @property
    def oom(self) -> str:
        """How main memory ran out under them, in words; "" if that is not why they have ended."""

    @property
    def over_limit(self) -> bool:
        """Whether that was more than the job may have."""

    @property
    def progress_fd(self) -> int | None:
        """Non-blocking read end of rank 0's progress pipe; None if there is none."""

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to each rank's process group; never to a process that may not be ours."""

    def catches(self, sig: Signals) -> bool:
        """Whether a program among them has a handler for `sig`, the plan's `asks`, as far as is known.

        Any thread may ask.
        """

    def ask_to_save(self, sig: Signals) -> None:
        """Send `sig` to those programs that catch it, not to shells and launchers around them; on a host
        where none does, SIGTERM to all."""

    def save_by(self, command: Sequence[str], within_s: float) -> None:
        """Run a command beside rank 0 that saves it from outside; `{pid}` in it becomes the pid of rank 0.

        It is run once, and ended after `within_s` seconds. Never blocks, never raises.
        """

    @property
    def saved_by(self) -> tuple[int, str] | None:
        """Exit code and last words of the command of `save_by`; None: there is none, or it is not over."""

    def tell(self, order: Order) -> None:
        """Give rank 0 an order, on its control pipe; lost if rank 0 is gone or does not read.

        Never blocks, never raises.
        """

    def expect(self, attempt: int) -> None:
        """Read the files of `attempt` from now on too: these processes are told to become it."""

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live. Never blocks."""

    def reap(self) -> int | None:
        """The attempt's exit code (see `attempt_code`); None while a rank lives. Never blocks.

        When the last rank has ended, all other processes of their groups are killed: the devices go to the
        next job. Raises LaunchError, once nothing lives, if not all ranks could be started and that was known
        only after `launch`.
        """

    def left(self) -> int:
        """How many processes have not ended yet that were killed as their rank had. Any thread may ask."""

    def close(self) -> None:
        """Close the descriptors; ends no process; may be called twice."""


class Launcher(Protocol):
    """Starts workers on one kind of hosts."""

    def launch(self, plan: LaunchPlan) -> Workers:
        """Start all ranks, or none.

        Raises LaunchError: transient when a resource was short for a moment, not transient when the
        command, the directory or the output cannot be used as they are.
        """

    def ready_for(self, plan: LaunchPlan) -> bool:
        """Whether `launch` would not wait. If it would, begin to find out what it waits for.

        Never blocks, never raises.
        """

    def give_up(self, job_id: int, attempt: int) -> None:
        """An attempt that `ready_for` was asked about is not to be started: end what was begun for it."""

    def forget(self, job_id: int) -> None:
        """Free what is kept in memory for the next attempt of a job: there will be none."""

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state of a quick suspend is not durable yet.

        To be called repeatedly: it starts keepers and looks after them. Hardly ever blocks.
        """


def attempt_code(codes: Sequence[int]) -> int:
    """The exit code of an attempt from its ranks', in order of time: the first failure, else 75, else 0."""
    failures = (code for code in codes if code not in (0, SUSPENDED))
    return next(failures, SUSPENDED if SUSPENDED in codes else 0)
