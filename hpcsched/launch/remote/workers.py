"""The workers of an attempt on other hosts, as their node agents report them.

A part is one host's ranks of an attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from signal import Signals

import msgspec

from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Order, encode
from hpcsched.core.mechanisms.cpu.cores import ON_CORES
from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LOST, LaunchPlan, RankPlacement, attempt_code
from hpcsched.launch.remote import protocol
from hpcsched.printing import printable

Send = Callable[[str, protocol.HeadMessage], None]
"""Sends a message that must arrive to a host's node agent."""


def part_launches(
    plan: LaunchPlan,
    shares: Sequence[tuple[str, Sequence[int]]],
    *,
    first_host: str,
    address: str,
    first_part: int,
) -> list[protocol.Launch]:
    """The Launch message of each host of an attempt.

    `shares`: each host with its own indices of the devices, the lowest rank's first. `first_host`: rank 0's,
    which may be none of them when the ranks join others. `address`: that of the rendezvous, unless the plan
    has one.
    """
    ranks = [len(devices) if plan.per_rank else plan.processes for _, devices in shares]
    seats = {
        host: tuple(d.handle for d in plan.devices if d.host == host and d.kind == ON_CORES)
        for host, _ in shares
    }
    port = None
    if plan.joins is not None:
        address, _, known = plan.joins.rpartition(":")
        port = int(known)
    orders = []
    for i, (host, devices) in enumerate(shares):
        # Appending to one file from several hosts garbles it on NFS.
        output = plan.output if host == first_host else plan.output.with_name(f"{plan.output.name}.{host}")
        orders.append(
            protocol.Launch(
                part=first_part + i,
                job_id=plan.job_id,
                attempt=plan.attempt,
                argv=plan.argv,
                module=plan.module,
                environment=plan.environment,
                env=dict(plan.env),
                cwd=str(plan.cwd),
                folder=str(plan.folder),
                output=str(output),
                devices=() if seats[host] else tuple(devices),
                cores=seats[host],
                per_rank=plan.per_rank,
                processes=plan.processes,
                parallel=plan.parallel,
                node_rank=i,
                nodes=len({device.host for device in plan.devices}),
                first_rank=plan.first_rank + sum(ranks[:i]),
                world_size=plan.world_size or sum(ranks),
                address=address,
                port=port,
                joins=plan.joins,
                arena=plan.arena,
                idle=plan.idle,
                share=plan.share,
                container=plan.container,
                asks=plan.asks or 0,
                needs=plan.needs,
            )
        )
    return orders


def plan_from_message(
    order: protocol.Launch, inventory: Sequence[Device], host: str
) -> tuple[LaunchPlan, RankPlacement]:
    """The plan and placement of a Launch message, for the host's own launcher; `inventory`: its devices.

    Raises LaunchError for devices that are not there.
    """
    if not all(0 <= index < len(inventory) for index in order.devices):
        raise LaunchError(f"the head names devices that {host} does not have", transient=False)
    plan = LaunchPlan(
        job_id=order.job_id,
        attempt=order.attempt,
        argv=order.argv,
        module=order.module,
        environment=order.environment,
        env=order.env,
        cwd=Path(order.cwd),
        folder=Path(order.folder),
        output=Path(order.output),
        devices=(
            *(inventory[index] for index in order.devices),
            *(Device(index=-1, host=host, kind=ON_CORES, handle=cores) for cores in order.cores),
        ),
        per_rank=order.per_rank,
        processes=order.processes,
        parallel=order.parallel,
        first_rank=order.first_rank,
        world_size=order.world_size,
        joins=order.joins,
        arena=order.arena,
        idle=order.idle,
        share=order.share,
        container=order.container,
        asks=signal.Signals(order.asks) if order.asks else None,
        needs=order.needs,
    )
    placement = RankPlacement(
        first_rank=order.first_rank,
        world_size=order.world_size,
        node_rank=order.node_rank,
        nodes=order.nodes,
        address=order.address,
        port=order.port,
    )
    return plan, placement


class AttemptPart:
    """One host's ranks of an attempt: not yet asked for, asked for, or over."""

    def __init__(self, host: str, order: protocol.Launch) -> None:
        self.host, self.order = host, order
        self.asked = self.started = self.over = False
        self.catches = False
        """Whether its program catches the signal that asks it to save, as its node agent has reported."""
        self.code: int | None = None
        """The exit code of its ranks; None while they live, and if none was started."""
        self.living = 0
        self.ended_at = 0.0
        self.fd = -1


