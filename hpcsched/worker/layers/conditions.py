"""What the times of layers depend on besides model and device: versions, kinds of arithmetic, clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def conditions(device: torch.device) -> dict[str, Any]:
    """All that this torch and this device tell of, as `LayerProfile.conditions` has it."""
    asked: dict[str, Callable[[], Any]] = {
        "torch": lambda: str(torch.__version__),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
    }
    if device.type == "cuda":
        properties, cudnn = torch.cuda.get_device_properties(device), torch.backends.cudnn
        asked |= {
            "cuda": lambda: torch.version.cuda,
            "cudnn": cudnn.version,
            "gpu": lambda: properties.name,
            "matmul_allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
            "cudnn_allow_tf32": lambda: cudnn.allow_tf32,
            "cudnn_benchmark": lambda: cudnn.benchmark,
            "l2_bytes": lambda: properties.L2_cache_size,
            "max_sm_clock_mhz": lambda: properties.clock_rate // 1000,
        }
    else:
        asked["threads"] = torch.get_num_threads
    found = {name: told(ask) for name, ask in asked.items()}
    return {name: fact for name, fact in found.items() if fact is not None}


def sm_clock_mhz(device: torch.device) -> int | None:
    """How fast the processors of a GPU have run in the last moments; None where it is not known."""
    return told(lambda: int(torch.cuda.clock_rate(device))) if device.type == "cuda" else None


def told(ask: Callable[[], Any]) -> Any:
    """The answer; None where this torch, this device or this environment (without NVML) has none."""
    try:
        return ask()
    except Exception:  # NVML's errors are no class that could be named without it
        return None
