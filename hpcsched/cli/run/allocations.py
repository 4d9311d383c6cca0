"""`--allocation` of `simulate`: allocations that come and go, whether jobs fit, and what each was worth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hpcsched import jobfile
from hpcsched.core.jobs import MOST_GPUS
from hpcsched.durations import YEAR_S, parse_duration
from hpcsched.errors import ConfigError
from hpcsched.report.idle import idle_of, last_end_s, there_gpu_s
from hpcsched.report.result import AllocationResult
from hpcsched.sim.blocks import Block, placed
from hpcsched.sim.capacity import Capacity

if TYPE_CHECKING:
    from hpcsched.core.machine import Machine
    from hpcsched.core.model import JobSpec

WHERE = "--allocation"
FORM = "[NODESx]GPUS@START[+TIME]"
_ACCEPTED = f"{FORM}, such as 2x8@1h+4h: 2 nodes of 8 GPUs each, in an hour, for 4 hours"
_WRITTEN = re.compile(r"(?:(\d{1,6})x)?(\d{1,6})@([^+]+)(?:\+(.+))?", re.ASCII)
_MOST = 1000
"""Allocations, at most (chosen)."""


def allocations_of(
    texts: Sequence[str], gpus: int | None, nodes: int | None, cpus: int | None
) -> tuple[Block, ...]:
    """All hosts that are simulated, where some come or go: those that are there all the time (`nodes` with
    `gpus` each, if either is given), then those of each text. Empty without a text; raises ConfigError."""
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
    return tuple(blocks)


def _read(text: str) -> Block:
    if not (match := _WRITTEN.fullmatch(text.strip())):
        raise ConfigError(where=WHERE, got=repr(text), accepted=_ACCEPTED)
    nodes, gpus = int(match[1] or 1), int(match[2])
    if nodes < 1:
        raise ConfigError(where=WHERE, got=repr(text), accepted="at least 1 node")
    if nodes * max(1, gpus) > MOST_GPUS:
        raise ConfigError(where=WHERE, got=repr(text), accepted=f"at most {MOST_GPUS} GPUs on all its nodes")
    start_s = _seconds(text, match[3])
    lasts_s = math.inf if match[4] is None else _seconds(text, match[4])
    if not lasts_s:
        raise ConfigError(where=WHERE, got=repr(text), accepted="a TIME of more than 0")
    return Block(gpus=gpus, nodes=nodes, start_s=start_s, lasts_s=lasts_s)


def _seconds(text: str, written: str) -> float:
    try:
        seconds = parse_duration(written)
    except (ValueError, OverflowError):
        raise ConfigError(where=WHERE, got=repr(text), accepted=_ACCEPTED) from None
    if seconds > YEAR_S:
        raise ConfigError(where=WHERE, got=repr(text), accepted="times of at most a year: 365d")
    return seconds


def largest_hosts(blocks: Iterable[Block]) -> tuple[int, int]:
    """The most GPUs on a host, and how many hosts have them at the same time."""
    there = Capacity(blocks)
    gpus = there.most(1)
    return gpus, max(stretch.on_hosts.count(gpus) for stretch in there.stretches)


def check_fits(specs: Iterable[JobSpec], blocks: Iterable[Block], where: str) -> None:
    """Refuse jobs that ask for more GPUs or hosts than are ever there at the same time."""
    there = Capacity(blocks)
    for spec in specs:
        gpus = there.most(min(spec.nodes, there.hosts))
        jobfile.check_fits([spec], gpus=gpus, hosts=there.hosts, where=where)


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
                gpus=tuple(gpu for gpus in one.hosts.values() for gpu in gpus),
                gpu_hours=there_h,
                used_gpu_hours=max(0.0, there_h - idle_h),
            )
        )
    return tuple(found)
