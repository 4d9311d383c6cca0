"""The conformance suite for devices, over the fake and all that this machine can have."""

from __future__ import annotations

import pytest

from hpcsched.devices import Devices, open_devices
from hpcsched.devices.node_file import Node
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import SimulatedNvml
from hpcsched.testing.conformance_devices import DevicesConformance
from hpcsched.testing.devices import FakeDevices


class TestFake(DevicesConformance):
    @pytest.fixture
    def devices(self) -> Devices:
        fake = FakeDevices(3, host="here")
        fake.lose(1)
        return fake


class TestReal(DevicesConformance):
    @pytest.fixture(params=["cpu:2", "cpu:64", "replay:4", "replay:2@50"])
    def devices(self, request: pytest.FixtureRequest) -> Devices:
        return open_devices(request.param, "here")


class TestSimulated(DevicesConformance):
    """The code for real GPUs, over a simulated NVML: GPUs, and instances of a GPU."""

    @pytest.fixture(params=[(0, 0), (2, 1), (3, 0)])
    def devices(self, request: pytest.FixtureRequest) -> Devices:
        node = Node(gpus=2, memory_mib=80_000, mig=request.param)
        return NvmlDevices("here", nvml=SimulatedNvml(node.simulated("here")))


@pytest.mark.gpu
class TestGpu(DevicesConformance):
    @pytest.fixture
    def devices(self) -> Devices:
        gpus = NvmlDevices("here")
        if len(gpus.inventory()) < 2:
            pytest.skip(f"fewer than two GPUs: {gpus.missing}")
        return gpus
