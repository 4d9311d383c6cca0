"""Messages of a node agent after which the head gives GPUs on: held back until the memory is free."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import msgspec

from hpcsched.agent.gpu_memory import GpuMemory
from hpcsched.agent.node.workers import PartWatcher
from hpcsched.core.model import Device
from hpcsched.launch.remote import protocol

End = protocol.Exited | protocol.Living


class HeldBack:
    """The messages that wait, in order; `parts`: all parts of the host, those with an end that waits too."""

    def __init__(
        self, memory: GpuMemory, inventory: Sequence[Device], parts: Collection[PartWatcher]
    ) -> None:
        self._memory, self._inventory, self._parts = memory, inventory, parts
        self._waiting: list[tuple[PartWatcher, End, float]] = []
        """Each with the time at which it began to wait."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def over(self, part: PartWatcher) -> bool:
        """Whether the end of all ranks of a part waits to be told."""
        return any(one is part and isinstance(end, protocol.Exited) for one, end, _ in self._waiting)

    def add(self, part: PartWatcher, end: End) -> None:
        """Have a message wait, if only for the next `free`."""
        self._waiting.append((part, end, time.monotonic()))

    def free(self, within_s: float) -> Iterator[tuple[PartWatcher, End]]:
        """The messages whose GPUs can be given on, or have been waited for so long; they wait no more."""
        for part, end, since in list(self._waiting):
            if self._memory.free(id(end), self._devices(part, end), part.workers.left, within_s=within_s):
                self._waiting = [one for one in self._waiting if one[1] is not end]
                if isinstance(end, protocol.Exited):
                    end = msgspec.structs.replace(end, after_s=time.monotonic() - since)
                yield part, end

    def _devices(self, part: PartWatcher, end: End) -> list[Device]:
        """Those of all ranks, or of the ranks that have ended, that no other part uses."""
        given = part.order.devices
        if isinstance(end, protocol.Living):
            ended = part.workers.ended if part.order.per_rank else []
            given = tuple(given[rank] for rank in ended if rank < len(given))
        others = (other for other in self._parts if other is not part and not self.over(other))
        used = {gpu for other in others for gpu in other.order.devices}
        return [self._inventory[gpu] for gpu in given if gpu not in used]
