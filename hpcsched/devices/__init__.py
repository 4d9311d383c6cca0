"""Devices: NVIDIA GPUs, CPU slots and simulated GPUs, as `--devices` names them."""

from __future__ import annotations

import math
import os
import re

from hpcsched.devices.base import Devices, Sample
from hpcsched.errors import ConfigError

__all__ = ["Devices", "Sample", "open_devices"]

_ACCEPTED = "auto, cuda, cuda:N, cpu:N, replay:N or replay:N@SPEED (N a positive whole number)"
_SPEC = re.compile(r"(?P<kind>auto|cuda|cpu|replay)(:(?P<count>[1-9][0-9]{0,5}))?(@(?P<speed>\S+))?")


def open_devices(spec: str, host: str, *, cpus: int | None = None) -> Devices:
    """The devices that `spec` names on this host; `host` is the name they get.

    `cpus`: the most CPU slots that `auto` makes where there is no GPU (the CPUs that the batch system
    granted). Raises ConfigError for a spec that cannot be read, and for more GPUs than there are.
    """
    kind, count, speed = _parse(spec)
    if kind in ("auto", "cuda"):
        from hpcsched.devices.nvml import NvmlDevices

        gpus = NvmlDevices(host, most=count)
        present = len(gpus.inventory())
        if present and (count is None or present == count):
            return gpus
        gpus.close()
        if kind == "cuda":
            found = (
                f"{spec!r}, but here {'is' if present == 1 else 'are'} {present} GPU{'s' * (present != 1)}"
            )
            why = f" ({gpus.missing})" if gpus.missing else ""
            fits = f"auto, cpu:N or cuda:1..{present}" if present else "auto or cpu:N"
            raise ConfigError(where="--devices", got=found + why, accepted=fits)
    if kind == "replay":
        from hpcsched.devices.replay import ReplayDevices

        return ReplayDevices(count or 1, host, speed)
    from hpcsched.devices.cpu import CpuSlots

    present = len(os.sched_getaffinity(0))
    return CpuSlots(count or min(present, cpus or present), host)


def _parse(spec: str) -> tuple[str, int | None, float]:
    """(kind, count, speed) of a spec; raises ConfigError."""
    bad = ConfigError(where="--devices", got=repr(spec), accepted=_ACCEPTED)
    found = _SPEC.fullmatch(spec.strip())
    if found is None:
        raise bad
    kind, count, speed = found["kind"], found["count"], found["speed"]
    if (count is None) != (kind == "auto") and kind != "cuda":
        raise bad
    number = None if count is None else int(count)
    if speed is None:
        return kind, number, 1.0
    try:
        factor = float(speed)
    except ValueError:
        raise bad from None
    if kind != "replay" or not math.isfinite(factor) or factor <= 0:
        raise bad
    return kind, number, factor
