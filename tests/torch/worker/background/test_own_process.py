"""A background job in a process of its own: the limit of its memory, and GPUs that let in one process only.

torch.cuda and NVML are stand-ins here.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcsched.contract import exits
from hpcsched.errors import ConfigError
from hpcsched.worker import entry
from hpcsched.worker.background import proxy
from hpcsched.worker.background.own_process import cap_memory, compute_mode, refuse_exclusive

BACKGROUND = {"HPCSCHED_LANE": "background", "HPCSCHED_LANE_MEMORY_MIB": "9000"}
MIB = 1 << 20


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What torch's allocator is held to, on a GPU of 16 GiB."""
    found: list[float] = []
    about = SimpleNamespace(total_memory=16384 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: found.append(part))
    return found


@pytest.mark.parametrize(
    ("environ", "held"),
    [
        (BACKGROUND, [(9000 - 512) / 16384]),
        ({**BACKGROUND, "HPCSCHED_LANE_MEMORY_MIB": "99999"}, [1.0]),
        ({**BACKGROUND, "HPCSCHED_LANE_MEMORY_MIB": "12"}, [1 / 16384]),
        ({**BACKGROUND, "HPCSCHED_LANE": "foreground"}, []),
        ({"HPCSCHED_LANE": "background"}, []),
        ({}, []),
    ],
)
def test_it_takes_no_more_than_it_is_told(
    environ: dict[str, str], held: list[float], fractions: list[float]
) -> None:
    cap_memory(environ, torch.device("cuda", 0))
    assert fractions == pytest.approx(held)


class Nvml:
    """NVML, of a host with GPUs of these compute modes."""

    def __init__(self, modes: dict[str, int], *, fails: str = "") -> None:
        self.modes, self.fails, self.opened = modes, fails, 0
        self.entries = {
            "nvmlInit_v2": lambda: self.open(1) or int(fails == "init"),
            "nvmlShutdown": lambda: self.open(-1),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: self.find(index.value, handle),
            "nvmlDeviceGetHandleByUUID": lambda name, handle: self.find(
                [*modes, name.decode()].index(name.decode()), handle
            ),
            "nvmlDeviceGetComputeMode": self.mode,
        }

    def open(self, more: int) -> int:
        self.opened += more
        return 0

    def find(self, index: int, handle: Any) -> int:
        handle._obj.value = 1 + index
        return int(index >= len(self.modes))

    def mode(self, handle: Any, mode: Any) -> int:
        mode._obj.value = list(self.modes.values())[handle.value - 1]
        return 3 if self.fails == "mode" else 0  # NVML_ERROR_NOT_SUPPORTED


def use(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    def load(name: str) -> Any:
        if nvml is None or name != "libnvidia-ml.so.1":
            raise OSError("no such file")
        return SimpleNamespace(**nvml.entries)

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_a_gpu_for_one_process_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({"GPU-a": 0, "GPU-b": 3})
    use(monkeypatch, nvml)
    assert [compute_mode(name) for name in ("GPU-a", "GPU-b", "0", "1", "GPU-x", "7")] == [
        0,
        3,
        0,
        3,
        None,
        None,
    ]
    refuse_exclusive({"CUDA_VISIBLE_DEVICES": "GPU-a"})
    refuse_exclusive({"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(ConfigError, match=r"on GPU-b.*Exclusive_Process.*; accepted: HPCSCHED_LANE_MODE=mps"):
        refuse_exclusive({"CUDA_VISIBLE_DEVICES": "GPU-b"})
    assert nvml.opened == 0


@pytest.mark.parametrize("nvml", [None, Nvml({"GPU-b": 3}, fails="init"), Nvml({"GPU-b": 3}, fails="mode")])
def test_where_nvml_does_not_say_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None
) -> None:
    use(monkeypatch, nvml)
    refuse_exclusive({"CUDA_VISIBLE_DEVICES": "GPU-b"})


@pytest.mark.parametrize(
    ("lane", "mode", "code", "refused"),
    [
        ("background", "process", None, True),
        ("background", "streams", None, True),  # no foreground takes it in
        ("background", "streams", exits.SUSPENDED, False),
        ("foreground", "process", None, False),
    ],
)
def test_only_a_second_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, lane: str, mode: str, code: int | None, refused: bool
) -> None:
    use(monkeypatch, Nvml({"GPU-b": 3}))
    monkeypatch.setattr(proxy, "be_guest", lambda environ: code)
    monkeypatch.setenv("HPCSCHED_LANE", lane)
    monkeypatch.setenv("HPCSCHED_LANE_MODE", mode)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    if refused:
        with pytest.raises(ConfigError, match="Exclusive_Process"):
            entry.before_torch()
    else:
        assert entry.before_torch() == code
