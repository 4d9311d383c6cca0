"""What is here: packages, and the GPUs as NVML knows them, and who else is on them.

Makes no CUDA context, changes nothing.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 2**20
FREE_MIB, FREE_PART = 1024, 0.01
"""The driver keeps so much, and this part of all memory, of a GPU that nobody is on: at most (chosen)."""

NEEDED = {
    **{
        name: name
        for name in ("torch", "numpy", "click", "rich", "psutil", "msgspec", "alembic", "platformdirs")
    },
    "SQLAlchemy": "sqlalchemy",
    "Mako": "mako",
    "pyzmq": "zmq",
}
"""Packages, and the modules that they bring."""

_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_REASONS = (
    *("GpuIdle", "ApplicationsClocksSetting", "SwPowerCap", "HwSlowdown", "SyncBoost"),
    *("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "DisplayClockSetting"),
)


class NoGpu(Exception):
    """There is no GPU to measure on, or it is not ours alone; the message is one line."""


class Gpus:
    """The GPUs of CUDA_VISIBLE_DEVICES, or all. Raises NoGpu."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or _pynvml()
        try:
            self._nvml.nvmlInit()
            self._handles = self._visible()
        except self._nvml.NVMLError as error:
            raise NoGpu(f"NVML: {error}") from error
        if not self._handles:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise NoGpu("there is no GPU" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}")

    def _visible(self) -> list[Any]:
        every = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return every
        found = []
        for name in filter(None, (part.strip() for part in visible.split(","))):
            if name.isdecimal():
                found += every[int(name) : int(name) + 1]
            elif name.startswith("MIG-"):
                found.append(self._nvml.nvmlDeviceGetHandleByUUID(name))
            else:
                found += [h for h in every if _text(self._nvml.nvmlDeviceGetUUID(h)).startswith(name)]
        return found

    @property
    def driver(self) -> str:
        return _text(self._nvml.nvmlSystemGetDriverVersion())

    @property
    def name(self) -> str:
        """Of the first one, which is what a day measures."""
        return _text(self._ask("nvmlDeviceGetName", self._handles[0]) or "GPU")

    def facts(self) -> list[dict[str, Any]]:
        """All that may explain a number, one table a GPU; None: NVML cannot say."""
        return [self._facts(handle) for handle in self._handles]

    def _facts(self, handle: Any) -> dict[str, Any]:
        ask, nvml = self._ask, self._nvml
        memory, mode = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetComputeMode", handle)
        mig, ecc = ask("nvmlDeviceGetMigMode", handle), ask("nvmlDeviceGetEccMode", handle)
        power = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        clocks = {
            name: (
                ask("nvmlDeviceGetClockInfo", handle, kind),
                ask("nvmlDeviceGetMaxClockInfo", handle, kind),
            )
            for name, kind in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM))
        }
        return {
            "name": _text(ask("nvmlDeviceGetName", handle) or ""),
            "uuid": _text(ask("nvmlDeviceGetUUID", handle) or ""),
            "memory_mib": memory and memory.total // MIB,
            "free_mib": memory and memory.free // MIB,
            "clocks_mhz": {name: now for name, (now, _) in clocks.items()},
            "max_clocks_mhz": {name: most for name, (_, most) in clocks.items()},
            "throttle_reasons": self._reasons(handle),
            "temperature_c": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "power_limit_w": power and power / 1000,
            "compute_mode": _MODES.get(mode, mode),
            "mig": bool(mig[0]) if mig else None,
            "ecc": bool(ecc[0]) if ecc else None,
            "pcie": [
                ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            ],
            "processes": self.processes(handle),
        }

    def _reasons(self, handle: Any) -> list[str] | None:
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is None:
            return None
        named = {name: getattr(self._nvml, f"nvmlClocksThrottleReason{name}", 0) for name in _REASONS}
        return [name for name, bit in named.items() if bits & bit]

    def processes(self, handle: Any = None) -> list[dict[str, Any]]:
        """Those that compute on the GPU, the first one by default: their pids and memory."""
        handle = self._handles[0] if handle is None else handle
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
        return [{"pid": one.pid, "mib": (one.usedGpuMemory or 0) // MIB} for one in found]

    def used_mib(self, handle: Any = None) -> float:
        """The memory in use on the first one, whoever uses it."""
        handle = self._handles[0] if handle is None else handle
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return 0.0 if memory is None else memory.used / MIB

    def in_the_way(self) -> str | None:
        """Who else is on the GPUs, in one line; None: nobody."""
        for number, handle in enumerate(self._handles):
            if others := self.processes(handle):
                said = ", ".join(f"process {one['pid']} ({one['mib']} MiB)" for one in others)
                return f"GPU {number} is in use by {said}: a day needs it idle"
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            most = FREE_MIB + FREE_PART * (0 if memory is None else memory.total / MIB)
            if (used := self.used_mib(handle)) > most:
                return f"GPU {number}: {used:.0f} MiB are in use, by processes not seen from here"
        return None

    def _ask(self, call: str, *args: Any) -> Any:
        # Newer than the driver, pynvml has an error of its own for some calls.
        newer = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        try:
            return getattr(self._nvml, call)(*args)
        except (self._nvml.NVMLError, newer, AttributeError):
            return None


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NoGpu(f"{error}: nvidia-ml-py tells what is on the GPU") from error
    return pynvml


def missing() -> list[str]:
    """The Python packages that a day needs and that are not here."""
    return [name for name, module in NEEDED.items() if find_spec(module) is None]


def torch_versions() -> dict[str, str | None]:
    """Of torch, and of CUDA that it was built for, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {"torch": None, "cuda": None}
    text = Path(spec.origin).with_name("version.py").read_text()
    found = (re.search(rf"^{name}\b.*= '(.*)'", text, re.MULTILINE) for name in ("__version__", "cuda"))
    return dict(zip(("torch", "cuda"), (one and one[1] for one in found), strict=True))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
