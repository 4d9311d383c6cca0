"""What a background job in a process of its own keeps to on its GPU: memory, and the GPU's compute mode."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from hpcsched.contract.variables import LANE_MODE
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import ConfigError
from hpcsched.worker.background import settings

CONTEXT_MIB = 512
"""Of its memory, what its CUDA context takes beside torch's allocator (chosen; many kernels take more)."""

_MIB = 1 << 20
_EXCLUSIVE_PROCESS = 3
"""NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: one process at a time may have a context there."""


def cap_memory(environ: Mapping[str, str], device: Any) -> None:
    """Have torch take no more of its GPU than this process's job may, which others use too; it then runs out
    of memory where they would have.

    `device`: a CUDA torch.device. Nothing is capped where nothing is told, nor in a foreground, and so in a
    guest, which is in the foreground's process. Raises ConfigError for a limit that is none.
    """
    if settings.lane(environ) == "foreground" or (most := settings.memory_mib(environ)) is None:
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    fraction = max(1, most - CONTEXT_MIB) * _MIB / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)


def refuse_exclusive(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where the GPU lets one process in only: a background job could not be a second one.

    NVML is asked, which makes no context; where it cannot be asked, nothing is refused. (Under MPS the
    service's server is the one process.)
    """
    name = environ.get(CUDA.variable, "").partition(",")[0].strip()
    if name and compute_mode(name) == _EXCLUSIVE_PROCESS:
        raise ConfigError(
            where="environment",
            key=LANE_MODE,
            got=f"a second process on {CUDA.short(name)}, whose compute mode is Exclusive_Process",
            accepted=f"{LANE_MODE}=mps for both jobs, or compute mode Default",
        )


def compute_mode(name: str) -> int | None:
    """NVML's number of the compute mode of a GPU, named as in CUDA_VISIBLE_DEVICES; None: not known."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, mode = ctypes.c_void_p(), ctypes.c_uint()
        if name.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed or nvml.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode)):
            return None
        return mode.value
    finally:
        nvml.nvmlShutdown()
