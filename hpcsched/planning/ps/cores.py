"""The layout of processes on cores: whole cores of their own, then fractions packed together. Pure.

With the wrap-around rule (McNaughton 1959) shares are laid one after the other along the cores, so whatever
adds up to no more than is free has room: a share that ends in the middle of a core goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PARTS_A_CORE = 100
"""Shares are multiples of 1/PARTS_A_CORE of a core."""

_ROUNDING = 1e-6


def lay_out(
    shares: Sequence[float], free: Mapping[int, float], numa: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """The cores of each process, as `stretches` lays them out."""
    return [tuple(laid) for laid in stretches(shares, free, numa)]


def stretches(
    shares: Sequence[float], free: Mapping[int, float], numa: Mapping[int, int]
) -> list[dict[int, float]]:
    """The parts of cores that each process gets, by core.

    `shares` in cores, multiples of 0.01; `free` says how much of a core is to be had, 0..1; `numa` on which
    NUMA node it lies (0 for a core that is not in it). The largest share is placed first, each in the first
    node that has room for it (first-fit decreasing); only those that fit in none are laid over several. In a
    node whole parts get whole cores as long as there are any, and fractions share the rest: each on one core
    where one has room. Raises ValueError for what cannot be: a share of 0, more shares than there is free.
    """
    wanted = [_hundredths(share) for share in shares]
    left = {core: _part_of_a_core(core, part) for core, part in sorted(free.items())}
    if sum(wanted) > sum(left.values()):
        raise ValueError(
            f"{sum(wanted) / PARTS_A_CORE:g} cores are wanted, {sum(left.values()) / PARTS_A_CORE:g} are free"
        )
    nodes: dict[int, list[int]] = {}
    for core in left:
        nodes.setdefault(numa.get(core, 0), []).append(core)
    laid: list[dict[int, int]] = [{} for _ in wanted]
    homes: dict[int, list[int]] = {}
    room = {node: sum(left[core] for core in cores) for node, cores in sorted(nodes.items())}
    astride = []
    for process in sorted(range(len(wanted)), key=lambda process: -wanted[process]):
        home = next((node for node in room if room[node] >= wanted[process]), None)
        if home is None:
            astride.append(process)
        else:
            room[home] -= wanted[process]
            homes.setdefault(home, []).append(process)
    for home, processes in homes.items():
        _fill([(laid[process], wanted[process]) for process in processes], nodes[home], left)
    for process in astride:
        due = wanted[process]
        for node in sorted(room, key=lambda node: -room[node]):  # over as few nodes as can be
            part = min(due, room[node])
            _fill([(laid[process], part)], nodes[node], left)
            room[node] -= part
            due -= part
    return [{core: part / PARTS_A_CORE for core, part in sorted(parts.items())} for parts in laid]


def _fill(wishes: Iterable[tuple[dict[int, int], int]], cores: Sequence[int], left: dict[int, int]) -> None:
    """Lay processes on the cores of a node that have room for all; `wishes`: where to note it, how much."""
    fractions = []
    for laid, due in wishes:
        whole = (core for core in cores if left[core] == PARTS_A_CORE)
        while due >= PARTS_A_CORE and (core := next(whole, None)) is not None:
            due = _take(core, due, left, laid)
        fractions.append((laid, due))
    spread = []
    for laid, due in sorted(fractions, key=lambda fraction: -fraction[1]):
        if one := [core for core in cores if left[core] >= due]:
            _take(min(one, key=lambda core: left[core]), due, left, laid)  # the fullest: whole ones stay
        else:
            spread.append((laid, due))
    for laid, due in spread:
        for core in sorted(cores, key=lambda core: -left[core]):
            due = _take(core, due, left, laid)


def _take(core: int, due: int, left: dict[int, int], laid: dict[int, int]) -> int:
    """Lay as much of it as there is room for on a core; returns what is still due."""
    part = min(left[core], due)
    if part:
        left[core] -= part
        laid[core] = laid.get(core, 0) + part
    return due - part


def _hundredths(share: float) -> int:
    count = round(share * PARTS_A_CORE)
    if count < 1 or abs(share * PARTS_A_CORE - count) > _ROUNDING:
        raise ValueError(f"a share of {share:g} cores; it has to be a multiple of 0.01, and not 0")
    return count


def _part_of_a_core(core: int, part: float) -> int:
    if not 0 <= part <= 1:
        raise ValueError(f"{part:g} of core {core} is free; that has to be 0 to 1")
    return int(part * PARTS_A_CORE + _ROUNDING)
