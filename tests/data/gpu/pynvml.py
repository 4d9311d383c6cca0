"""NVML as it is on a host with two GPUs, for processes that find it before the real one.

Where the variable NVML_PLAYED names a folder, its file `used` has the MiB that are in use on each GPU, and a
GPU is lost while there is a file of its number; `compute_mode` has NVML's number of the mode of all.
"""

import os
from pathlib import Path
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 4, 13
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816


class NVMLError(Exception):
    value = NVML_ERROR_NOT_SUPPORTED


def _cannot(*_):
    raise NVMLError


class _Lost(NVMLError):
    value = 15  # NVML_ERROR_GPU_IS_LOST


def _played(name):
    folder = os.environ.get("NVML_PLAYED")
    return Path(folder, name) if folder else None


def _used_mib():
    try:
        return int(_played("used").read_text() or 0)
    except (AttributeError, OSError):
        return 0


def _memory(index):
    if (lost := _played(str(index))) and lost.exists():
        raise _Lost
    return SimpleNamespace(total=80 << 30, used=_used_mib() << 20)


def _compute_mode(index):
    modes = _played("compute_mode")
    return int(modes.read_text()) if modes and modes.exists() else 0


_ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
    "nvmlDeviceGetName": lambda index: "NVIDIA H100",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetComputeMode": _compute_mode,
}


def __getattr__(name):
    if not name.startswith("nvml"):
        raise AttributeError(name)
    return _ANSWERS.get(name, _cannot)
