"""Which cores of this host are for jobs that need no GPU: those that its GPU jobs do not need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpcsched.core.model import HostCores
from hpcsched.devices.base import Devices
from hpcsched.launch.cpu_shares import numa_nodes

CPUS_PER_GPU = 8
"""Cores kept for the jobs of each GPU, if nothing else is said: a rank, and the processes that read for
it."""


def host_cores(devices: Devices, host: str, *, cpus_per_gpu: int, granted: int | None = None) -> HostCores:
    """The cores of this host for CPU jobs; `granted`: how many the batch system gave, where it limits them.

    CPU slots have all cores, and lend them. Pretended GPUs have none to give.
    """
    allowed = sorted(os.sched_getaffinity(0))
    numa = {core: node for core, node in numa_nodes().items() if core in allowed}
    if devices.kind in ("cpu", "replay"):
        return HostCores(host=host, numa=numa)
    kept = cpus_per_gpu * len(devices.inventory())
    beyond = max(0, len(allowed) - granted) if granted is not None else 0
    own = spare(siblings(allowed), numa, kept + beyond)
    return HostCores(host=host, own=tuple(sorted(own)), numa=numa)


def spare(cores: Iterable[tuple[int, ...]], numa: Mapping[int, int], kept: int) -> set[int]:
    """What is left of the cores when at least so many are kept: as many of each NUMA node as can be, for its
    GPUs, and never one thread of a core without the others.

    `cores` are the threads of each physical core.
    """
    nodes: dict[int, list[tuple[int, ...]]] = {}
    for threads in sorted(cores):
        nodes.setdefault(numa.get(threads[0], 0), []).append(threads)
    count = 0
    while count < kept and any(nodes.values()):
        fullest = max(nodes.values(), key=len)
        count += len(fullest.pop(0))
    return {thread for left in nodes.values() for threads in left for thread in threads}


def siblings(allowed: Iterable[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """The threads that we may use of each physical core; every one by itself where the system does not
    say."""
    ours, found = set(allowed), set()
    for core in ours:
        threads = {core}
        file = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        with contextlib.suppress(OSError, ValueError):
            for part in file.read_text().strip().split(","):
                first, _, last = part.partition("-")
                threads |= set(range(int(first), int(last or first) + 1))
        found.add(tuple(sorted(threads & ours)))
    return sorted(found)
