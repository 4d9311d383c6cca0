"""`--allocation` of `simulate`: allocations that come and go, whether jobs fit, and what each was worth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import UNSET

from hpcsched import jobfile
from hpcsched.core.jobs import MOST_GPUS
from hpcsched.core.resources.gpus import suits
from hpcsched.durations import YEAR_S, parse_duration
from hpcsched.errors import ConfigError
from hpcsched.jobfile.needs import check_needs
from hpcsched.report.idle import idle_of, last_end_s, there_gpu_s
from hpcsched.report.result import AllocationResult
from hpcsched.sim.blocks import Block, placed
from hpcsched.sim.capacity import Capacity, GpuType

if TYPE_CHECKING:
    from hpcsched.core.machine import Machine
    from hpcsched.core.model import JobSpec
    from hpcsched.core.needs import Needs

WHERE = "--allocation"
FORM = "[NODESx]GPUS[:TYPE]@START[+TIME]"
_ACCEPTED = f"{FORM}, such as 2x8@1h+4h: 2 nodes of 8 GPUs each, in an hour, for 4 hours"
_WRITTEN = re.compile(r"(?:(\d{1,6})x)?(\d{1,6})(?::([^@]*[^@\s][^@]*))?@([^@+]+)(?:\+(.+))?", re.ASCII)
_MOST = 1000
"""Allocations, at most (chosen)."""


def allocations_of(
    texts: Sequence[str], gpus: int | None, nodes: int | None, cpus: int | None, device_type: str = ""
) -> tuple[Block, ...]:
    """All hosts that are simulated, where some come or go: those that are there all the time (`nodes` with
    `gpus` each, if either is given), then those of each text. Where one of these names a type of GPU, all
    others have GPUs of `device_type`. Empty without a text; raises ConfigError."""
    if not texts:
        return ()
    if len(texts) > _MOST:
        raise ConfigError(where=WHERE, got=f"{len(texts)} of them", accepted=f"at most {_MOST}")
    blocks = [_read(text) for text in texts]
    if gpus or nodes:
        blocks.insert(0, Block(gpus=gpus or 0, nodes=nodes or 1))
    if not cpus and not all(block.gpus for block in blocks):
        if not all(block.gpus for block in blocks[-len(texts) :]):
            raise ConfigError(where=WHERE, got="no GPUs", accepted="at least 1 on each node, or --cpus")
        raise ConfigError(where="--nodes", got=str(nodes), accepted="with --gpus-per-node or --cpus")
    if any(block.gpu_type for block in blocks):
        blocks = [replace(block, gpu_type=block.gpu_type or device_type) for block in blocks]
    return tuple(blocks)


def _read(text: str) -> Block:
    if not (match := _WRITTEN.fullmatch(text.strip())):
        raise ConfigError(where=WHERE, got=repr(text), accepted=_ACCEPTED)
    nodes, gpus = int(match[1] or 1), int(match[2])
    if nodes < 1:
        raise ConfigError(where=WHERE, got=repr(text), accepted="at least 1 node")
    if nodes * max(1, gpus) > MOST_GPUS:
        raise ConfigError(where=WHERE, got=repr(text), accepted=f"at most {MOST_GPUS} GPUs on all its nodes")
    start_s = _seconds(text, match[4])
    lasts_s = math.inf if match[5] is None else _seconds(text, match[5])
    if not lasts_s:
        raise ConfigError(where=WHERE, got=repr(text), accepted="a TIME of more than 0")
    gpu_type = (match[3] or "").strip()
    return Block(gpus=gpus, gpu_type=gpu_type, nodes=nodes, start_s=start_s, lasts_s=lasts_s)


def _seconds(text: str, written: str) -> float:
    try:
        seconds = parse_duration(written)
    except (ValueError, OverflowError):
        raise ConfigError(where=WHERE, got=repr(text), accepted=_ACCEPTED) from None
    if seconds > YEAR_S:
        raise ConfigError(where=WHERE, got=repr(text), accepted="times of at most a year: 365d")
    return seconds


def largest_hosts(blocks: Iterable[Block]) -> tuple[int, int]:
    """The most GPUs on a host, and how many hosts have them, all of one type, at the same time."""
    there = Capacity(blocks)
    gpus = there.most(1)
    return gpus, max(
        stretch.on_hosts[gpu_type].count(gpus) for stretch in there.stretches for gpu_type in _types(there)
    )


def first_type(blocks: Iterable[Block]) -> str:
    """The type of the GPUs that come first ("": any): the run's own."""
    with_gpus = [block for block in blocks if block.gpus]
    return min(with_gpus, key=lambda block: block.start_s).gpu_type if with_gpus else ""


def check_fits(specs: Iterable[JobSpec], blocks: Sequence[Block], where: str) -> None:
    """Refuse jobs that ask for more GPUs or hosts than are ever there at the same time, or for other ones."""
    specs = tuple(specs)
    picky = any(spec.needs and spec.needs.picky for spec in specs)
    devices = [device for one in (placed(blocks) if picky else ()) for device in one.devices]
    suiting: dict[Needs | None, Capacity] = {}
    for spec in specs:
        check_needs(spec, devices, (), where=where)
        needs = spec.needs.placing if spec.needs else None
        if needs not in suiting:
            suiting[needs] = Capacity(block for block in blocks if not block.gpus or _suits(needs, block))
        there = suiting[needs]
        asked = spec.gpus_min, spec.nodes
        of_a_type = [
            (there.most(min(spec.nodes, hosts), gpu_type, uneven=spec.uneven), hosts)
            for gpu_type in ((None,) if spec.mixes_types else _types(there))
            if (hosts := there.hosts(gpu_type))
        ]
        gpus, hosts = max(of_a_type, key=lambda most: (most[0] >= asked[0] and most[1] >= asked[1], *most))
        here = "so many are here" + " of one type" * (len(of_a_type) > 1)
        jobfile.check_fits([spec], gpus=gpus, hosts=hosts, where=where, here=here)


def _types(there: Capacity) -> Sequence[GpuType]:
    return there.types if len(there.types) > 1 else (None,)


def _suits(needs: Needs | None, block: Block) -> bool:
    [one] = placed([replace(block, nodes=1)])
    return all(suits(needs, device) for device in one.devices)


def used_of(machine: Machine, blocks: Iterable[Block]) -> tuple[AllocationResult, ...]:
    """What a simulation used of each."""
    there, idle = there_gpu_s(machine, last_end_s(machine)), idle_of(machine).hosts
    found = []
    for one in placed(blocks):
        there_h = sum(there.get(host, 0.0) for host in one.hosts) / 3600
        idle_h = sum(idle[host].gpu_hours for host in one.hosts if host in idle)
        found.append(
            AllocationResult(
                start_s=one.block.start_s,
                end_s=None if math.isinf(one.block.end_s) else one.block.end_s,
                nodes=one.block.nodes,
                gpus_per_node=one.block.gpus,
                gpu_type=one.block.gpu_type or UNSET,
                gpus=tuple(gpu for gpus in one.hosts.values() for gpu in gpus),
                gpu_hours=there_h,
                used_gpu_hours=max(0.0, there_h - idle_h),
            )
        )
    return tuple(found)
