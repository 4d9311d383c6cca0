"""The speed of parameter-server training by the cores of each process (NEARCHUS, section III).

A small closed queueing model: workers compute, then exchange gradients and parameters with every server,
through its link and its cores. It knows the three bottlenecks of the paper: a process cannot use all the
cores that it is given (maximum utilisation, MU), a server has too few cores (PSC), or too little network
(PSN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hpcsched.contract.seats import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class PsModel:
    """The work of a training, and the way it is done.

    In a cycle every worker computes once, pushes its gradients to all servers and gets parameters back; the
    servers make one update.

    Args:
        batch_cpu_s: CPU seconds of workers for a batch. It is split evenly over the workers, or each has one
            of its own (`weak`).
        worker_cpu_s: CPU seconds of each worker in a cycle, besides.
        update_cpu_s: CPU seconds of an update, over all servers.
        byte_cpu_s: CPU seconds of servers for each byte of gradients that a worker pushes: unpacking and
            summing them, packing the parameters that it gets for them.
        parameter_bytes: bytes of the parameters, and of their gradients.
        uneven: the part of these that stays together on one server, as the largest tensor does where none is
            cut; the rest is spread evenly.
        serial: the part of a process's work that only one of its threads can do (Amdahl's law).
        most_cores: that one process can use, whatever it is given.
        overlap: the part of an exchange during which a worker goes on computing.
        staleness: steps that a worker may be ahead of the slowest one. 0: all wait for each other, and
            exchange at the same time. Above 0 they take turns while there is time for all.
        weak: each worker has a batch of its own however many they are (weak scaling), and each batch counts
            as a step, as in frameworks that train asynchronously. Otherwise a cycle is a step.
    """

    batch_cpu_s: float
    worker_cpu_s: float = 0.0
    update_cpu_s: float = 0.0
    byte_cpu_s: float = 0.0
    parameter_bytes: float
    uneven: float = 0.0
    serial: float = 0.0
    most_cores: float = inf
    overlap: float = 0.0
    staleness: int = 0
    weak: bool = False

    def usable(self, share: float) -> float:
        """Cores that a busy process uses of `share` cores: as many or more of a larger share.

        A law of two parts, chosen: Amdahl's, which tells how much less two processes lose than one of twice
        the share (Figure 4), up to a number of cores that depends on the machine (Figure 3).
        """
        return min(share, share / (1 + self.serial * (share - 1)), self.most_cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """The capacity of network links: `bytes_s` bytes a second, each way at the same time.

    `of_hosts`: every host has one link, for all of its processes and only for what leaves or enters the host;
    a seat without a host is on one of its own. Otherwise every server has a link, whatever its host.
    """

    bytes_s: float
    of_hosts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PsUsage:
    """The measurable speed and resource use of a training that goes on unchanged.

    `rate`: steps a second. `cpu`: cores in use, by seat. `net`: the part of its link's capacity that is in
    use, 0 to 1, by seat; 0 for workers, and without a link.
    """

    rate: float
    cpu: tuple[float, ...]
    net: tuple[float, ...]


def usage(model: PsModel, seats: Sequence[Seat], link: NetworkLink | None = None) -> PsUsage:
    """The speed of a training on these seats, and what it uses of them.

    A cycle takes as long as the slowest worker computes and then waits for the slowest server: for the
    exchange of all workers, or for its own (`staleness`). And no less than any process or link is busy in it.
    More cores or more network never make it slower. More servers never give the busiest server more to do or
    to transfer.

    Raises ValueError unless there are a server and a worker, and a share for each seat.
    """
    servers = sum(seat.server for seat in seats)
    workers = len(seats) - servers
    if not workers or not servers or any(seat.share <= 0 for seat in seats):
        raise ValueError("a training has a server and a worker, and each of them a share of the cores")
    held = iter(loads(model, servers))
    parts = [next(held) if seat.server else 0.0 for seat in seats]
    batches = workers if model.weak else 1
    computing = model.batch_cpu_s * batches / workers + model.worker_cpu_s
    serving = model.update_cpu_s + model.byte_cpu_s * model.parameter_bytes * workers
    cpu_s = [part * serving if seat.server else computing for seat, part in zip(seats, parts, strict=True)]
    busy_s = [own / model.usable(seat.share) for seat, own in zip(seats, cpu_s, strict=True)]
    link_s = [0.0] * len(seats) if link is None else _link_s(model, seats, parts, link)
    each = list(zip(seats, busy_s, link_s, strict=True))
    compute_s = max(own for seat, own, _ in each if not seat.server)
    exchange_s = max(moved + own + moved for seat, own, moved in each if seat.server)
    if model.staleness:
        exchange_s /= workers
    cycle_s = max(compute_s + (1 - model.overlap) * exchange_s, *busy_s, *link_s)
    return PsUsage(
        rate=batches / cycle_s,
        cpu=tuple(own / cycle_s for own in cpu_s),
        net=tuple(moved / cycle_s if seat.server else 0.0 for seat, _, moved in each),
    )


def loads(model: PsModel, servers: int) -> list[float]:
    """The part of all parameters that each of so many servers has; the first one has most."""
    even = (1 - model.uneven) / servers
    return [even + model.uneven] + [even] * (servers - 1)


def even_seats(servers: int, workers: int, server_share: float, worker_share: float) -> tuple[Seat, ...]:
    """So many servers, then so many workers, of so many cores each."""
    server, worker = Seat(server=True, share=server_share), Seat(server=False, share=worker_share)
    return (server,) * servers + (worker,) * workers


def _link_s(model: PsModel, seats: Sequence[Seat], parts: Sequence[float], link: NetworkLink) -> list[float]:
    """Seconds of a cycle in which the link of each seat is busy, each way. `parts` are those of `usage`."""
    whole_s = model.parameter_bytes / link.bytes_s
    workers = sum(not seat.server for seat in seats)
    if not link.of_hosts:
        return [part * workers * whole_s for part in parts]
    hosts = [seat.host or i for i, seat in enumerate(seats)]
    held = dict.fromkeys(hosts, 0.0)
    inside = dict.fromkeys(hosts, 0)
    for host, seat, part in zip(hosts, seats, parts, strict=True):
        held[host] += part
        inside[host] += not seat.server
    # Gradients come in from the workers outside, and go out from those inside to the servers outside.
    moved = {host: part * (workers - inside[host]) + (1 - part) * inside[host] for host, part in held.items()}
    return [moved[host] * whole_s for host in hosts]
