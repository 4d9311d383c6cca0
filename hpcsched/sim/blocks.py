"""Simulated hosts and their GPUs: those that come together and go together, as allocations do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from hpcsched.core.events import HostsJoined
from hpcsched.core.model import Device, HostCores
from hpcsched.core.resources.gpus import SIMULATED

SIM_HOST = "node"
"""What simulated hosts are called, with a number from 1 on."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Hosts that come together: `gpus` of one type ("": any) on each of `nodes`, in `start_s` seconds, and
    then for `lasts_s`."""

    gpus: int
    gpu_type: str = ""
    nodes: int = 1
    start_s: float = 0.0
    lasts_s: float = math.inf

    @property
    def end_s(self) -> float:
        """When they go."""
        return self.start_s + self.lasts_s

    @property
    def gpus_in_all(self) -> int:
        """GPUs on all its hosts."""
        return self.gpus * self.nodes


@dataclass(frozen=True, kw_only=True)
class BlockHosts:
    """A block in a run: its hosts, and the indices of the GPUs on each."""

    block: Block
    hosts: Mapping[str, tuple[int, ...]]

    @property
    def devices(self) -> Iterator[Device]:
        """Its GPUs."""
        for host, gpus in self.hosts.items():
            for i, index in enumerate(gpus):
                stands_for = self.block.gpu_type
                yield Device(index=index, host=host, kind=SIMULATED, handle=str(i), stands_for=stands_for)

    def cores(self, cpus: int) -> tuple[HostCores, ...]:
        """So many cores of each of its hosts for jobs without GPUs."""
        return tuple(HostCores(host=host, own=tuple(range(cpus))) for host in self.hosts if cpus)


def placed(blocks: Iterable[Block], after: Block | None = None) -> list[BlockHosts]:
    """A name for each host, and indices for the GPUs; they go on from those of `after`, which is there."""
    gpus, nodes = (after.gpus_in_all, after.nodes) if after else (0, 0)
    found = []
    for block in blocks:
        hosts = {}
        for _ in range(block.nodes):
            nodes += 1
            hosts[f"{SIM_HOST}{nodes}"] = tuple(range(gpus, gpus + block.gpus))
            gpus += block.gpus
        found.append(BlockHosts(block=block, hosts=hosts))
    return found


def joining(blocks: Iterable[BlockHosts], cpus: int = 0) -> list[HostsJoined]:
    """The events of their joining, in time; `cpus` are the cores of each host for jobs without GPUs.

    Those that come at the same time come in one event: a policy sees all of them at once.
    """
    events = []
    for at, together in groupby(sorted(blocks, key=_start), key=_start):
        devices: list[Device] = []
        cores: list[HostCores] = []
        ends: dict[str, float] = {}
        for one in together:
            devices += one.devices
            cores += one.cores(cpus)
            if one.block.end_s < math.inf:
                ends |= dict.fromkeys(one.hosts, one.block.end_s)
        events.append(HostsJoined(at=at, devices=tuple(devices), cores=tuple(cores), ends=ends))
    return events


def _start(one: BlockHosts) -> float:
    return one.block.start_s
