"""Pretended GPUs: `replay:N@SPEED`. Workers are real, and follow their profile SPEED times faster."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.core.model import Device
from hpcsched.devices.base import Sample


class ReplayDevices:
    """`count` simulated GPUs; `speed` profile seconds pass in a second of the clock."""

    kind = "replay"

    def __init__(self, count: int, host: str, speed: float = 1.0) -> None:
        self.speed = speed
        self._inventory = tuple(
            Device(index=i, host=host, kind=self.kind, handle=str(i)) for i in range(count)
        )

    def inventory(self) -> tuple[Device, ...]:
        return self._inventory

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

    def cpus(self, device: Device) -> frozenset[int] | None:
        return None

    def sample(self) -> list[Sample]:
        """Healthy samples without measurements."""
        return [Sample(gpu=device.index) for device in self._inventory]

    def free(self, device: Device) -> bool | None:
        """True: nothing is held."""
        return True

    def close(self) -> None:
        """Does nothing: nothing is open."""
