"""NVML, played by a module object: names, MIG, health."""

# ruff: noqa: N802, N815 - names are pynvml's

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.devices import open_devices
from hpcsched.devices.nvml import MIB, NvmlDevices
from hpcsched.errors import ConfigError

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TIMEOUT, NO_FUNCTION, LOST = 3, 4, 6, 10, 13, 15


class NvmlError(Exception):
    def __init__(self, value: int, text: str = "") -> None:
        super().__init__(text or f"error {value}")
        self.value = value


@dataclass
class Gpu:
    uuid: str
    name: str | bytes = "NVIDIA H200"
    parent: Gpu | None = None
    instances: list[Gpu] = field(default_factory=list)
    busy: int | None = 40
    ecc: int | None = 0
    lost: bool = False
    near: list[int] | None = None
    used_mib: float | None = 512
    compute_mode: int = 0


@dataclass
class FakeNvml:
    """The part of pynvml that is used, over a list of GPUs."""

    gpus: list[Gpu]
    events: list[tuple[Gpu, int]] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)
    shut: int = 0
    broken_driver: bool = False
    hanging: threading.Event | None = None
    NVMLError: type[NvmlError] = NvmlError
    NVML_ERROR_NOT_SUPPORTED: int = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION: int = NO_PERMISSION
    NVML_ERROR_FUNCTION_NOT_FOUND: int = NO_FUNCTION
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int = 1
    NVML_VOLATILE_ECC: int = 0
    nvmlEventTypeXidCriticalError: int = 8

    def __post_init__(self) -> None:
        for gpu in self.gpus:
            for instance in gpu.instances:
                instance.parent = gpu

    def _alive(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise NvmlError(LOST, "GPU is lost")
        return gpu

    def nvmlInit(self) -> None:
        if self.broken_driver:
            raise NvmlError(9, "Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> Gpu:
        return self._alive(self.gpus[i])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            for one in (gpu, *gpu.instances):
                if one.uuid == uuid:
                    return one
        raise NvmlError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return self._alive(gpu).uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str | bytes:
        return gpu.name

    def nvmlDeviceGetComputeMode(self, gpu: Gpu) -> int:
        if gpu.parent:
            raise NvmlError(NOT_SUPPORTED)
        return gpu.compute_mode

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        self._alive(gpu)
        if self.hanging:
            assert self.hanging.wait(60)
        if gpu.used_mib is None:
            raise NvmlError(NOT_SUPPORTED)
        return SimpleNamespace(total=int(140_000 * MIB), used=int(gpu.used_mib * MIB))

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        if self._alive(gpu).busy is None:
            raise NvmlError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu.busy)

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        if self._alive(gpu).ecc is None:
            raise NvmlError(NOT_SUPPORTED)
        assert gpu.ecc is not None
        return gpu.ecc

    def nvmlDeviceGetCpuAffinity(self, gpu: Gpu, words: int) -> list[int]:
        if gpu.parent or gpu.near is None:
            raise NvmlError(NOT_SUPPORTED)
        return [sum(1 << core % 64 for core in gpu.near if core // 64 == word) for word in range(words)]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if gpu.parent:
            raise NvmlError(NOT_SUPPORTED)
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, i: int) -> Gpu:
        if i >= len(gpu.instances):
            raise NvmlError(NOT_FOUND)
        return gpu.instances[i]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: Gpu) -> Gpu:
        assert gpu.parent
        return gpu.parent

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        assert events == "events"

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, types: int, events: str) -> None:
        self.registered.append(gpu.uuid)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.events:
            raise NvmlError(TIMEOUT)
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(device=gpu, eventData=xid)


Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(gpus: list[Gpu], visible: str | None = None, **kwargs: Any) -> FakeNvml:
        fake = FakeNvml(gpus, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


def four() -> list[Gpu]:
    return [Gpu(f"GPU-{c * 4}-{i}") for i, c in enumerate("abcd")]


def handles(devices: NvmlDevices) -> list[str]:
    return [d.handle for d in devices.inventory()]


def test_all_where_nothing_is_said(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    install(four())
    devices = open_devices("auto", "h")
    assert [d.handle for d in devices.inventory()] == ["0", "1", "2", "3"]
    assert devices.kind == "NVIDIA H200"
    assert devices.inventory()[0].memory_mib == 140_000
    assert devices.environment(devices.inventory()[1:3]) == {
        "CUDA_VISIBLE_DEVICES": "1,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "3",
        "HPCSCHED_CUDA_DEVICES": "1,2",
    }
    assert devices.cpus(devices.inventory()[0]) is None


def test_ranks_are_near_their_gpu_and_share_the_cores_there(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(2, 40), *range(64, 100)})
    gpus = [*four()[:3], *mig()[:1]]
    for gpu, near in zip(gpus, (range(32), range(32), range(32, 200), range(32)), strict=True):
        gpu.near = list(near)
    install(gpus)
    devices = NvmlDevices("h")
    first, _, third, instance, _ = devices.inventory()
    assert devices.cpus(first) == devices.cpus(instance) == frozenset(range(2, 32))
    assert devices.cpus(third) == frozenset({*range(32, 40), *range(64, 100)})
    threads = [devices.environment([d])["OMP_NUM_THREADS"] for d in (first, third, instance)]
    assert threads == ["7", "44", "7"]  # two GPUs and two MIG instances, and one GPU by itself
    assert devices.environment([first, third])["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in devices.environment([first]), "it is the user's to say"


def test_who_has_fewer_cores_than_gpus_still_has_a_thread(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {70})
    gpus = four()
    gpus[1].near = list(range(64))  # none that we may use
    install(gpus)
    devices = NvmlDevices("h")
    assert devices.cpus(devices.inventory()[1]) is None
    assert devices.environment(devices.inventory())["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("GPU-cccc-2,GPU-aaaa-0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        ("GPU-c", ["GPU-c"]),  # CUDA takes an unambiguous beginning
        ("GPU-", []),
        ("0,7,1", ["0"]),  # like CUDA: the list ends where a name is not there
        ("1,1", ["1"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_keep_their_form(install: Install, visible: str, expected: list[str]) -> None:
    install(four(), visible)
    assert handles(NvmlDevices("h")) == expected


def test_hidden_gpus_are_not_there(install: Install) -> None:
    fake = install(four(), "")
    with pytest.raises(ConfigError, match=r"here are 0 GPUs.*CUDA_VISIBLE_DEVICES is ''"):
        open_devices("cuda", "h")
    assert fake.shut == 1
    assert open_devices("auto", "h").kind == "cpu"


def test_a_part_of_the_gpus(install: Install) -> None:
    install(four(), "3,2,1")
    assert [d.handle for d in open_devices("cuda:2", "h").inventory()] == ["3", "2"]
    with pytest.raises(ConfigError, match="'cuda:4', but here are 3 GPUs"):
        open_devices("cuda:4", "h")


def test_no_driver(install: Install) -> None:
    install(four(), broken_driver=True)
    with pytest.raises(ConfigError, match="Driver Not Loaded"):
        open_devices("cuda:1", "h")


def mig() -> list[Gpu]:
    parts = [Gpu(f"MIG-{i}", "H200 MIG 1g.18gb", busy=None, ecc=None) for i in range(2)]
    return [Gpu("GPU-x", instances=parts), Gpu("GPU-y")]


def test_mig_instances_by_uuid(install: Install) -> None:
    fake = install(mig())
    devices = NvmlDevices("h")
    assert handles(devices) == ["MIG-0", "MIG-1", "1"]
    assert devices.kind == "H200 MIG 1g.18gb"
    assert devices.sample()[0].utilisation is None
    assert devices.sample()[0].healthy
    assert devices.sample()[0].memory_mib == 512
    assert fake.registered == ["GPU-x", "GPU-y"]


def test_mig_names_are_found_and_kept(install: Install) -> None:
    install(mig(), "MIG-1,MIG-9")
    assert handles(NvmlDevices("h")) == ["MIG-1"]


def test_a_lost_device_is_unhealthy_and_alone_in_it(install: Install) -> None:
    fake = install(four())
    devices = NvmlDevices("h")
    assert all(s.healthy and s.utilisation == 0.4 for s in devices.sample())
    fake.gpus[2].lost = True
    samples = devices.sample()
    assert [s.healthy for s in samples] == [True, True, False, True]
    assert "GPU is lost" in samples[2].why
    fake.gpus[2].lost = False
    assert not devices.sample()[2].healthy  # once lost, always lost


def test_a_device_lost_before_us_is_left_out(install: Install) -> None:
    gpus = four()
    gpus[1].lost = True
    install(gpus)
    assert handles(NvmlDevices("h")) == ["0", "2", "3"]


def test_only_new_memory_errors_count(install: Install) -> None:
    fake = install(four())
    fake.gpus[0].ecc = 2
    fake.gpus[3].ecc = None
    devices = NvmlDevices("h")
    assert all(s.healthy for s in devices.sample())
    fake.gpus[0].ecc = 3
    assert devices.sample()[0].why == "1 uncorrectable ECC errors"


def test_xid_errors(install: Install) -> None:
    fake = install([*mig(), *four()])
    devices = NvmlDevices("h")
    fake.events += [(fake.gpus[1], 13), (fake.gpus[0], 79)]  # a program's fault, a fatal one
    samples = devices.sample()
    assert [s.healthy for s in samples] == [False, False] + [True] * 5
    assert samples[1].why == "Xid 79"


def test_close_twice_shuts_down_once(install: Install) -> None:
    fake = install(four())
    devices = NvmlDevices("h")
    devices.close()
    devices.close()
    assert fake.shut == 1


def test_the_site_order_is_kept(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(four())
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    devices = NvmlDevices("h")
    assert devices.environment(devices.inventory())["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_gpu_is_free_when_its_memory_is_what_it_was(install: Install) -> None:
    fake = install(four())
    fake.gpus[1].used_mib = 900  # somebody else's, or of a process that is just leaving
    devices = NvmlDevices("h")
    gpu, other = devices.inventory()[:2]
    assert devices.free(gpu) is True
    fake.gpus[0].used_mib = 512 + 400  # a context is still there
    assert devices.free(gpu) is False and devices.free(other) is True
    fake.gpus[0].used_mib = 512 + 30  # what the driver keeps
    assert devices.free(gpu) is True
    fake.gpus[1].used_mib = 512
    assert devices.free(other) is True
    fake.gpus[1].used_mib = 900
    assert devices.free(other) is False, "by now it is known what it needs without that process"


def test_a_gpu_that_does_not_say_its_memory(install: Install) -> None:
    fake = install(four())
    devices = NvmlDevices("h")
    fake.gpus[0].used_mib = None
    fake.gpus[1].lost = True
    assert devices.free(devices.inventory()[0]) is None
    assert devices.free(devices.inventory()[1]) is None


def test_a_hanging_driver_does_not_hold_up_who_asks_for_free_memory(install: Install) -> None:
    fake = install(four())
    devices = NvmlDevices("h")
    go_on = threading.Event()
    fake.hanging = go_on
    assert devices.free(devices.inventory()[0]) is False
    assert devices.free(devices.inventory()[1]) is False, "one call hangs, not one a question"
    fake.hanging = None
    go_on.set()
    assert devices.free(devices.inventory()[0]) is True


def test_the_compute_mode_is_known(install: Install) -> None:
    install(gpus=[Gpu(f"GPU-{mode}", compute_mode=mode) for mode in range(4)])
    modes = [device.compute_mode.value for device in NvmlDevices("here").inventory()]
    assert modes == ["DEFAULT", "DEFAULT", "PROHIBITED", "EXCLUSIVE_PROCESS"], "1 is of before CUDA 8"
