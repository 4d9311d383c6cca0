"""The conformance suite for devices, over the fake and all that this machine can have."""

from __future__ import annotations

import pytest

from hpcsched.devices import Devices, open_devices
from hpcsched.devices.nvml import NvmlDevices
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


@pytest.mark.gpu
class TestGpu(DevicesConformance):
    @pytest.fixture
    def devices(self) -> Devices:
        gpus = NvmlDevices("here")
        if len(gpus.inventory()) < 2:
            pytest.skip(f"fewer than two GPUs: {gpus.missing}")
        return gpus