def _eventfds(number: int) -> tuple[int, ...]:
    """So many, or none. Raises OSError."""
    opened = list[int]()
    try:
        for _ in range(number):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError:
        _close(opened)
        raise
    return tuple(opened)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RemoteWorkers:
    """The workers of one attempt in parts, the lowest rank's first.

    The other parts are asked for when the first has reported the rendezvous; at once where it is known, as
    for ranks that join running ones. `pidfds` holds one descriptor for each part, and before them one that is
    readable once a rank has failed, or all are over: a part may go on waiting for a rank that has failed.

    Args:
        address: that at which other hosts reach the first part's host.

    Raises OSError where there are no descriptors for them.
    """

    def __init__(
        self, parts: Sequence[AttemptPart], *, address: str, send: Send, pump: Callable[[], None]
    ) -> None:
        self.parts = tuple(parts)
        self.processes: tuple[tuple[int, int], ...] = ()
        self.where = self.parts[0].order.joins or ""
        self.ready: bytes | None = None
        self.refused: bytes | None = None
        self.held: bytes | None = None
        self.record: bytes | None = None
        self.saved_by: tuple[int, str] | None = None
        self.oom, self.over_limit = "", False
        self._expected = self.parts[0].order.attempt
        self._address, self._send, self._pump = address, send, pump
        self.pidfds: tuple[int, ...] = _eventfds(1 + len(self.parts))
        self._alarm, *fds = self.pidfds
        self.progress_fd: int | None
        self._write_end: int | None
        try:
            self.progress_fd, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            _close(self.pidfds)
            raise
        for part, fd in zip(self.parts, fds, strict=True):
            part.fd = fd
        self._told: list[Callable[[int], protocol.HeadMessage]] = []
        """Makes the messages that every part gets, also those that are asked for later."""
        self._failing: list[AttemptPart] = []
        """The parts with a failed rank, in order of time."""
        self._error: LaunchError | None = None

    # -- what the agent asks ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for the first part, and for all parts with a known rendezvous."""
        for part in self.parts:
            if part is self.parts[0] or part.order.port is not None:
                self._ask(part)

    def go_on(self, running: Sequence[protocol.Running]) -> None:
        """Take the parts, in their order, as they run already: another head has had them started."""
        for part in self.parts:
            part.asked = True  # first of all: that rank 0 has been launched has the others launched
        for part, now in zip(self.parts, running, strict=True):
            part.catches = now.catches
            self.launched(part, now.port)
            part.living = now.living
            if now.failing:
                self.failing(part)
        first = running[0]
        self._expected, self.ready = first.attempt, first.ready
        self.record, self.held = first.record, first.held

    @property
    def told_after_s(self) -> float:
        """How many seconds ago the last rank had ended."""
        return time.monotonic() - max(part.ended_at for part in self.parts)

    @property
    def living(self) -> int:
        """The number of ranks that live, as far as was reported."""
        return sum(part.living for part in self.parts)

    def tell(self, order: Order) -> None:
        """Give rank 0 an order; it is lost if rank 0 is gone."""
        part = self.parts[0]
        if part.order.first_rank == 0 and not part.over:
            self._send(part.host, protocol.Order(part.order.part, encode(order)))

    def expect(self, attempt: int) -> None:
        """Have `ready` and `refused` be about `attempt` from now on; None until rank 0 has answered."""
        self._expected, self.ready, self.refused = attempt, None, None
        part = self.parts[0]
        if part.order.first_rank == 0 and not part.over:
            self._send(part.host, protocol.Expect(part.order.part, attempt))

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to all ranks; parts that have not been asked for get it after their start."""
        self._tell_all(lambda part: protocol.Signal(part, sig))

    def catches(self, sig: Signals) -> bool:
        """Whether a part's program catches the signal that it is asked to save by, as was reported."""
        return any(part.catches for part in self.parts)

    def ask_to_save(self, sig: Signals) -> None:
        """Have the programs that catch `sig` get it, and all SIGTERM on a host where none does."""
        self._tell_all(lambda part: protocol.AskToSave(part, sig))

    def save_by(self, command: Sequence[str], within_s: float) -> None:
        """Have a command run beside rank 0 that saves it from outside."""
        part = self.parts[0]
        if part.asked and not part.over:
            self._send(part.host, protocol.SaveBy(part.order.part, tuple(command), within_s))

    def _tell_all(self, message: Callable[[int], protocol.HeadMessage]) -> None:
        self._told.append(message)
        for part in self.parts:
            if part.asked and not part.over:
                self._send(part.host, message(part.order.part))

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live."""
        return bool(self._failing) and not self.over

    def reap(self) -> int | None:
        """The attempt's exit code; None while a rank lives.

        Raises LaunchError, once nothing lives, if not all ranks could be started.
        """
        if not self.over:
            self._pump()  # a caller that only waits for this must not wait in vain
        if not self.over:
            return None
        if self._error is not None:
            raise self._error
        failures = [part.code for part in self._failing]
        return attempt_code([code for code in (*failures, *(p.code for p in self.parts)) if code is not None])

    def left(self) -> int:
        """0: each node agent waits for them on its host."""
        return 0

    def close(self) -> None:
        """Close the descriptors; ends no process."""
        self._end_progress()
        for fd in self.pidfds:
            os.close(fd)
        if self.progress_fd is not None:
            os.close(self.progress_fd)
        self.pidfds, self.progress_fd = (), None

    @property
    def over(self) -> bool:
        """Whether no rank lives, and none will."""
        return all(part.over for part in self.parts)

    # -- what the node agents tell ---------------------------------------------------------------------

    def launched(self, part: AttemptPart, port: int) -> None:
        """Note that a part's ranks have been started, with the rendezvous at `port`."""
        part.started, part.living = True, part.order.ranks
        if part is self.parts[0] and self._error is None:
            self.where = self.where or f"{self._address}:{port}"
            for other in self.parts[1:]:
                if not (other.asked or other.over):
                    other.order = msgspec.structs.replace(other.order, port=port)
                    self._ask(other)

    def answered(self, answer: protocol.Ready | protocol.Refused) -> None:
        """Note the answer of rank 0: it is ready as the expected attempt, or refuses to become it."""
        if answer.attempt != self._expected:
            return
        if isinstance(answer, protocol.Ready):
            self.ready = answer.data
        else:
            self.refused = answer.data

    def progressed(self, data: bytes) -> None:
        """Pass on what rank 0 wrote; a reader that is too slow misses some."""
        if self._write_end is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._write_end, data)

    def launch_failed(
        self, part: AttemptPart, error: str, *, transient: bool, host_fault: bool = False
    ) -> None:
        """Note that a part could not be started: so the attempt cannot be."""
        where = f"host {part.host}: " if len(self.parts) > 1 else ""
        self._cannot_start(part, LaunchError(f"{where}{error}", transient=transient, host_fault=host_fault))

    def _cannot_start(self, part: AttemptPart, error: LaunchError) -> None:
        if self._error is None:
            self._error = error
            self.signal(signal.SIGKILL)
        self.ended(part, None)

    def failing(self, part: AttemptPart) -> None:
        """Note that a rank of this part has failed while others live."""
        if part not in self._failing:
            self._failing.append(part)
            self._sound()

    def ended(self, part: AttemptPart, code: int | None, after_s: float = 0.0) -> None:
        """Note that all ranks of this part have ended, so long ago; `code` None: none was started."""
        if part.over:
            return
        part.ended_at = time.monotonic() - after_s
        part.over, part.code, part.living = True, code, 0
        if part is self.parts[0]:
            self._end_progress()
            for other in self.parts[1:]:
                if not other.asked:  # they never will be
                    self.ended(other, None)
        if self.pidfds:
            os.eventfd_write(part.fd, 1)
        if code is not None and code not in (0, SUSPENDED):
            self.failing(part)
        if self.over:
            self._sound()

    def ran_out(self, part: AttemptPart, words: str, *, over_limit: bool) -> None:
        """Note that main memory ran out on the host of a part ("": it did not); the first word counts."""
        if words and not self.oom:
            self.oom = f"on host {part.host} {printable(words[:300])}"
            self.over_limit = over_limit

    def lost(self, part: AttemptPart, why: str) -> None:
        """Note that the part's host was lost and is fenced."""
        if part.started:
            self.ended(part, LOST)
        else:
            error = f"host {part.host} was lost: {why}"
            self._cannot_start(part, LaunchError(error, transient=True, host_fault=True))

    # --------------------------------------------------------------------------------------------------

    def _ask(self, part: AttemptPart) -> None:
        part.asked = True
        self._send(part.host, part.order)
        for message in self._told:
            self._send(part.host, message(part.order.part))

    def _sound(self) -> None:
        if self.pidfds:
            os.eventfd_write(self._alarm, 1)

    def _end_progress(self) -> None:
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None
