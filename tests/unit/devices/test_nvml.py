"""NVIDIA GPUs over a simulated NVML: names, MIG, memory, health."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hpcsched.devices import open_devices
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import (
    INVALID_ARGUMENT,
    LOST,
    RESET_REQUIRED,
    TIMEOUT,
    UNKNOWN,
    Happening,
    SimulatedGpu,
    SimulatedNvml,
)
from hpcsched.errors import ConfigError

Install = Callable[..., SimulatedNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(gpus: list[SimulatedGpu], visible: str | None = None, **kwargs: Any) -> SimulatedNvml:
        fake = SimulatedNvml(gpus)
        vars(fake).update(kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


def four() -> list[SimulatedGpu]:
    return [SimulatedGpu(f"GPU-{c * 4}-{i}") for i, c in enumerate("abcd")]


def handles(devices: NvmlDevices) -> list[str]:
    return [d.handle for d in devices.inventory()]


def test_all_where_nothing_is_said(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    install(four())
    devices = open_devices("auto", "h")
    assert [d.handle for d in devices.inventory()] == ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2", "GPU-dddd-3"]
    assert devices.kind == "NVIDIA H100 80GB HBM3"
    assert devices.inventory()[0].memory_mib == 81559
    assert devices.environment(devices.inventory()[1:3]) == {
        "CUDA_VISIBLE_DEVICES": "GPU-bbbb-1,GPU-cccc-2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "3",
        "HPCSCHED_CUDA_DEVICES": "GPU-bbbb-1,GPU-cccc-2",
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
        ("2,0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        (" 1 , 3 ", ["GPU-bbbb-1", "GPU-dddd-3"]),
        ("GPU-cccc-2,GPU-aaaa-0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        ("GPU-c", ["GPU-cccc-2"]),  # CUDA takes an unambiguous beginning
        ("GPU-", []),
        ("0,7,1", ["GPU-aaaa-0"]),  # like CUDA: the list ends where a name is not there
        ("1,1", ["GPU-bbbb-1"]),
        ("1,GPU-b,0", ["GPU-bbbb-1", "GPU-aaaa-0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        pytest.param("1," + "9" * 5000, ["GPU-bbbb-1"], id="a number that nobody can read"),
    ],
)
def test_visible_devices_are_handed_on_by_uuid(install: Install, visible: str, expected: list[str]) -> None:
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
    assert [d.handle for d in open_devices("cuda:2", "h").inventory()] == ["GPU-dddd-3", "GPU-cccc-2"]
    with pytest.raises(ConfigError, match="'cuda:4', but here are 3 GPUs"):
        open_devices("cuda:4", "h")


def test_no_driver(install: Install) -> None:
    install(four(), broken_driver=True)
    with pytest.raises(ConfigError, match="Driver Not Loaded"):
        open_devices("cuda:1", "h")


def mig() -> list[SimulatedGpu]:
    parts = [SimulatedGpu(f"MIG-{i}", "H100 MIG 1g.10gb", busy=None, ecc=None) for i in range(2)]
    return [SimulatedGpu("GPU-x", instances=parts), SimulatedGpu("GPU-y")]


def test_mig_instances_by_uuid(install: Install) -> None:
    fake = install(mig())
    devices = NvmlDevices("h")
    assert handles(devices) == ["MIG-0", "MIG-1", "GPU-y"]
    assert devices.kind == "H100 MIG 1g.10gb"
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
    fake.gpus[2].error = LOST
    samples = devices.sample()
    assert [s.healthy for s in samples] == [True, True, False, True]
    assert "GPU is lost" in samples[2].why


def test_a_device_lost_before_us_is_left_out(install: Install) -> None:
    gpus = four()
    gpus[1].error = LOST
    install(gpus)
    assert handles(NvmlDevices("h")) == ["GPU-aaaa-0", "GPU-cccc-2", "GPU-dddd-3"]


def test_close_twice_shuts_down_once(install: Install) -> None:
    fake = install(four())
    devices = NvmlDevices("h")
    devices.close()
    devices.close()
    assert fake.shut == 1


def test_numbers_for_programs_that_take_nothing_else(install: Install) -> None:
    install([*mig(), *four()], "5,GPU-y,3,MIG-0")
    devices = NvmlDevices("h")
    assert handles(devices) == ["GPU-dddd-3", "GPU-y", "GPU-bbbb-1", "MIG-0"]
    names = {"CUDA_VISIBLE_DEVICES": "5,1,3", "HPCSCHED_CUDA_DEVICES": "5,1,3"}
    assert devices.numbered(devices.inventory()[:3]) == {**names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert devices.numbered(devices.inventory()) == {}, "a MIG instance has no number"


def test_the_order_is_that_of_numbers_whatever_the_site_says(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = four()
    gpus[1].uuid = ""
    install(gpus)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    devices = NvmlDevices("h")
    assert handles(devices) == ["GPU-aaaa-0", "1", "GPU-cccc-2", "GPU-dddd-3"]
    assert devices.environment(devices.inventory())["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_gpus_of_others_are_not_counted(install: Install) -> None:
    gpus = four()
    gpus[0].permitted = gpus[2].permitted = False
    install(gpus, "1,0")
    assert handles(NvmlDevices("h")) == ["GPU-dddd-3", "GPU-bbbb-1"]


def test_a_number_of_a_gpu_in_mig_mode_is_its_first_instance(install: Install) -> None:
    install(mig(), "1,0")
    assert handles(NvmlDevices("h")) == ["GPU-y", "MIG-0"]


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
    fake.gpus[1].error = LOST
    assert devices.free(devices.inventory()[0]) is None
    assert devices.free(devices.inventory()[1]) is None


@pytest.mark.long
def test_a_hanging_driver_does_not_hold_up_who_asks_for_free_memory() -> None:
    now, goes_on = [0.0], threading.Event()
    hang = Happening(at_s=1.0, gpu=0, what="hang", for_s=3600.0)
    nvml = SimulatedNvml(four(), [hang], clock=lambda: now[0], sleep=lambda _: assert_(goes_on.wait(60)))
    devices = NvmlDevices("h", nvml=nvml)
    now[0] = 1.0
    assert devices.free(devices.inventory()[0]) is False
    assert devices.free(devices.inventory()[1]) is False, "one call hangs, not one a question"
    goes_on.set()
    assert devices.free(devices.inventory()[0]) is True


def assert_(true: bool) -> None:
    assert true


# -- health ----------------------------------------------------------------------------------------------


class Bench:
    """Devices over a simulated NVML and a clock that is set."""

    def __init__(self, gpus: list[SimulatedGpu]) -> None:
        self.now = 0.0
        self.nvml = SimulatedNvml(gpus, clock=lambda: self.now)
        self.devices = NvmlDevices("h", nvml=self.nvml, clock=lambda: self.now)

    def sick(self) -> dict[int, str]:
        """Why which devices must not be used."""
        return {sample.gpu: sample.why for sample in self.devices.sample() if not sample.healthy}

    def later(self, seconds: float) -> dict[int, str]:
        self.now += seconds
        return self.sick()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("number", [8, 13, 31, 43, 45, 63, 68, 69, 92, 94, 109, 121, 137, 154])
def test_an_xid_of_a_program_or_for_information_condemns_nothing(number: int, known: bool) -> None:
    bench = Bench(with_driver(four(), known))
    bench.nvml.events.append((bench.nvml.gpus[1], number))
    assert bench.sick() == {}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("number", [46, 62, 64, 79, 95, 119, 120, 140])
def test_a_fatal_xid_condemns_its_gpu_alone(number: int, known: bool) -> None:
    bench = Bench(with_driver(four(), known))
    bench.nvml.events.append((bench.nvml.gpus[1], number))
    assert list(bench.sick()) == [1]
    assert bench.sick()[1].startswith(f"Xid {number} (")


@pytest.mark.parametrize("number", [48, 74, 149, 4711])
def test_of_other_xids_the_driver_says_what_they_mean(number: int) -> None:
    old, new = Bench(with_driver(four(), False)), Bench(with_driver(four(), True))
    for bench in (old, new):
        bench.nvml.events.append((bench.nvml.gpus[1], number))
    assert old.sick() == {1: f"Xid {number}"}, "before R570 nobody can say more"
    assert new.sick() == {}
    new.nvml.gpus[1].recovery = 1
    assert new.sick() == {1: "the driver asks for a reset of the GPU"}


def test_a_gpu_that_only_lost_some_memory_is_used_on() -> None:
    bench = Bench(with_driver(four(), True))
    bench.nvml.gpus[0].recovery = 4  # drain and reset: when it suits the site
    bench.nvml.gpus[0].ecc = 2  # contained: its program has ended
    assert bench.sick() == {}


def test_an_xid_of_a_mig_instance_is_that_instances() -> None:
    bench = Bench([*mig(), *four()])
    board = bench.nvml.gpus[0]
    bench.nvml.events.append((board, 95, *board.instances[1].numbers))
    assert list(bench.sick()) == [1]
    bench.nvml.events.append((board, 79))
    assert list(bench.sick()) == [0, 1], "the board's is everybody's there"


def test_an_instance_whose_numbers_nobody_knows_may_be_the_one_that_is_meant() -> None:
    bench = Bench(mig())
    board = bench.nvml.gpus[0]
    for gpu in bench.devices._gpus[:1]:
        gpu.instance = (None, None)
    bench.nvml.events.append((board, 95, *board.instances[1].numbers))
    assert list(bench.sick()) == [0, 1]


@pytest.mark.parametrize("error", [TIMEOUT, INVALID_ARGUMENT, 20])
def test_errors_that_pass_condemn_nothing(error: int) -> None:
    bench = Bench([*mig(), *four()])
    for gpu in (bench.nvml.gpus[0].instances[0], bench.nvml.gpus[2]):
        gpu.error = error
    for _ in range(10):
        assert bench.later(5) == {}


def test_an_unknown_error_counts_when_it_stays_and_others_answer() -> None:
    bench = Bench(four())
    bench.nvml.gpus[2].error = UNKNOWN
    assert (bench.later(5), bench.later(5)) == ({}, {})
    assert bench.later(5) == {2: "NVML: Unknown Error"}


def test_an_unknown_error_of_all_gpus_is_not_theirs() -> None:
    bench = Bench(four())
    for gpu in bench.nvml.gpus:
        gpu.error = UNKNOWN  # as in a container that lost its access to the driver
    for _ in range(10):
        assert bench.later(5) == {}


@pytest.mark.parametrize("error", [LOST, RESET_REQUIRED])
def test_a_gpu_that_is_lost_is_asked_again_ever_more_seldom(error: int) -> None:
    bench = Bench(four())
    bench.nvml.gpus[3].error = error
    assert list(bench.sick()) == [3]
    bench.nvml.gpus[3].error = 0
    assert list(bench.later(59)) == [3], "not before its time"
    assert bench.later(1) == {}
    bench.nvml.gpus[3].error = error
    assert list(bench.later(5)) == [3]
    bench.nvml.gpus[3].error = 0
    assert list(bench.later(119)) == [3], "twice as long"
    assert bench.later(1) == {}


def test_a_condemned_gpu_that_does_not_answer_stays_condemned() -> None:
    bench = Bench(four())
    bench.nvml.gpus[3].error = LOST
    bench.sick()
    bench.nvml.gpus[3].error = TIMEOUT
    assert list(bench.later(60)) == [3]
    bench.nvml.gpus[3].error = 0
    assert list(bench.later(119)) == [3] and bench.later(1) == {}


def test_a_fatal_xid_passes_when_the_driver_asked_for_a_reset_and_does_no_more() -> None:
    bench = Bench(with_driver(four(), True))
    board = bench.nvml.gpus[1]
    bench.nvml.events.append((board, 119))
    board.recovery = 1
    assert list(bench.sick()) == [1]
    board.recovery = 0
    assert list(bench.later(10)) == [1] and bench.later(60) == {}


@pytest.mark.parametrize("known", [True, False])
def test_a_fatal_xid_stays_where_no_reset_can_be_seen(known: bool) -> None:
    bench = Bench(with_driver(four(), known))
    bench.nvml.events.append((bench.nvml.gpus[1], 119))
    for _ in range(20):
        assert list(bench.later(3600)) == [1]


def test_the_xids_of_others_are_seen_beside_a_lost_gpu() -> None:
    """NVML answers whoever waits for events of a lost GPU, and of others too, with its loss only."""
    bench = Bench(four())
    bench.nvml.gpus[3].error = LOST
    assert list(bench.sick()) == [3]
    bench.nvml.events.append((bench.nvml.gpus[1], 62))
    assert bench.sick() == {1: "Xid 62 (micro-controller halted)", 3: "NVML: GPU is lost"}


def test_a_gpu_that_is_well_again_is_watched_anew() -> None:
    bench = Bench(four())
    bench.nvml.gpus[3].error = LOST
    bench.sick()
    assert len(bench.nvml.registered) == 4
    bench.nvml.gpus[3].error = 0
    assert bench.later(60) == {}
    assert bench.nvml.registered[4:] == [bench.nvml.gpus[3].uuid]


def test_an_xid_of_a_gpu_without_a_uuid_is_its_own() -> None:
    bench = Bench([SimulatedGpu(""), SimulatedGpu("")])
    bench.nvml.events.append((bench.nvml.gpus[1], 62))
    assert list(bench.sick()) == [1]


def test_many_xids_at_once_do_not_put_it_off_for_long() -> None:
    bench = Bench(with_driver(four(), True))
    bench.nvml.gpus[1].recovery = 1
    bench.nvml.events += [(bench.nvml.gpus[1], 119)] * 10
    bench.sick()
    bench.nvml.gpus[1].recovery = 0
    assert bench.later(60) == {}


def test_only_new_memory_errors_count_and_a_reset_ends_them() -> None:
    gpus = four()
    gpus[0].ecc = 2
    gpus[3].ecc = None
    bench = Bench(gpus)
    assert bench.sick() == {}
    gpus[0].ecc = 3
    assert bench.sick() == {0: "1 uncorrectable ECC errors"}
    gpus[0].ecc = 0
    assert bench.later(60) == {}


def test_before_r570_a_contained_memory_error_is_known_by_the_row_remapper() -> None:
    gpus = four()
    for gpu in gpus:
        gpu.remap_failed = False  # A100 and later
    gpus[0].remap_failed = True  # and the site uses it
    bench = Bench(gpus)
    gpus[1].ecc = 2
    assert bench.sick() == {}
    gpus[2].remap_failed = True
    assert bench.sick() == {2: "a memory row could not be remapped"}


def with_driver(gpus: list[SimulatedGpu], known: bool) -> list[SimulatedGpu]:
    """GPUs of a driver that tells what they need (R570), or not."""
    for gpu in gpus:
        gpu.recovery = 0 if known else None
    return gpus


def test_the_compute_mode_is_known(install: Install) -> None:
    install(four(), nvmlDeviceGetComputeMode=lambda gpu: int(gpu.uuid[-1]))
    modes = [device.compute_mode.value for device in NvmlDevices("here").inventory()]
    assert modes == ["DEFAULT", "DEFAULT", "PROHIBITED", "EXCLUSIVE_PROCESS"], "1 is of before CUDA 8"
