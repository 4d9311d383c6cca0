"""Device specs, CPU slots and pretended GPUs."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.devices import Sample, open_devices
from hpcsched.devices.cpu import cpu_list, split_cores
from hpcsched.errors import ConfigError
from hpcsched.testing.devices import FakeDevices


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.parametrize(
    "spec",
    ["", "cpu", "cpu:0", "cpu:-1", "cpu:x", "cpu:2@3", "cpu:2 x", "cpu:9999999", "auto:2", "gpu:2", "cuda:0"]
    + ["cuda:", "cuda@2", "replay", "replay:0", "replay:2@"]
    + [f"replay:2@{speed}" for speed in ("0", "-1", "inf", "nan", "fast")],
)
def test_a_bad_spec_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_devices(spec, "h")
    assert caught.value.where == "--devices"
    assert repr(spec) in str(caught.value)


def test_replay_has_a_speed() -> None:
    devices = open_devices("replay:6@120.5", "h")
    assert (devices.kind, devices.speed, len(devices.inventory())) == ("replay", 120.5, 6)
    assert devices.sample()[5] == Sample(gpu=5)


def test_cuda_without_a_gpu_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match="here are 0 GPUs"):
        open_devices("cuda:2", "h")


def test_auto_without_a_gpu_is_a_slot_a_core() -> None:
    devices = open_devices("auto", "h")
    assert devices.kind == "cpu"
    assert len(devices.inventory()) == len(os.sched_getaffinity(0))
    assert devices.environment(devices.inventory()) == {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "-1",  # HIP takes an empty list for all
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def test_cpu_slots_share_out_the_allowed_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 8, 9})
    devices = open_devices("cpu:2", "h")
    first, second = devices.inventory()
    assert (first.handle, second.handle) == ("2-3", "4,8-9")
    assert devices.cpus(second) == {4, 8, 9}
    assert devices.environment([second])["OMP_NUM_THREADS"] == "3"
    assert devices.environment([first, second])["OMP_NUM_THREADS"] == "2"


def test_the_first_sample_has_no_utilisation() -> None:
    devices = open_devices("cpu:1", "h")
    assert devices.sample()[0].utilisation is None
    assert devices.sample()[0].utilisation is not None


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 100))
def test_split_is_even_and_complete(cores: set[int], slots: int) -> None:
    parts = split_cores(sorted(cores), slots)
    assert len(parts) == slots
    if slots <= len(cores):
        assert [c for part in parts for c in part] == sorted(cores)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert all(len(part) == 1 for part in parts)
        counts = [parts.count((c,)) for c in cores]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("cores", "slots"), [([], 1), ([0], 0)])
def test_split_needs_a_core_and_a_slot(cores: list[int], slots: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_cores(cores, slots)


def test_cpu_list() -> None:
    assert cpu_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_fake_devices_follow_their_script_and_break() -> None:
    busy = Sample(gpu=1, utilisation=0.5)
    devices = FakeDevices(2, samples=[[busy]])
    devices.lose(0)
    assert devices.sample() == [Sample(gpu=0, healthy=False, why="fell off the bus"), busy]
    assert devices.sample()[1] == Sample(gpu=1)
    devices.mend(0)
    assert devices.sample()[0].healthy, "who is asked again may be well"


def test_fake_devices_are_free_as_they_are_told() -> None:
    devices = FakeDevices(3)
    devices.memory_free.update({0: False, 1: None})
    assert [devices.free(device) for device in devices.inventory()] == [False, None, True]
