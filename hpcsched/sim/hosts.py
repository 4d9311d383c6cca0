"""The hosts of a simulation, and their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.core.model import Device
from hpcsched.core.profile import Profile


@dataclass(frozen=True, kw_only=True)
class OtherHosts:
    """So many more hosts, with GPUs of another type, and the profiles of the models on these."""

    nodes: int
    gpus: int
    gpu_type: str
    profiles: tuple[Profile, ...] = ()


def host_names(nodes: int) -> list[str]:
    """The names of so many hosts, in order."""
    return [f"node{i + 1}" for i in range(nodes)]


def devices_of(
    gpus: int, nodes: int, others: Sequence[OtherHosts] = (), *, gpu_type: str = ""
) -> tuple[Device, ...]:
    """The GPUs of `nodes` hosts with `gpus` each, of this type ("": of any), and of others."""
    groups = [(gpus, gpu_type) for _ in range(nodes)]
    groups += [(other.gpus, other.gpu_type) for other in others for _ in range(other.nodes)]
    devices: list[Device] = []
    for host, (count, stands_for) in zip(host_names(len(groups)), groups, strict=True):
        first = len(devices)
        devices += [
            Device(index=first + i, host=host, kind="simulated", handle=str(i), stands_for=stands_for)
            for i in range(count)
        ]
    return tuple(devices)
