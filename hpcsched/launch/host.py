"""One host behind its node agent, as the head knows it: what it has said, and how it is lost for good."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hpcsched.launch import wire
from hpcsched.launch.parts import Part, RemoteWorkers
from hpcsched.launch.starter import Command

TERMINATED_S = 2.0
"""How long a lost host's command may take to end after SIGTERM, before SIGKILL."""

FENCE_S = 4.0
"""So long after the command's end nothing can live on its host: its workers have been ended by the node
agent's guard, or have noticed that their parent is gone and left."""

FENCED_AT_LATEST_S = 10.0
"""Then we go on even if the command does not end, or must not be ended since it runs other hosts too."""


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


@dataclass(slots=True, eq=False)
class RemoteHost:
    """A host. It has not come while `hello` is None; `why` is set once it is lost, for good.

    `first` is the global index of its first device; `heard` when its node agent was last heard of, and
    `lost_at` when it was lost, by the monotonic clock; `fenced`: nothing can live there any more.
    """

    name: str
    command: Command | None = None
    hello: wire.Hello | None = None
    peer: bytes = b""
    link: wire.Link = field(default_factory=wire.Link)
    heard: float = 0.0
    first: int = 0
    readings: tuple[wire.Reading, ...] = ()
    why: str = ""
    lost_at: float = 0.0
    fenced: bool = False
    parts: dict[int, tuple[RemoteWorkers, Part]] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """Whether it has come and is not lost."""
        return self.hello is not None and not self.why

    @property
    def coming(self) -> bool:
        """Whether it has not come, but still may."""
        return self.hello is None and not (self.command and self.command.why)

    def reading(self, device: int) -> wire.Reading:
        """What is known of one of its devices, by its own index."""
        if self.why:
            return wire.Reading(healthy=False, why=f"host {self.name} was lost: {self.why}")
        readings = self.readings
        return readings[device] if device < len(readings) else wire.Reading()

    def fence(self, now: float, *, may_kill: bool) -> None:
        """Bring its end about, after it was lost, and see whether that is reached.

        `may_kill` False: its command runs hosts that are up too.
        """
        command = self.command
        ended = command.ended_at if command else self.lost_at
        if command and ended is None and may_kill and now - self.lost_at > TERMINATED_S:
            command.signal(signal.SIGKILL)
        surely = ended is not None and now - ended >= FENCE_S
        self.fenced = surely or now - self.lost_at >= FENCED_AT_LATEST_S
