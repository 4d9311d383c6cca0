"""One host behind its node agent, as the head knows it: what it has said, and how it is lost for good."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.starter import Command
from hpcsched.launch.remote.workers import Part, RemoteWorkers

TERMINATED_S = 2.0
"""How long a lost host's command may take to end after SIGTERM, before SIGKILL."""

FENCE_S = 4.0
"""So long after a node agent has surely died nothing can live on its host: its workers have been ended by
its guard, or have noticed that their parent is gone and left."""

CLOSED_S = 3.0
"""Whose connection breaks so soon after its last word has closed it, or died: silence takes ZeroMQ longer to
notice (wire.HEARTBEAT_TIMEOUT_MS)."""

S = TypeVar("S", covariant=True)


class MakeSample(Protocol[S]):
    """`devices.Sample`, which this package must not import."""

    def __call__(
        self, *, gpu: int, utilisation: float | None, memory_mib: float | None, healthy: bool, why: str
    ) -> S: ...


class NamedHost(Protocol):
    """What is to be known of a host: `batch.Host`, which this package must not import."""

    @property
    def name(self) -> str: ...

    @property
    def cpus(self) -> int | None: ...

    @property
    def gpus(self) -> tuple[str, ...] | None: ...


@dataclass(slots=True, eq=False)
class RemoteHost:
    """A host. It has not come while `hello` is None; `why` is set once it is lost, for good.

    `first` is the global index of its first device; `heard` when its node agent was last heard of, and
    `lost_at` when it was lost, by the monotonic clock; `patience` until when it may come at the least.
    `leaving`: lost, but its node agent sees its jobs off in good order, and tells. `gone`: that has said its
    last word. `broke_at`: when its connection broke, None while there is one; `closed`: not by silence.
    `fenced`: nothing can live there any more. `told_keeping`: the jobs whose state is being made durable
    there, by its last word on that.
    """

    name: str
    command: Command | None = None
    hello: protocol.Hello | None = None
    peer: bytes = b""
    link: protocol.Link = field(default_factory=protocol.Link)
    heard: float = 0.0
    first: int = 0
    readings: tuple[protocol.Reading, ...] = ()
    why: str = ""
    lost_at: float = 0.0
    patience: float = 0.0
    leaving: bool = False
    gone: bool = False
    broke_at: float | None = None
    closed: bool = False
    fenced: bool = False
    warned: bool = False
    parts: dict[int, tuple[RemoteWorkers, Part]] = field(default_factory=dict)
    told_keeping: frozenset[int] = frozenset()

    @property
    def up(self) -> bool:
        """Whether it has come and is not lost."""
        return self.hello is not None and not self.why

    @property
    def talks(self) -> bool:
        """Whether what its node agent says counts, and it is to be answered."""
        return self.hello is not None and not self.gone and (not self.why or self.leaving)

    @property
    def coming(self) -> bool:
        """Whether it has not come, but still may."""
        return self.hello is None and not (self.command and self.command.why)

    @property
    def keeping(self) -> frozenset[int]:
        """The jobs whose state may still be being made durable there, lost or not, until it is fenced."""
        return frozenset() if self.gone or self.fenced else self.told_keeping

    def reading(self, device: int) -> protocol.Reading:
        """What is known of one of its devices, by its own index."""
        if self.why:
            return protocol.Reading(healthy=False, why=f"host {self.name} was lost: {self.why}")
        readings = self.readings
        return readings[device] if device < len(readings) else protocol.Reading()

    def broke(self, now: float, *, trusted: bool) -> None:
        """Its connection has broken; not `trusted`: we looked too seldom to know when."""
        self.broke_at, self.closed = now, trusted and now - self.heard < CLOSED_S

    def fence(self, now: float, *, may_kill: bool, silence_s: float) -> float:
        """Bring its end about, after it was lost, and see whether that is reached; else in how many seconds.

        Its node agent has surely left when its command has ended without our doing, and well. It has
        surely died when the command has ended otherwise and the connection was closed, which the
        kernel does: then its guard does the rest. Else a network may have broken and
        everything there lives on, until the node agent has missed us for `silence_s`; and that only begins
        when there is no connection. `may_kill` False: its command runs hosts that are up too.
        """
        command = self.command
        if command and command.ended_at is None and may_kill and now - self.lost_at > TERMINATED_S:
            command.signal(signal.SIGKILL)
        left_s = silence_s if self.broke_at is None else self.broke_at + silence_s - now
        if command and command.ended_at and command.well:
            left_s = min(left_s, command.ended_at + FENCE_S - now)
        elif command and command.ended_at and command.by_itself and self.broke_at and self.closed:
            left_s = min(left_s, max(command.ended_at, self.broke_at) + FENCE_S - now)
        self.fenced = self.gone or left_s <= 0
        return left_s
