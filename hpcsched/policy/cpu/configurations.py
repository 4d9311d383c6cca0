"""Configurations of a training on CPU cores, what was measured of them, and what can be made of one: what a
move of the search leads to (NEARCHUS, section IV).

Cores are counted in hundredths; `there` are those that a job can have at most. What is not the paper's is in
docs/adr/0015-cpu-cores.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.contract.strategies import DEFAULT_SERVERS, DEFAULT_WORKERS, Ps
from hpcsched.core.mechanisms.cpu.cores import LEAST, WHOLE
from hpcsched.core.mechanisms.cpu.layout import said_seats
from hpcsched.core.model import Usage

START = Ps.start
"""R_0: the part of its budget that a job starts with (section V: 15 of 100 vCPUs)."""

SCALE_UP = Ps.scale_up
"""R_up: by how much it is given more."""

EFFICIENT = 0.9
"""E_thd_job: a job that uses so much of its cores has no bottleneck. The paper has 0.95; but from
here on more workers can bring a ninth at most, and half as many cores again can bring more than that."""

IDLE = 0.8
"""E_thd_opt: a process that uses less of its cores can spare some."""

FULL_LINK = 0.1
"""A link that is full for more of the time is a bottleneck: 10 % of the samples above 90 % of its
capacity."""

SLACK = 1.1
"""Servers get so much more than in proportion, as workers wait for them."""

LEAST_FACTOR = 1.05
"""Fewer cores more than that, for a job or for a process, are not worth a change."""

KEPT = 0.9
"""Of what a job has: with as much it keeps the rest too. The way back would be barred by whoever took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShape:
    """A DT-config: the cores of each server and each worker, in hundredths."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def cores(self) -> int:
        """All of them, in hundredths."""
        return sum(self.servers) + sum(self.workers)

    @classmethod
    def even(cls, servers: int, workers: int, cores: int) -> CpuShape:
        """The same share for every process, of so many cores at most."""
        share = cores // (servers + workers)
        return cls(servers=(share,) * servers, workers=(share,) * workers)

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> CpuShape:
        """The configuration of these seats."""
        shares = [(seat.server, round(WHOLE * seat.share)) for seat in seats]
        return cls(
            servers=tuple(share for server, share in shares if server),
            workers=tuple(share for server, share in shares if not server),
        )

    def __str__(self) -> str:
        seats = [
            *(Seat(server=True, share=share / WHOLE) for share in self.servers),
            *(Seat(server=False, share=share / WHOLE) for share in self.workers),
        ]
        return said_seats(seats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user has said of a job: its budget in hundredths, how it starts and grows, and counts that are
    not to be searched for (None: they are). `fixed`: it is one program, which has its budget from start to
    end."""

    budget: int
    start: float = START
    scale_up: float = SCALE_UP
    servers: int | None = None
    workers: int | None = None
    fixed: bool = False

    @classmethod
    def of(cls, strategy: Mapping[str, Any]) -> Rules:
        """As in the job file, where it was checked."""
        return cls(
            fixed=strategy["kind"] == "cpu",
            budget=round(WHOLE * strategy["cpus"]),
            start=strategy.get("start", START),
            scale_up=strategy.get("scale_up", SCALE_UP),
            servers=strategy.get("servers"),
            workers=strategy.get("workers"),
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Servers and workers to begin with: (1, 2), if nothing else was said."""
        return self.servers or DEFAULT_SERVERS, self.workers or DEFAULT_WORKERS

    def first(self) -> CpuShape:
        """The configuration to begin with: (1, 2, R_0/3, 2 R_0/3)."""
        if self.fixed:
            return CpuShape(servers=(), workers=(self.budget,))
        ranks = sum(self.counts)
        return CpuShape.even(*self.counts, max(LEAST * ranks, int(self.budget * self.start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenUsage:
    """A configuration, and what was measured of it: cores used by server and by worker, full links by
    server."""

    shape: CpuShape
    usage: Usage
    servers: tuple[float, ...]
    workers: tuple[float, ...]
    links: tuple[float, ...]

    @classmethod
    def of(cls, seats: Sequence[Seat], usage: Usage) -> SeenUsage:
        used = list(zip(seats, usage.cpu, usage.net, strict=True))
        return cls(
            shape=CpuShape.of(seats),
            usage=usage,
            servers=tuple(cpu for seat, cpu, _ in used if seat.server),
            workers=tuple(cpu for seat, cpu, _ in used if not seat.server),
            links=tuple(net for seat, _, net in used if seat.server),
        )

    @property
    def rate(self) -> float:
        return self.usage.rate

    @property
    def efficiency(self) -> float:
        """e_job: the cores used, of those that the job has."""
        return WHOLE * sum(self.usage.cpu) / self.shape.cores

    @property
    def full(self) -> float:
        """The part of the time for which the fullest link was full, if that makes it a bottleneck."""
        full = max(self.links, default=0.0)
        return full if full > FULL_LINK else 0.0


def with_servers(shape: CpuShape, there: int) -> CpuShape | None:
    """Half as many servers again, one at least, with as much each as the others have where that is free; else
    all share what they have."""
    count, held = len(shape.servers), sum(shape.servers)
    more = _more(count, SCALE_UP)
    free = shape.cores + (more - count) * (held // count) <= there
    servers = (max(LEAST, held // (count if free else more)),) * more
    left = min(sum(shape.workers), there - sum(servers)) // len(shape.workers)
    return CpuShape(servers=servers, workers=(left,) * len(shape.workers)) if left >= LEAST else None


def with_workers(base: SeenUsage, there: int) -> CpuShape | None:
    """The workers' cores over more of them: half as many again, or as many as use what each then has."""
    shares, count = base.shape.workers, len(base.shape.workers)
    used = WHOLE * sum(base.workers) / sum(shares)
    more = max(count + 1, round(count * min(2.0, max(1 + SCALE_UP, 1 / max(used, 0.5)))))
    more = min(more, max(sum(shares), there - sum(base.shape.servers)) // LEAST)
    share = max(LEAST, sum(shares) // more)
    return replace(base.shape, workers=(share,) * more) if more > count else None


def with_all(shape: CpuShape, rules: Rules, there: int) -> CpuShape | None:
    """Half as many processes again, of the same size where there are cores for that."""
    servers, workers = (_more(len(kind), rules.scale_up) for kind in (shape.servers, shape.workers))
    each = [sum(kind) // len(kind) for kind in (shape.servers, shape.workers)]
    factor = min(1.0, there / (servers * each[0] + workers * each[1]))
    shares = [int(share * factor) for share in each]
    if min(shares) < LEAST:
        return None
    return CpuShape(servers=(shares[0],) * servers, workers=(shares[1],) * workers)


def _more(count: int, by: float) -> int:
    return count + max(1, round(count * by))


def with_fewer(shape: CpuShape) -> CpuShape | None:
    """The workers' cores for two thirds of them: each costs messages, and time of its own."""
    count = len(shape.workers) * 2 // 3
    return replace(shape, workers=(sum(shape.workers) // count,) * count) if count else None


def scaled(shape: CpuShape, factor: float) -> CpuShape:
    """Every process gets as many times what it has."""
    return CpuShape(
        servers=tuple(int(share * factor) for share in shape.servers),
        workers=tuple(int(share * factor) for share in shape.workers),
    )


def idle_facts(base: SeenUsage) -> dict[str, Any]:
    """Who can spare cores that another one uses (Resource Optimizer: nodes of a kind, then the kinds)."""
    for kind, used, shares in (
        ("servers", base.servers, base.shape.servers),
        ("workers", base.workers, base.shape.workers),
    ):
        each = [WHOLE * cpu / share for cpu, share in zip(used, shares, strict=True)]
        least, most = min(each), max(each)
        if _uneven(least, most):
            singular = kind[:-1]
            names = f"{singular} {each.index(least)}", f"{singular} {each.index(most)}"
            return {"low": names[0], "high": names[1], "least": least, "most": most}
    servers = WHOLE * sum(base.servers) / sum(base.shape.servers)
    workers = WHOLE * sum(base.workers) / sum(base.shape.workers)
    if _uneven(min(servers, workers), max(servers, workers)):
        names = ("the servers", "the workers") if servers < workers else ("the workers", "the servers")
        low, high = sorted((servers, workers))
        return {"low": names[0], "high": names[1], "least": low, "most": high}
    return {}


def _uneven(least: float, most: float) -> bool:
    """Whether one can spare cores that another one uses. Where all that can be is used by one kind, the other
    need not idle as much: the cores of a few servers may hold up many workers."""
    return least < IDLE <= most or least < EFFICIENT <= most


def balanced(base: SeenUsage) -> CpuShape | None:
    """The same cores, in proportion to what each process uses; None if that gives nobody much more."""
    used = [*(SLACK * cpu for cpu in base.servers), *base.workers]
    shares, before = _apportioned(used, base.shape.cores), [*base.shape.servers, *base.shape.workers]
    if max(new / old for new, old in zip(shares, before, strict=True)) < LEAST_FACTOR:
        return None
    count = len(base.servers)
    return CpuShape(servers=tuple(shares[:count]), workers=tuple(shares[count:]))


def trimmed(base: SeenUsage) -> CpuShape | None:
    """As many cores as are used, and a little more."""
    used = [*(SLACK * cpu for cpu in base.servers), *base.workers]
    shares = [max(LEAST, round(WHOLE * cpu / EFFICIENT)) for cpu in used]
    before = [*base.shape.servers, *base.shape.workers]
    shares = [min(pair) for pair in zip(shares, before, strict=True)]
    count = len(base.servers)
    smaller = sum(shares) < KEPT * sum(before)
    return CpuShape(servers=tuple(shares[:count]), workers=tuple(shares[count:])) if smaller else None


def _apportioned(used: Sequence[float], cores: int) -> list[int]:
    """So many hundredths in proportion to what is used, `LEAST` at least."""
    shares = [LEAST] * len(used)
    free = set(range(len(used)))
    while free:
        left = cores - sum(shares[i] for i in range(len(used)) if i not in free)
        total = sum(used[i] for i in free) or 1.0
        low = {i for i in free if used[i] / total * left < LEAST}
        if not low:
            for i in free:
                shares[i] = int(used[i] / total * left)
            break
        free -= low
    return shares
