"""NVML as it is on a host with two GPUs, for processes that find it before the real one."""

from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 4, 13
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816


class NVMLError(Exception):
    value = NVML_ERROR_NOT_SUPPORTED


def _cannot(*_):
    raise NVMLError


_ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
    "nvmlDeviceGetName": lambda index: "NVIDIA H100",
    "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=80 << 30, used=0),
}


def __getattr__(name):
    if not name.startswith("nvml"):
        raise AttributeError(name)
    return _ANSWERS.get(name, _cannot)
