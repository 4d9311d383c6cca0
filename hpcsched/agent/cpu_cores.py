"""The cores of this host for jobs that need no GPU: those that are not kept for its GPU jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpcsched.agent.host_memory import host_memory_mib
from hpcsched.core.model import HostCores
from hpcsched.devices.base import Devices
from hpcsched.launch.cpu_shares import numa_nodes

CPUS_PER_GPU = 8
"""Cores kept for the jobs of each GPU by default (chosen): for a rank and its data loading processes."""


def host_cores(devices: Devices, host: str, *, cpus_per_gpu: int, granted: int | None = None) -> HostCores:
    """The cores of this host, and its memory.

    `granted`: the number of cores granted by the batch system, None for all. CPU slots own all cores and lend
    them; simulated GPUs (`replay`) have none.
    """
    allowed = sorted(os.sched_getaffinity(0))
    numa = {core: node for core, node in numa_nodes().items() if core in allowed}
    if devices.kind == "replay":
        return HostCores(host=host, numa=numa)
    memory_mib = host_memory_mib()
    if devices.kind == "cpu":
        return HostCores(host=host, numa=numa, memory_mib=memory_mib)
    kept = cpus_per_gpu * len(devices.inventory())
    beyond = max(0, len(allowed) - granted) if granted is not None else 0
    own = unreserved_cores(thread_siblings(allowed), numa, kept + beyond)
    left = min(len(allowed), granted or len(allowed)) - len(own)
    return HostCores(host=host, own=tuple(sorted(own)), numa=numa, kept=max(0, left), memory_mib=memory_mib)


def gpu_cores(cores: HostCores) -> tuple[int, ...]:
    """The cores of this host that jobs on GPUs are pinned to where they say how many they need; none where
    these are not counted. The threads of a physical core are next to each other."""
    if not cores.kept:
        return ()
    left = os.sched_getaffinity(0) - set(cores.own)
    return tuple(thread for threads in thread_siblings(left) for thread in threads)


def unreserved_cores(cores: Iterable[tuple[int, ...]], numa: Mapping[int, int], kept: int) -> set[int]:
    """The hardware threads that are left when at least `kept` are kept for GPU jobs.

    The kept ones are spread over the NUMA nodes, and the threads of a core stay together. `cores` are the
    threads of each physical core, `numa` the node of each thread.
    """
    nodes: dict[int, list[tuple[int, ...]]] = {}
    for threads in sorted(cores):
        nodes.setdefault(numa.get(threads[0], 0), []).append(threads)
    count = 0
    while count < kept and any(nodes.values()):
        fullest = max(nodes.values(), key=len)
        count += len(fullest.pop(0))
    return {thread for left in nodes.values() for threads in left for thread in threads}


def thread_siblings(allowed: Iterable[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """The usable hardware threads of each physical core; each by itself where sysfs does not say."""
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
