"""The search for the fastest plan (section 4.2): exact on chains, a dynamic program in blocks of branches.

On a chain the amplification limit is a condition on edges, so the answer is a shortest path over the
allowed ones. A link between two layers becomes a table of costs, by the GPU counts of these layers and by
the *budget*, the GPUs that the link's own layers may use at any time. The branches of a block run side by
side, on budgets that add up to no more than the block's, or after one another, in every nesting of the two.

A table has the shape [entry, exit, place, budgets, counts, counts] and holds microseconds from the end of
the layer before to the time when the one after can begin. `entry`, `exit` FREE: the transfer into it, or
out of it, costs nothing, as branches that wait for others on the same GPUs have theirs meanwhile. `place`:
the link's GPUs begin with the first of the layer before (HOME), or not (AWAY).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import inf

import numpy as np
import numpy.typing as npt

from hpcsched.compat import dataclass
from hpcsched.planning.burst.costs import AWAY, HOME, Array, BurstCosts, Spot
from hpcsched.planning.burst.structure import SOURCE, Edge, Knot, LayerBlock, Link, Series

PAID, FREE = 0, 1
"""Whether the transfer at an end of a part counts."""

_MAX_BUDGETS = 16
"""Up to so many GPUs every number of them can be a budget (chosen); beyond, only the counts that layers may
have."""
_MAX_GROUPED_BRANCHES = 6
"""Up to so many branches all groupings are tried (chosen); more are added to the schedule one by one."""

MOST_WORK = 2**31
"""Costs that are added up in one search, at most (chosen): some 20 s of one core."""
_AT_ONCE = 2**23
"""Costs that are added up in one step, at most (chosen): longer steps are taken in parts, for memory."""
_MOST_TABLE = 2**24
"""Costs in one table, at most (chosen)."""
_MOST_RANKS = 2**22
"""Ranks of all layers together, at most (chosen): each is named in the plan."""
_CALLS = 2**12
"""What the calls for a link cost, in costs that are added up (measured)."""

Placement = dict[int, Spot]
"""Where each layer runs, in the order in which the layers are run."""


@dataclass(frozen=True, slots=True)
class _At:
    """An entry of a table: its place, entry and exit, and the places of a budget and of two counts."""

    entry: int
    exit: int
    place: int
    budget: int
    g: int
    h: int

    @property
    def key(self) -> tuple[int, int, int, int, int, int]:
        return self.entry, self.exit, self.place, self.budget, self.g, self.h


class TooLarge(ValueError):
    """A search would take too long, or too much memory; says what it would be for."""


def min_plus(a: Array, b: Array) -> Array:
    """The (min, +) product over the last two axes; the others broadcast."""
    product: Array
    size = np.broadcast(a[..., 0, 0], b[..., 0, 0]).size * a.shape[-2] * a.shape[-1] * b.shape[-1]
    if size <= _AT_ONCE:
        product = (a[..., :, :, None] + b[..., None, :, :]).min(axis=-2)
        return product
    product = a[..., :, 0, None] + b[..., None, 0, :]
    for middle in range(1, a.shape[-1]):
        np.minimum(product, a[..., :, middle, None] + b[..., None, middle, :], out=product)
    return product


class BurstSearch:
    """The search on one graph.

    Args:
        costs: what choices cost.
        gpus: how many there are.
        series: the graph's structure.

    Raises TooLarge where it would take too long, or too much memory.
    """

    def __init__(self, costs: BurstCosts, gpus: int, series: Series) -> None:
        self._costs, self._series = costs, series
        counts = costs.counts
        # Powers of two fill each other up; other counts leave gaps that are budgets of their own.
        few = gpus > _MAX_BUDGETS or all(count & (count - 1) == 0 for count in counts.tolist())
        self._budgets = np.asarray(sorted({*counts.tolist(), gpus}) if few else range(1, gpus + 1))
        self._fits = counts[None, :] <= self._budgets[:, None]
        self._all = len(self._budgets) - 1
        self._pairs = list(self._pairs_within())
        self._refuse_too_large(gpus)
        self._edges: dict[tuple[int, int], Array] = {}
        self._tables: dict[int, Array] = {}
        self._groups: dict[int, dict[int, Array]] = {}

    def _refuse_too_large(self, gpus: int) -> None:
        n, layers = len(self._costs.counts), self._costs.sink
        edges = sum(map(len, self._costs.prev))
        work = edges * (_CALLS + 2 * n * n) + self._work(self._series)
        table = n * n * (8 if all(isinstance(link, Edge) for link in self._series.links) else self._wide)
        if layers * gpus > _MOST_RANKS:
            raise TooLarge(f"{layers} layers on up to {gpus} GPUs")
        if table > _MOST_TABLE or work > MOST_WORK:
            raise TooLarge(f"{n} GPU counts for each of {layers} layers with {edges} edges")

    @property
    def _wide(self) -> int:
        """Entries by budgets, or by pairs of them, for two counts."""
        return 8 * max(len(self._budgets), len(self._pairs))

    def _work(self, series: Series) -> int:
        """The costs that are added up for a series, about."""
        n, product = len(self._costs.counts), 8 * len(self._budgets) * len(self._costs.counts) ** 3
        work = 0
        for link in series.links:
            work += _CALLS + 8 * n * n
            if isinstance(link, Knot):
                work += product
            elif isinstance(link, LayerBlock):
                work += sum(self._work(branch) + len(branch.links) * product for branch in link.branches)
                work += _parted(len(link.branches)) * (_CALLS + self._wide * n * n)
        return work

    def best(self) -> Placement | None:
        """The fastest placement; None if the limit allows none."""
        series, all_ = self._series, self._all
        ends = (SOURCE, *series.layers, self._costs.sink)
        n = len(self._costs.counts)
        reached = [np.zeros(n)]  # the least time until each layer ends, by its count
        for i, link in enumerate(series.links):
            table = self._table(link, ends[i], ends[i + 1])[PAID, PAID, HOME]
            step = table[min(all_, len(table) - 1)]
            reached.append((reached[-1][:, None] + step).min(axis=0) + self._costs.time_us[ends[i + 1]])
        if not np.isfinite(reached[-1]).any():
            return None
        placement: Placement = {}
        h = int(reached[-1].argmin())
        chosen = [h]
        for i in range(len(series.links) - 1, -1, -1):
            table = self._table(series.links[i], ends[i], ends[i + 1])[PAID, PAID, HOME]
            step = table[min(all_, len(table) - 1)]
            chosen.append(int((reached[i] + step[:, chosen[-1]]).argmin()))
        chosen.reverse()
        for i, link in enumerate(series.links):
            at = _At(PAID, PAID, HOME, all_, chosen[i], chosen[i + 1])
            self._place(link, ends[i], ends[i + 1], at, 0, placement)
            if ends[i + 1] != self._costs.sink:
                placement[ends[i + 1]] = Spot(count=chosen[i + 1], first=0)
        return placement

    def blocked(self) -> str:
        """The first layer that nothing the limit allows leads to."""
        for layer in self._series.layers:
            earlier = self._costs.prev[layer] or (SOURCE,)
            if not all(np.isfinite(self._costs.edge_us(before, layer)).any() for before in earlier):
                return self._costs.names[layer]
        return ""

    # -- tables ----------------------------------------------------------------------------------------

    def _table(self, link: Link, first: int, last: int) -> Array:
        """The costs of a link; with one budget only where the budget makes no difference."""
        if isinstance(link, Edge):
            return self._edge(first, last)
        if id(link) not in self._tables:
            make = self._block_table if isinstance(link, LayerBlock) else self._knot_table
            self._tables[id(link)] = make(link, first, last)  # type: ignore[arg-type]
        return self._tables[id(link)]

    def _edge(self, first: int, last: int) -> Array:
        if (first, last) not in self._edges:
            self._edges[first, last] = _edge_table(self._costs.edge_us(first, last))
        return self._edges[first, last]

    def _branch_table(self, branch: Series, first: int, last: int) -> Array:
        ends = (first, *branch.layers, last)
        links = branch.links
        reached = self._table(links[0], ends[0], ends[1])[:, PAID] + self._layer_us(ends[1])
        for i in range(1, len(links) - 1):
            inner = self._table(links[i], ends[i], ends[i + 1])[PAID, PAID, HOME]
            reached = min_plus(reached, inner) + self._layer_us(ends[i + 1])
        leaving = self._table(links[-1], ends[-2], ends[-1])[PAID]
        return min_plus(reached[:, None], leaving)

    def _layer_us(self, layer: int) -> Array:
        """A layer's time by budget and, along the last axis, by its count."""
        us: Array = np.where(self._fits, self._costs.time_us[layer], inf)[:, None, :]
        return us

    def _knot_table(self, knot: Knot, first: int, last: int) -> Array:
        costs, inside = self._costs, set(knot.layers)
        n = len(costs.counts)
        entering, leaving = np.zeros((2, n, n)), np.zeros((2, n, n))
        body = np.zeros(n)
        for layer in knot.layers:
            within = [before for before in costs.prev[layer] if before in inside]
            if len(within) < len(costs.prev[layer] or (SOURCE,)):
                entering = np.maximum(entering, costs.edge_us(first, layer))
            lags = [np.diagonal(costs.edge_us(before, layer)[HOME]) for before in within]
            body = body + costs.time_us[layer] + (np.max(lags, axis=0) if lags else 0.0)
        for before in self._read_by(last):
            if before in inside:
                leaving = np.maximum(leaving, costs.edge_us(before, last))
        enter, leave = _edge_table(entering)[:, PAID], _edge_table(leaving)[PAID]
        reached = enter + np.where(self._fits, body, inf)[:, None, :]
        return min_plus(reached[:, None], leave)

    def _read_by(self, layer: int) -> tuple[int, ...]:
        if layer != self._costs.sink:
            return self._costs.prev[layer]
        read = {before for earlier in self._costs.prev for before in earlier}
        return tuple(before for before in range(self._costs.sink) if before not in read)

    def _block_table(self, block: LayerBlock, first: int, last: int) -> Array:
        singles = [self._branch_table(branch, first, last) for branch in block.branches]
        groups = self._groups[id(block)] = {1 << i: table for i, table in enumerate(singles)}
        for group in _groups(len(singles)):
            groups[group] = self._joined(groups, list(_splits(group, groups)))
        table = groups[(1 << len(singles)) - 1]
        if block.skip:
            table = np.maximum(table, self._edge(first, last))
        return table

    def _joined(self, groups: dict[int, Array], splits: list[tuple[int, int]]) -> Array:
        """Groups of branches, parted in any of these ways, side by side or one after the other."""
        some = max(1, _AT_ONCE // (self._wide * len(self._costs.counts) ** 2))
        parts = [self._joined_in(groups, splits[i : i + some]) for i in range(0, len(splits), some)]
        return reduce(np.minimum, parts)

    def _joined_in(self, groups: dict[int, Array], splits: list[tuple[int, int]]) -> Array:
        one = np.stack([groups[part] for split in splits for part in split], axis=2)
        other = np.stack([groups[part] for split in splits for part in reversed(split)], axis=2)
        joined: Array = _after(one, other).min(axis=2)
        if self._pairs:
            whole, home, away = np.array(self._pairs).T
            beside = np.maximum(one[..., home, :, :], other[:, :, :, AWAY:, away]).min(axis=2)
            starts = np.flatnonzero(np.diff(whole, prepend=-1))
            best = np.minimum.reduceat(beside, starts, axis=3)
            joined[:, :, :, whole[starts]] = np.minimum(joined[:, :, :, whole[starts]], best)
        return joined

    def _pairs_within(self) -> Iterator[tuple[int, int, int]]:
        """(budget, one part, other part): the ways to divide a budget that waste nothing of use, in order."""
        budgets = self._budgets.tolist()
        for whole, gpus in enumerate(budgets):
            best: dict[int, int] = {}
            for one, part in enumerate(budgets[:whole]):
                other = int(np.searchsorted(self._budgets, gpus - part, side="right")) - 1
                if other >= 0:
                    best[other] = one  # the largest that leaves as much
            yield from ((whole, one, other) for other, one in best.items())

    # -- from the tables back to the choices -----------------------------------------------------------

    def _place(self, link: Link, first: int, last: int, at: _At, rank: int, into: Placement) -> None:
        """Put the link's layers where the cost at `at` comes from, on ranks from `rank` on."""
        if isinstance(link, Edge):
            return
        if isinstance(link, LayerBlock):
            everything = (1 << len(link.branches)) - 1
            self._place_group(link, everything, first, last, at, rank, into)
            return
        table = self._table(link, first, last)
        best, chosen = inf, 0
        for count in np.flatnonzero(self._fits[at.budget]):
            costs_us = self._knot_at(link, first, last, at, int(count))
            if costs_us < best:
                best, chosen = costs_us, int(count)
        assert best <= table[at.key] + 1e-6
        into.update({layer: Spot(count=chosen, first=rank) for layer in link.layers})

    def _knot_at(self, knot: Knot, first: int, last: int, at: _At, count: int) -> float:
        costs, inside = self._costs, set(knot.layers)
        enter_us = leave_us = body_us = 0.0
        for layer in knot.layers:
            within = [before for before in costs.prev[layer] if before in inside]
            if len(within) < len(costs.prev[layer] or (SOURCE,)):
                edge_us = costs.edge_us(first, layer)[at.place, at.g, count]
                enter_us = max(enter_us, edge_us if at.entry == PAID or edge_us == inf else 0.0)
            lags = [costs.edge_us(before, layer)[HOME, count, count] for before in within]
            body_us += costs.time_us[layer, count] + max(lags, default=0.0)
        for before in self._read_by(last):
            if before in inside:
                edge_us = costs.edge_us(before, last)[at.place, count, at.h]
                leave_us = max(leave_us, edge_us if at.exit == PAID or edge_us == inf else 0.0)
        return float(enter_us + body_us + leave_us)

    def _place_group(
        self, block: LayerBlock, group: int, first: int, last: int, at: _At, rank: int, into: Placement
    ) -> None:
        groups = self._groups[id(block)]
        if group & (group - 1) == 0:
            self._place_branch(block.branches[group.bit_length() - 1], first, last, at, rank, into)
            return
        best, parts = inf, []
        for split in _splits(group, groups):
            for us, choice in self._choices(groups, split, at):
                if us < best - 1e-9:
                    best, parts = us, choice
        for part, inner, offset in parts:
            self._place_group(block, part, first, last, inner, rank + offset, into)

    def _choices(
        self, groups: dict[int, Array], split: tuple[int, int], at: _At
    ) -> Iterator[tuple[float, list[tuple[int, _At, int]]]]:
        """The ways to run two groups: the cost; for each its entry, and how many ranks further it begins."""
        one, other = split
        for budget, mine, yours in self._pairs:
            if budget != at.budget:
                continue
            for home, away, b_home, b_away in ((one, other, mine, yours), (other, one, yours, mine)):
                here = _At(at.entry, at.exit, at.place, b_home, at.g, at.h)
                there = _At(at.entry, at.exit, AWAY, b_away, at.g, at.h)
                us = max(groups[home][here.key], groups[away][there.key])
                yield us, [(home, here, 0), (away, there, int(self._budgets[b_home]))]
        for former, latter in ((one, other), (other, one)):
            us = _after(groups[former][_only(at)], groups[latter][_only(at)])[at.entry, at.exit]
            left = _At(at.entry, FREE, at.place, at.budget, at.g, at.h)
            right = _At(FREE, at.exit, at.place, at.budget, at.g, at.h)
            yield float(us), [(former, left, 0), (latter, right, 0)]

    def _place_branch(
        self, branch: Series, first: int, last: int, at: _At, rank: int, into: Placement
    ) -> None:
        ends, links, costs = (first, *branch.layers, last), branch.links, self._costs
        fits = self._fits[at.budget]

        def at_budget(table: Array) -> Array:
            step: Array = table[min(at.budget, len(table) - 1)]
            return step

        steps = [at_budget(self._table(links[0], ends[0], ends[1])[at.entry, PAID, at.place])]
        for i in range(1, len(links) - 1):
            steps.append(at_budget(self._table(links[i], ends[i], ends[i + 1])[PAID, PAID, HOME]))
        steps.append(at_budget(self._table(links[-1], ends[-2], ends[-1])[PAID, at.exit, at.place]))
        reached = [steps[0][at.g] + np.where(fits, costs.time_us[ends[1]], inf)]
        for i in range(1, len(links) - 1):
            own = np.where(fits, costs.time_us[ends[i + 1]], inf)
            reached.append((reached[-1][:, None] + steps[i]).min(axis=0) + own)
        chosen = [at.h]
        for i in range(len(links) - 1, 0, -1):
            chosen.append(int((reached[i - 1] + steps[i][:, chosen[-1]]).argmin()))
        chosen.append(at.g)
        chosen.reverse()
        for i, link in enumerate(links):
            outer = i in (0, len(links) - 1)
            entry, leaving = at.entry if i == 0 else PAID, at.exit if i == len(links) - 1 else PAID
            place = at.place if outer else HOME
            inner = _At(entry, leaving, place, at.budget, chosen[i], chosen[i + 1])
            self._place(link, ends[i], ends[i + 1], inner, rank, into)
            if i < len(links) - 1:
                into[ends[i + 1]] = Spot(count=chosen[i + 1], first=rank)


def _edge_table(edge_us: Array) -> Array:
    """The table of an edge, of its costs [place, counts, counts]: its one transfer is entry and exit."""
    table = np.broadcast_to(np.where(np.isinf(edge_us), inf, 0.0), (2, 2, *edge_us.shape)).copy()
    table[PAID, PAID] = edge_us
    return table[:, :, :, None]


def _after(a: Array, b: Array) -> Array:
    """Branches `b` after `a`, on the same GPUs; entry and exit are the first two axes."""
    joined = np.empty(a.shape)
    joined[PAID, PAID] = np.maximum(a[PAID, FREE] + b[FREE, PAID], np.maximum(a[PAID, PAID], b[PAID, PAID]))
    joined[PAID, FREE] = np.maximum(a[PAID, FREE] + b[FREE, FREE], b[PAID, FREE])
    joined[FREE, PAID] = np.maximum(a[FREE, FREE] + b[FREE, PAID], a[FREE, PAID])
    joined[FREE, FREE] = a[FREE, FREE] + b[FREE, FREE]
    return joined


def _only(at: _At) -> tuple[slice, slice, int, int, int, int]:
    return slice(None), slice(None), at.place, at.budget, at.g, at.h


def _groups(branches: int) -> Iterator[int]:
    """Sets of two or more branches, as bits, the parts of each before it."""
    if branches > _MAX_GROUPED_BRANCHES:
        yield from ((1 << upto) - 1 for upto in range(2, branches + 1))
        return
    yield from (group for group in range(1, 1 << branches) if group & (group - 1))


def _splits(group: int, groups: dict[int, npt.NDArray[np.float64]]) -> Iterator[tuple[int, int]]:
    """The ways to part a set of branches into two of which both are known, each way once."""
    for part in sorted(groups, reverse=True):
        if part & group == part and part > group ^ part and (group ^ part) in groups:
            yield part, group ^ part


def _parted(branches: int) -> int:
    """How many ways `_splits` finds for all sets of `_groups`."""
    if branches > _MAX_GROUPED_BRANCHES:
        return branches - 1
    return int((3**branches - 2 ** (branches + 1) + 1) // 2)
