"""What goes on running as one head of a run follows another: the node agents of its hosts tell of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcsched.contract import variables
from hpcsched.core.model import Device
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.workers import AttemptPart, RemoteWorkers, Send

GATHER_S = 12.0
"""Time in which the node agents of an earlier head come to the next one (chosen): they look for it every 3 s
at least, and a shared filesystem takes its time."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """An attempt that runs on: the group of its rank 0, and those that joined it later.

    `whole`: all of its ranks are there, as far as its orders tell, and none has failed. `living` of them are
    left. `store_key` is what the keys of its rendezvous begin with.
    """

    job_id: int
    attempt: int
    order: protocol.Launch
    groups: tuple[RemoteWorkers, ...]
    whole: bool
    living: int

    @property
    def store_key(self) -> str:
        """See `keys.store_key`; "" where it has none."""
        return self.order.env.get(variables.STORE_KEY, "")


def first_part(epoch: int) -> int:
    """The number of the first part that the head of this number launches. None of an earlier head's is given
    again: a node agent may still have to tell how that part has ended."""
    return (epoch << 32) + 1


def hosts_before(devices: Iterable[Device], own: Iterable[str]) -> dict[str, tuple[Device, ...]]:
    """The devices of each host of the head before, less those that have the names of `own` hosts."""
    taken = set(own)
    by_host = groupby(sorted(devices, key=lambda one: one.index), lambda one: one.host)
    return {host: tuple(on_it) for host, on_it in by_host if host not in taken}


def survivors(
    nodes: Mapping[str, RemoteHost],
    *,
    active: Mapping[int, int],
    send: Send,
    pump: Callable[[], None],
) -> list[Survivor]:
    """The attempts that run on hosts of the head before; their parts are among those of `nodes` from now
    on. `active`: the attempts that are under way by the journal, by job; of others the end is on record."""
    found = dict[int, dict[int, list[tuple[str, protocol.Running]]]]()
    for node in nodes.values():
        if node.earlier and node.up and node.hello:
            for running in node.hello.parts:
                if running.over and running.attempt != active.get(running.order.job_id):
                    continue
                groups = found.setdefault(running.order.job_id, {})
                groups.setdefault(running.order.attempt, []).append((node.name, running))
    return [_survivor(job_id, groups, nodes, send, pump) for job_id, groups in found.items()]


def _survivor(
    job_id: int,
    by_attempt: Mapping[int, list[tuple[str, protocol.Running]]],
    nodes: Mapping[str, RemoteHost],
    send: Send,
    pump: Callable[[], None],
) -> Survivor:
    groups, whole, living = list[RemoteWorkers](), True, 0
    told = [
        sorted(by_attempt[attempt], key=lambda one: one[1].order.first_rank) for attempt in sorted(by_attempt)
    ]
    for parts in told:
        groups.append(_group(parts, nodes, send, pump))
        living += sum(running.living for _, running in parts)
        whole &= not any(running.failing for _, running in parts)
    _, first = told[0][0]
    whole &= first.order.first_rank == 0 and first.order.joins is None
    if len(told) == 1 and first.attempt == first.order.attempt:  # else it was resized: its head counts
        ranks = sum(running.order.ranks for _, running in told[0])
        whole &= ranks == first.order.world_size
    return Survivor(job_id, first.attempt, first.order, tuple(groups), whole, living)


def _group(
    parts: Sequence[tuple[str, protocol.Running]],
    nodes: Mapping[str, RemoteHost],
    send: Send,
    pump: Callable[[], None],
) -> RemoteWorkers:
    hello = nodes[parts[0][0]].hello
    assert hello is not None
    mine = [AttemptPart(host, running.order) for host, running in parts]
    workers = RemoteWorkers(mine, address=hello.address, send=send, pump=pump)
    workers.go_on([running for _, running in parts])
    for part in mine:
        nodes[part.host].parts[part.order.part] = (workers, part)
    return workers
