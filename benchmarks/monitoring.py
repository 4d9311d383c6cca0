"""One monitoring cycle: a sample of every device, onto the run's record of their use.

    python benchmarks/monitoring.py [--json] [--quick]

Three sources. `cpu:8` is what the agent really does on CPU slots. "Our part" runs hpcsched's own NVML code
over 8 GPUs played by a module whose calls cost nothing: NVML's own time is NOT in it. Where this machine
has NVIDIA GPUs, the real NVML is measured as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from common import Report, main, median, ms, percentile

from hpcsched.agent.gpu_watch import keep_samples
from hpcsched.devices.base import Devices
from hpcsched.devices.cpu import CpuSlots
from hpcsched.devices.nvml import MIB, NvmlDevices
from hpcsched.store.device_use import UseRecord, read_use

CYCLES, QUICK_CYCLES = 2_000, 20
DEVICES = 8
GOAL_S = 0.001
PAPER = "paper: 11.8 ms"


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    cycles = QUICK_CYCLES if options.quick else CYCLES
    _add(report, "cpu_slots", f"one monitoring cycle, `cpu:{DEVICES}`", CpuSlots(DEVICES, "here"), cycles)
    with patch.dict(sys.modules, {"pynvml": fake_pynvml()}), _all_visible():
        devices = NvmlDevices("here")
    if len(devices.inventory()) != DEVICES:
        raise RuntimeError(f"the pretended NVML shows {len(devices.inventory())} GPUs: {devices.missing}")
    _add(
        report,
        "nvml_our_part",
        f"... {DEVICES} GPUs, our part only (NVML's own time not in it)",
        devices,
        cycles,
    )
    real = NvmlDevices("here")
    if count := len(real.inventory()):
        _add(report, "nvml_real", f"... {count} x {real.kind}, real NVML", real, cycles, per=count)
    else:
        report.row("... real NVML", f"not measured: no GPU here ({real.missing})")
    return report


def _add(report: Report, key: str, what: str, devices: Devices, cycles: int, per: int = DEVICES) -> None:
    samples = _cycles(devices, cycles)
    devices.close()
    report.results[f"{key}_s"] = samples
    typical = median(samples)
    measured = f"p50 {ms(typical)}, p99 {ms(percentile(samples, 0.99))}"
    if per != DEVICES:
        measured += f" ({ms(typical / per)} a GPU)"
    goal = f"at most 1 ms over {DEVICES} devices ({PAPER})"
    report.row(what, measured, goal=goal, ok=typical / per * DEVICES <= GOAL_S)


def _cycles(devices: Devices, cycles: int) -> list[float]:
    devices.sample()  # the first one only primes
    taken_s = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "device-use.jsonl"
        record = UseRecord(file)
        for cycle in range(cycles):
            start = time.perf_counter()
            keep_samples(record, float(cycle), devices.sample())
            taken_s.append(time.perf_counter() - start)
        measured = {gpu for use in read_use(file) for gpu in use.gpus}
    if measured != {device.index for device in devices.inventory()}:
        raise RuntimeError("a device was never measured")
    return taken_s


def _all_visible() -> Any:
    """The environment without CUDA_VISIBLE_DEVICES."""
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return patch.dict(os.environ, kept, clear=True)


def fake_pynvml() -> Any:
    """The part of pynvml that hpcsched calls, over 8 GPUs, with answers ready."""

    class NVMLError(Exception):
        """As pynvml's."""

    timeout = NVMLError("timeout")
    memory, rates = SimpleNamespace(total=140_000 * MIB, used=512 * MIB), SimpleNamespace(gpu=40)

    def no_event(*_: Any) -> None:
        raise timeout

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": DEVICES,
        "nvmlDeviceGetName": "pretended",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": rates,
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetCpuAffinity": [2**64 - 1] * 64,
        "nvmlEventSetCreate": "events",
        "nvmlEventSetFree": None,
        "nvmlDeviceRegisterEvents": None,
    }
    calls = {name: (lambda *_, answer=answer: answer) for name, answer in answers.items()}
    return SimpleNamespace(
        **calls,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlEventSetWait_v2=no_event,
        NVMLError=NVMLError,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_ERROR_NO_PERMISSION=4,
        NVML_ERROR_FUNCTION_NOT_FOUND=13,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlEventTypeXidCriticalError=8,
    )


if __name__ == "__main__":
    main("one monitoring cycle", measure)
