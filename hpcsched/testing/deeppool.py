"""Our own rewrite of the search for burst plans of DeepPool's paper (section 4.2), to measure ours against.

Written from the text of the paper, not the authors' program, which is several times slower: Algorithm 1 on
chains, graph reduction in blocks, GPU counts that are powers of two. As there, branches that run side by
side are not checked against the number of GPUs that there are, and which choices the limit allows depends
on the order in which they are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from hpcsched.planning.burst.costs import HOME, BurstCosts
from hpcsched.planning.burst.structure import SOURCE, Edge, Knot, LayerBlock, Link, Series, structure

Times = Mapping[int, float]


class RewrittenSearch:
    """Algorithm 1 and graph reduction.

    Args:
        costs: what choices cost, made without a limit.
        limit: on each layer's amplification.
    """

    def __init__(self, costs: BurstCosts, limit: float = inf) -> None:
        self._costs, self._limit = costs, limit
        numbers = costs.counts.tolist()
        self._choices = [i for i, count in enumerate(numbers) if count & (count - 1) == 0]
        self._numbers = numbers
        self._edges: dict[tuple[int, int], list[list[float]]] = {}

    def time_us(self) -> float:
        """The shortest time of a step that it finds."""
        series = structure(self._costs.prev)
        ends = self._chain(series, SOURCE, self._costs.sink, dict.fromkeys(self._choices, 0.0))
        return min(ends.values())

    def _chain(self, series: Series, first: int, last: int, begin: Times) -> dict[int, float]:
        """Algorithm 1: the shortest time until `last` can begin, by its count; from the times of `first`."""
        layers = (first, *series.layers, last)
        shortest = dict(begin)
        spent = dict.fromkeys(self._choices, 0.0)
        for i, link in enumerate(series.links):
            before, layer = layers[i], layers[i + 1]
            new_shortest, new_spent = {}, {}
            lags = self._lags(link, before, layer)
            for g in self._choices:
                best_amp = best_s = best_t = inf
                for h in self._choices:
                    amp = self._amplification(before, h, spent[h])
                    total = shortest[h] + lags[h][g]
                    if amp <= max(best_amp, self._limit) and total <= best_s:
                        best_s, best_t, best_amp = total, lags[h][g], min(best_amp, amp)
                own = float(self._costs.time_us[layer, g])
                new_shortest[g], new_spent[g] = best_s + own, best_t + own
            shortest, spent = new_shortest, new_spent
        return shortest

    def _lags(self, link: Link, before: int, layer: int) -> dict[int, dict[int, float]]:
        """The time to go over from one layer to the next, whatever lies between (section 4.2)."""
        if isinstance(link, Edge):
            table = self._edge(before, layer)
            return {h: {g: table[h][g] for g in self._choices} for h in self._choices}
        assert not isinstance(link, Knot), "the paper knows no such graphs"
        return {h: self._block(link, before, layer, h) for h in self._choices}

    def _block(self, block: LayerBlock, before: int, layer: int, h: int) -> dict[int, float]:
        """Linear searches on all branches, with the branching layer on one count; the longest counts."""
        begin = {g: 0.0 if g == h else inf for g in self._choices}
        ends = []
        for branch in block.branches:
            found = self._chain(branch, before, layer, begin)
            ends.append({g: us - float(self._costs.time_us[layer, g]) for g, us in found.items()})
        if block.skip:
            ends.append({g: self._edge(before, layer)[h][g] for g in self._choices})
        return {g: max(end[g] for end in ends) for g in self._choices}

    def _edge(self, before: int, layer: int) -> list[list[float]]:
        if (before, layer) not in self._edges:
            self._edges[before, layer] = self._costs.edge_us(before, layer)[HOME].tolist()
        return self._edges[before, layer]

    def _amplification(self, layer: int, count: int, spent_us: float) -> float:
        if layer == SOURCE:
            return 0.0
        base_us = float(self._costs.base_us[layer])
        return spent_us * self._numbers[count] / base_us if base_us else inf
