"""Devices that are only said to be there, and break when told to."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import Device
from hpcsched.devices.base import Sample


class FakeDevices:
    """`count` devices; `sample` gives the scripted rounds one by one, then healthy ones and nothing measured.

    `lose` breaks a device, whatever the script says, and `mend` mends it. `memory_free` is what `free`
    answers by index, True for those that it does not name. `closed` counts the calls of `close`.
    """

    visibility = CUDA

    def __init__(
        self,
        count: int,
        *,
        host: str = "here",
        kind: str = "fake",
        speed: float = 1.0,
        samples: Sequence[Sequence[Sample]] = (),
        cores: Sequence[frozenset[int]] = (),
    ) -> None:
        self.kind = kind
        self.speed = speed
        self.closed = 0
        self._inventory = tuple(Device(index=i, host=host, kind=kind, handle=str(i)) for i in range(count))
        self._rounds = [list(round_) for round_ in samples]
        self._cores = tuple(cores)
        self._lost: dict[int, str] = {}
        self.memory_free: dict[int, bool | None] = {}

    def lose(self, gpu: int, why: str = "fell off the bus") -> None:
        """From now on this device is unhealthy."""
        self._lost[gpu] = why

    def mend(self, gpu: int) -> None:
        """From now on this device is healthy again."""
        self._lost.pop(gpu, None)

    def inventory(self) -> tuple[Device, ...]:
        return self._inventory

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        return CUDA.hidden()

    def numbered(self, devices: Sequence[Device]) -> dict[str, str]:
        return {}

    def cpus(self, device: Device) -> frozenset[int] | None:
        return self._cores[device.index] if self._cores else None

    def sample(self) -> list[Sample]:
        scripted = {s.gpu: s for s in (self._rounds.pop(0) if self._rounds else ())}
        return [
            Sample(gpu=d.index, healthy=False, why=self._lost[d.index])
            if d.index in self._lost
            else scripted.get(d.index, Sample(gpu=d.index))
            for d in self._inventory
        ]

    def free(self, device: Device) -> bool | None:
        return self.memory_free.get(device.index, True)

    def close(self) -> None:
        self.closed += 1
