"""Devices: NVIDIA GPUs, CPU slots and simulated GPUs, as `--devices` names them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcsched.devices.base import Devices, Sample
from hpcsched.devices.bounded_call import BoundedCalls
from hpcsched.errors import ConfigError

D = TypeVar("D", bound=Devices)

OPENS_WITHIN_S = 120.0
"""How long a driver may take until it has said what is there (chosen): without persistence mode it begins
each GPU anew, which takes seconds. One that hangs would hold us up for ever, and Ctrl-C too."""

__all__ = ["Devices", "Sample", "open_devices"]

_ACCEPTED = (
    "auto, cuda, cuda:N, cpu:N, replay:N[@SPEED] or replay:NODE.toml[@SPEED] (N a positive whole number)"
)
_SPEC = re.compile(r"(?P<kind>auto|cuda|cpu|replay)(:(?P<count>[1-9][0-9]{0,5}))?(@(?P<speed>\S+))?")
_NODE = re.compile(r"replay:(?P<node>.+\.toml)(@(?P<speed>[^@/\s]+))?")


def open_devices(spec: str, host: str, *, cpus: int | None = None) -> Devices:
    """The devices that `spec` names on this host; `host` is the name they get.

    `cpus`: the most CPU slots that `auto` makes where there is no GPU (the CPUs that the batch system
    granted). Raises ConfigError for a spec that cannot be read, for more GPUs than there are, and where a
    driver hangs.
    """
    if described := _NODE.fullmatch(spec.strip()):
        return _described(Path(described["node"]), host, _factor(spec, described["speed"]))
    kind, count, speed = _parse(spec)
    if kind in ("auto", "cuda"):
        from hpcsched.devices.nvml import NvmlDevices

        gpus = _answered(lambda: NvmlDevices(host, most=count), spec)
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
        from hpcsched.devices.node_file import Node
        from hpcsched.devices.replay import ReplayDevices

        return ReplayDevices(Node(count or 1), host, speed)
    from hpcsched.devices.cpu import CpuSlots

    present = len(os.sched_getaffinity(0))
    return CpuSlots(count or min(present, cpus or present), host)


def _answered(opened: Callable[[], D], spec: str) -> D:
    """The devices that are opened, in a thread of its own. Raises ConfigError if that does not end."""

    def caught() -> D | Exception:
        try:
            return opened()
        except Exception as error:  # it is raised where somebody waits for it
            return error

    answered, found = BoundedCalls("opens devices").call(caught, OPENS_WITHIN_S)
    if not answered or found is None:
        got = f"{spec!r}, but the driver has not answered for {OPENS_WITHIN_S:.0f} s"
        raise ConfigError(where="--devices", got=got, accepted="a driver that answers (nvidia-smi), or cpu:N")
    if isinstance(found, Exception):
        raise found
    return found


def _described(file: Path, host: str, speed: float) -> Devices:
    from hpcsched.devices.node_file import read_node
    from hpcsched.devices.replay import ReplayDevices

    node = read_node(file)
    devices = _answered(lambda: ReplayDevices(node, host, speed), f"replay:{file}")
    if not devices.inventory():
        devices.close()
        raise ConfigError(
            where=f"--devices {file}", key="visible", got=repr(node.visible), accepted="names of its GPUs"
        )
    return devices


def _factor(spec: str, speed: str | None) -> float:
    """The factor of a replay; raises ConfigError."""
    try:
        factor = 1.0 if speed is None else float(speed)
    except ValueError:
        factor = 0.0
    if not math.isfinite(factor) or factor <= 0:
        raise ConfigError(where="--devices", got=repr(spec), accepted=_ACCEPTED)
    return factor


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
    if speed is not None and kind != "replay":
        raise bad
    return kind, number, _factor(spec, speed)
