"""The fastest configurations of parameter-server training by the model, found by trying them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcsched.contract.seats import Seat
from hpcsched.planning.ps.model import NetworkLink, PsModel, PsUsage, even_seats, loads, usage

NODE_CORES = 5.0
"""Cores of each process where all have as many (NEARCHUS, section V)."""

MIN_SHARE = 0.1
"""The least cores of a process where shares are free (chosen)."""

_GOLDEN = (5**0.5 - 1) / 2

_NARROWINGS = 20
"""Of the split of a budget: to less than 0.01 % of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PsConfiguration:
    """A configuration, its servers first, and what is seen of it."""

    servers: int
    workers: int
    seats: tuple[Seat, ...]
    usage: PsUsage


def fixed(model: PsModel, servers: int, workers: int, link: NetworkLink | None = None) -> PsConfiguration:
    """So many servers and workers of NODE_CORES cores each."""
    seats = even_seats(servers, workers, NODE_CORES, NODE_CORES)
    return PsConfiguration(servers=servers, workers=workers, seats=seats, usage=usage(model, seats, link))


def best_fixed(model: PsModel, budget: float, link: NetworkLink | None = None) -> PsConfiguration:
    """The fastest numbers of servers and workers of NODE_CORES cores each (FA-BF, section V).

    Of equally fast ones it is one with the fewest processes. Raises ValueError for a `budget` of cores that
    is too small for two.
    """
    nodes = int(budget / NODE_CORES + 1e-9)
    return _fastest(
        fixed(model, servers, size - servers, link)
        for size in range(2, nodes + 1)
        for servers in range(1, size)
    )


def best(
    model: PsModel,
    budget: float,
    link: NetworkLink | None = None,
    *,
    most_servers: int = 12,
    most_workers: int = 36,
) -> PsConfiguration:
    """The fastest configuration of so many cores at all, each process with the share that is best.

    Workers have equal shares. Servers share what they get beyond MIN_SHARE in proportion to what each of
    them holds. How much that is, is found by golden section: a process's time is convex in its share, so a
    cycle's time is convex in the split.

    Raises ValueError for a `budget` of cores that is too small for two.
    """
    return _fastest(
        _best_split(model, servers, workers, budget, link)
        for servers in range(1, most_servers + 1)
        for workers in range(1, most_workers + 1)
        if (servers + workers) * MIN_SHARE <= budget
    )


def _best_split(
    model: PsModel, servers: int, workers: int, budget: float, link: NetworkLink | None
) -> PsConfiguration:
    parts = loads(model, servers)
    spare = budget - (servers + workers) * MIN_SHARE

    def split(portion: float) -> PsConfiguration:
        worker = Seat(server=False, share=MIN_SHARE + spare * (1 - portion) / workers)
        shares = [MIN_SHARE + spare * portion * part for part in parts]
        seats = (*(Seat(server=True, share=share) for share in shares), *(worker,) * workers)
        return PsConfiguration(servers=servers, workers=workers, seats=seats, usage=usage(model, seats, link))

    low, high = 0.0, 1.0
    left, right = split(1 - _GOLDEN), split(_GOLDEN)
    for _ in range(_NARROWINGS):
        if left.usage.rate >= right.usage.rate:
            high -= (high - low) * (1 - _GOLDEN)
            left, right = split(high - (high - low) * _GOLDEN), left
        else:
            low += (high - low) * (1 - _GOLDEN)
            left, right = right, split(low + (high - low) * _GOLDEN)
    return max(left, right, key=lambda each: each.usage.rate)


def _fastest(found: Iterable[PsConfiguration]) -> PsConfiguration:
    """The first of those that are fastest but for rounding. Raises ValueError if there is none."""
    chosen = None
    for each in found:
        if chosen is None or each.usage.rate > chosen.usage.rate * (1 + 1e-9):
            chosen = each
    if chosen is None:
        raise ValueError("the cores do not suffice for a server and a worker")
    return chosen
