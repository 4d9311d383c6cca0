"""Pretended GPUs: `replay:N@SPEED`, and `replay:NODE.toml@SPEED` for a node that is described.

The GPUs are those of a simulated NVML, watched as real ones are. Workers are real processes, and follow their
profile SPEED times faster; they see no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import Device
from hpcsched.devices.base import Sample
from hpcsched.devices.node_file import Node
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import SimulatedNvml


class ReplayDevices:
    """The simulated GPUs of a node; `speed` profile seconds pass in a second of the clock.

    Raises ConfigError where the node shows none of its GPUs.
    """

    kind = "replay"
    visibility = CUDA

    def __init__(self, node: Node, host: str, speed: float = 1.0) -> None:
        self.speed = speed
        self._devices = NvmlDevices(
            host, nvml=SimulatedNvml(node.simulated(host), node.script), visible=node.visible
        )
        self._inventory = tuple(
            replace(device, kind=self.kind, stands_for=device.kind if node.named else "")
            for device in self._devices.inventory()
        )

    def inventory(self) -> tuple[Device, ...]:
        return self._inventory

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        return CUDA.hidden()

    def numbered(self, devices: Sequence[Device]) -> dict[str, str]:
        return {}

    def cpus(self, device: Device) -> frozenset[int] | None:
        return None

    def sample(self) -> list[Sample]:
        """How the simulated GPUs are."""
        return self._devices.sample()

    def free(self, device: Device) -> bool | None:
        return self._devices.free(device)

    def close(self) -> None:
        self._devices.close()
