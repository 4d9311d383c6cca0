"""An attempt's workers on other hosts, as their node agents tell of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

import msgspec

from hpcsched.errors import LaunchError
from hpcsched.launch import wire
from hpcsched.launch.base import LOST, SUSPENDED, LaunchPlan, attempt_code

Send = Callable[[str, wire.HeadMessage], None]
"""Gives a message that must arrive to a host's node agent."""


def part_orders(
    plan: LaunchPlan, shares: Sequence[tuple[str, Sequence[int]]], *, address: str, first_part: int
) -> list[wire.Launch]:
    """What each host is to start of an attempt.

    `shares`: each host with its own indices of the devices, rank 0's first. `address`: where the ranks meet.
    """
    ranks = [len(devices) if plan.per_rank else 1 for _, devices in shares]
    orders = []
    for i, (host, devices) in enumerate(shares):
        # Appending to one file from several hosts garbles it on NFS.
        output = plan.output if i == 0 else plan.output.with_name(f"{plan.output.name}.{host}")
        orders.append(
            wire.Launch(
                part=first_part + i,
                job_id=plan.job_id,
                attempt=plan.attempt,
                argv=plan.argv,
                env=dict(plan.env),
                cwd=str(plan.cwd),
                folder=str(plan.folder),
                output=str(output),
                devices=tuple(devices),
                per_rank=plan.per_rank,
                first_rank=sum(ranks[:i]),
                world_size=sum(ranks),
                address=address,
                port=None,
            )
        )
    return orders


class Part:
    """One host's ranks: not yet asked for, asked for, or over."""

    def __init__(self, host: str, order: wire.Launch) -> None:
        self.host, self.order = host, order
        self.asked = self.started = self.over = False
        self.code: int | None = None
        """Its ranks' exit code; None while they live, and if none has ever lived."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class RemoteWorkers:
    """The parts of one attempt, rank 0's first.

    The others are asked for when the first has said where the ranks meet. `pidfds` holds one
    descriptor for each part, and before them one that is readable once a rank has failed, or all are over:
    a part may go on waiting for a rank that has failed.
    """

    def __init__(self, parts: Sequence[Part], *, send: Send, pump: Callable[[], None]) -> None:
        self.parts = tuple(parts)
        self.processes: tuple[tuple[int, int], ...] = ()
        self.ready = False
        self.record: bytes | None = None
        self._send, self._pump = send, pump
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.pidfds: tuple[int, ...] = (self._alarm, *(part.fd for part in self.parts))
        self.progress_fd: int | None
        self._write_end: int | None
        self.progress_fd, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals: list[int] = []
        self._failing: list[Part] = []
        """The parts with a failed rank, in order of time."""
        self._error: LaunchError | None = None

    # -- what the agent asks ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for the first part."""
        self._ask(self.parts[0])

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to all ranks; those whose part has not been asked for get it after their start."""
        self._signals.append(sig)
        for part in self.parts:
            if part.asked and not part.over:
                self._send(part.host, wire.Signal(part.order.part, sig))

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live."""
        return bool(self._failing) and not self.over

    def reap(self) -> int | None:
        """None while a rank lives; else the attempt's exit code.

        Raises LaunchError once nothing lives if not all ranks could be started.
        """
        if not self.over:
            self._pump()  # whoever only waits for this must not wait in vain
        if not self.over:
            return None
        if self._error is not None:
            raise self._error
        failures = [part.code for part in self._failing]
        return attempt_code([code for code in (*failures, *(p.code for p in self.parts)) if code is not None])

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
        """Whether nothing lives, and nothing will."""
        return all(part.over for part in self.parts)

    # -- what the node agents tell ---------------------------------------------------------------------

    def launched(self, part: Part, port: int) -> None:
        """A part's ranks have been started, and meet at `port`."""
        part.started = True
        if part is self.parts[0] and self._error is None:
            for other in self.parts[1:]:
                if not (other.asked or other.over):
                    other.order = msgspec.structs.replace(other.order, port=port)
                    self._ask(other)

    def progressed(self, data: bytes) -> None:
        """Rank 0 wrote this; a reader that is too slow misses some."""
        if self._write_end is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._write_end, data)

    def launch_failed(self, part: Part, error: str, *, transient: bool, host_fault: bool = False) -> None:
        """A part could not be started: the attempt cannot be."""
        where = f"host {part.host}: " if len(self.parts) > 1 else ""
        self._cannot_start(part, LaunchError(f"{where}{error}", transient=transient, host_fault=host_fault))

    def _cannot_start(self, part: Part, error: LaunchError) -> None:
        if self._error is None:
            self._error = error
            self.signal(signal.SIGKILL)
        self.ended(part, None)

    def failing(self, part: Part) -> None:
        """A rank of this part has failed while others live."""
        if part not in self._failing:
            self._failing.append(part)
            self._sound()

    def ended(self, part: Part, code: int | None) -> None:
        """All ranks of this part have ended; `code` None: none has ever been started."""
        if part.over:
            return
        part.over, part.code = True, code
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

    def lost(self, part: Part, why: str) -> None:
        """The part's host was lost and nothing can live there any more."""
        if part.started:
            self.ended(part, LOST)
        else:
            error = f"host {part.host} was lost: {why}"
            self._cannot_start(part, LaunchError(error, transient=True, host_fault=True))

    # --------------------------------------------------------------------------------------------------

    def _ask(self, part: Part) -> None:
        part.asked = True
        self._send(part.host, part.order)
        for number in self._signals:
            self._send(part.host, wire.Signal(part.order.part, number))

    def _sound(self) -> None:
        if self.pidfds:
            os.eventfd_write(self._alarm, 1)

    def _end_progress(self) -> None:
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None
