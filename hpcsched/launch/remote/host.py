"""One host behind its node agent, as the head knows it: its messages, and its loss."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from hpcsched.core.model import Device, HostCores
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.starter import NodeAgentCommand
from hpcsched.launch.remote.workers import AttemptPart, RemoteWorkers

TERMINATED_S = 2.0
"""Time from SIGTERM to SIGKILL for a lost host's command (chosen)."""

FENCE_S = 4.0
"""Time after the certain death of a node agent in which all its workers end (chosen): its guard ends them, or
they notice that their parent is gone."""

CLOSED_S = 3.0
"""A connection that breaks within this time after a message was closed, or its process has died (chosen):
ZeroMQ takes longer to notice silence (`protocol.HEARTBEAT_TIMEOUT_MS`)."""

SampleT = TypeVar("SampleT", covariant=True)


class MakeSample(Protocol[SampleT]):
    """`devices.Sample`, which this package must not import."""

    def __call__(
        self,
        *,
        gpu: int,
        utilisation: float | None,
        memory_mib: float | None,
        energy_j: float | None,
        healthy: bool,
        why: str,
        age_s: float,
    ) -> SampleT: ...


class GrantedHost(Protocol):
    """A host of the allocation: `batch.Host`, which this package must not import."""

    @property
    def name(self) -> str:
        """Its name in the batch system."""

    @property
    def cpus(self) -> int | None:
        """The number of CPUs granted there; None if not known."""

    @property
    def gpus(self) -> tuple[str, ...] | None:
        """The GPUs granted there, as in CUDA_VISIBLE_DEVICES; None if not known."""


@dataclass(slots=True, eq=False)
class RemoteHost:
    """A host. It has not joined while `hello` is None; `why` is the reason of its loss, which is final.

    `first_device`: the global index of its first device. `age_s`: how many seconds old its readings were when
    they were sent. Times by the monotonic clock: `heard_at` of the last message of its node agent, `lost_at`
    of its loss, `join_by` the earliest at which it counts as absent, `broke_at` of the break of its
    connection (None while there is one; `closed`: not by silence).
    `end`: when its allocation ends, if that is not the run's; `guest`: it came from another allocation.
    `earlier`: it was in the run under the head before; its node agent comes by itself, or not at all.
    `leaving`: lost, but its node agent ends its jobs in good order and reports. `gone`: the node agent has
    sent its last message. `releasing`: the batch system is asked to take the host back, or has it; its end
    is no loss then. `fenced`: no process of the run can live there any more. `told_keeping`: the jobs whose
    state is being made durable there, by its last message about that.
    """

    name: str
    command: NodeAgentCommand | None = None
    hello: protocol.Hello | None = None
    peer: bytes = b""
    channel: MessageChannel = field(default_factory=MessageChannel)
    heard_at: float = 0.0
    first_device: int = 0
    readings: tuple[protocol.Reading, ...] = ()
    age_s: float = 0.0
    why: str = ""
    lost_at: float = 0.0
    join_by: float = 0.0
    leaving: bool = False
    gone: bool = False
    releasing: bool = False
    broke_at: float | None = None
    closed: bool = False
    fenced: bool = False
    warned: bool = False
    guest: bool = False
    earlier: bool = False
    end: float | None = None
    parts: dict[int, tuple[RemoteWorkers, AttemptPart]] = field(default_factory=dict)
    told_keeping: frozenset[int] = frozenset()

    def numbered(self, first: int) -> tuple[Device, ...]:
        """Its devices by the run's numbers, from `first` on. It has joined."""
        assert self.hello is not None
        self.first_device = first
        return tuple(replace(d, index=first + i, host=self.name) for i, d in enumerate(self.hello.devices))

    @property
    def cores(self) -> tuple[HostCores, ...]:
        """The cores there for jobs that need no GPU. It has joined."""
        assert self.hello is not None
        return (replace(self.hello.cores, host=self.name),) if self.hello.cores else ()

    @property
    def up(self) -> bool:
        """Whether it has joined and is not lost."""
        return self.hello is not None and not self.why

    @property
    def talks(self) -> bool:
        """Whether the messages of its node agent count, and are answered."""
        return self.hello is not None and not self.gone and (not self.why or self.leaving)

    @property
    def coming(self) -> bool:
        """Whether it has not joined, but still may."""
        return self.hello is None and not (self.command and self.command.why)

    @property
    def keeping(self) -> frozenset[int]:
        """The jobs whose state may still be made durable there, lost or not, until it is fenced."""
        return frozenset() if self.gone or self.fenced else self.told_keeping

    def reading(self, device: int) -> protocol.Reading:
        """The newest reading of one of its devices, by the host's own index."""
        if self.why:
            return protocol.Reading(healthy=False, why=f"host {self.name} was lost: {self.why}")
        readings = self.readings
        return readings[device] if device < len(readings) else protocol.Reading()

    def broke(self, now: float, *, trusted: bool) -> None:
        """Note that its connection has broken; not `trusted`: the head was stalled and cannot tell when."""
        self.broke_at, self.closed = now, trusted and now - self.heard_at < CLOSED_S

    def fence(self, now: float, *, may_kill: bool, silence_s: float) -> float:
        """Bring a lost host closer to being fenced; returns the seconds until it is.

        Its node agent has surely left when its command has ended by itself with exit code 0. It has surely
        died when the command has ended otherwise and the connection was closed, which the kernel does: then
        its guard ends the workers. Else the network may have broken and all lives on until the node agent has
        missed us for `silence_s`, which only begins without a connection. `may_kill` False: its command runs
        other hosts too, which are up.
        """
        command = self.command
        if command and command.ended_at is None and may_kill and now - self.lost_at > TERMINATED_S:
            command.signal(signal.SIGKILL)
        left_s = silence_s if self.broke_at is None else self.broke_at + silence_s - now
        if command and command.ended_at and command.succeeded:
            left_s = min(left_s, command.ended_at + FENCE_S - now)
        elif command and command.ended_at and command.by_itself and self.broke_at and self.closed:
            left_s = min(left_s, max(command.ended_at, self.broke_at) + FENCE_S - now)
        self.fenced = self.gone or left_s <= 0
        return left_s
