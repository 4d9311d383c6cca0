"""The timeline of a step: the times at which layers run, and small changes that make a placement faster."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from hpcsched.compat import dataclass
from hpcsched.planning.burst.costs import BurstCosts, Spot
from hpcsched.planning.burst.search import Placement

_MAX_CHANGES_A_ROUND = 600
"""Changes tried in a round of `refined`, at most (chosen): small graphs only, as each costs a timeline."""
_MAX_ROUNDS = 8
"""Rounds of `refined`, at most (chosen)."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Begin, end and largest incoming transfer of each layer, microseconds, in the order of the placement."""

    placement: Placement
    begin_us: dict[int, float]
    end_us: dict[int, float]
    lag_us: dict[int, float]

    @property
    def iter_us(self) -> float:
        """The end of the last layer."""
        return max(self.end_us.values())


def timeline(costs: BurstCosts, gpus: int, placement: Placement) -> StepTimeline:
    """Each layer in its turn, once its inputs are there and its GPUs are free."""
    free_us = np.zeros(gpus)
    begin_us: dict[int, float] = {}
    end_us: dict[int, float] = {}
    lag_us: dict[int, float] = {}
    for layer, spot in placement.items():
        ranks = slice(spot.first, spot.first + int(costs.counts[spot.count]))
        begin = float(free_us[ranks].max())
        longest = 0.0
        for before in costs.prev[layer]:
            lag = costs.lag_us(before, placement[before], layer, spot)
            longest, begin = max(longest, lag), max(begin, end_us[before] + lag)
        begin_us[layer], lag_us[layer] = begin, longest
        end_us[layer] = free_us[ranks] = begin + float(costs.time_us[layer, spot.count])
    return StepTimeline(placement, begin_us, end_us, lag_us)


def within_limit(costs: BurstCosts, line: StepTimeline) -> bool:
    """Whether no layer's amplification is beyond the limit."""
    limit = costs.limit * (1 + 1e-9)
    return limit == inf or all(
        costs.counts[spot.count] == 1 or costs.amplification(layer, spot.count, line.lag_us[layer]) <= limit
        for layer, spot in line.placement.items()
    )


def refined(costs: BurstCosts, gpus: int, line: StepTimeline) -> StepTimeline:
    """The same or a faster one: layer by layer on other GPUs or at another turn, while that helps.

    The search plans the branches of a block as a whole and the layers of a knot alike; in small graphs
    single layers can make up for it.
    """
    spots = sum(gpus - int(count) + 1 for count in costs.counts)
    if len(costs.prev) * (spots + len(costs.prev)) > _MAX_CHANGES_A_ROUND:
        return line
    for _ in range(_MAX_ROUNDS):
        before_us = line.iter_us
        for layer in list(line.placement):
            for placement in _changes(costs, gpus, line.placement, layer):
                other = timeline(costs, gpus, placement)
                if other.iter_us < line.iter_us - 1e-9 and within_limit(costs, other):
                    line = other
        if line.iter_us == before_us:
            break
    return line


def _changes(costs: BurstCosts, gpus: int, placement: Placement, layer: int) -> Iterator[Placement]:
    """What becomes of a placement if a layer goes elsewhere, or comes at another turn."""
    for count in np.flatnonzero(np.isfinite(costs.time_us[layer])).tolist():
        for first in range(gpus - int(costs.counts[count]) + 1):
            yield {**placement, layer: Spot(count=count, first=first)}
    order = [other for other in placement if other != layer]
    low = max((order.index(before) + 1 for before in costs.prev[layer]), default=0)
    after = (i for i, other in enumerate(order) if layer in costs.prev[other])
    for turn in range(low, next(after, len(order)) + 1):
        turns = [*order[:turn], layer, *order[turn:]]
        yield {other: placement[other] for other in turns}
