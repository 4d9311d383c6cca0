"""Small burst problems at random, and the best answer to them by trying everything."""

import itertools
from math import inf

from hpcsched.planning.burst.costs import Spot

CHAINS = {"chain of 3": [[], [0], [1]], "chain of 5": [[], [0], [1], [2], [3]]}
BLOCKS = {
    "two branches": [[], [0], [0], [1, 2]],
    "three branches": [[], [0], [0], [0], [1, 2, 3]],
    "residual": [[], [0], [1], [0, 2]],
    "nested in a residual": [[], [0], [0], [1, 2], [0, 3]],
    "nested later": [[], [0], [1], [1], [2, 3], [0, 4]],
    "two inputs": [[], [], [0, 1]],
    "two results": [[], [0], [0]],
}
UNEVEN = [[], [0], [1], [0], [2, 3]]
KNOT = [[], [0], [0], [1, 2], [1, 2], [3, 4]]


def random_problem(rng, prev):
    """A table for `plan burst`."""
    gpus = rng.choice([2, 3, 4])
    counts = [1, 2, 4] if gpus == 4 and rng.random() < 0.7 else list(range(1, gpus + 1))
    layers, transfers = [], []
    for i, earlier in enumerate(prev):
        work = rng.randint(10, 1000)
        time_us = {str(c): round(work / c ** rng.random() + rng.randint(0, 20), 1) for c in counts}
        sync_us = {str(c): 0 if c == 1 else rng.randint(0, 60) for c in counts}
        layers.append({"id": i, "name": f"l{i}", "prev": earlier, "time_us": time_us, "sync_us": sync_us})
        for before in earlier:
            if rng.random() < 0.9:
                most = rng.choice([5, 40, 200])
                lags = {
                    str(a): {str(b): 0 if a == b else rng.randint(0, most) for b in counts} for a in counts
                }
                transfers.append({"from": before, "to": i, "time_us": lags})
    limit = rng.choice([None, 1.2, 1.5, 2.0, 3.0])
    return {
        "schema": 1,
        "model": "m",
        "gpus": gpus,
        "global_batch": 32,
        "amplification_limit": limit,
        "layers": layers,
        "transfers": transfers,
    }


def fastest(problem):
    """The shortest step by any counts within the limit, any order, and any GPUs (microseconds)."""
    costs, best = problem.costs, inf
    layers = range(costs.sink)
    orders = list(_orders(costs.prev, ()))
    for counts in itertools.product(range(len(costs.counts)), repeat=costs.sink):
        spots = [Spot(count=count, first=0) for count in counts]
        lags = {(i, j): costs.lag_us(i, spots[i], j, spots[j]) for j in layers for i in costs.prev[j]}
        incoming = [max((lags[i, j] for i in costs.prev[j]), default=0.0) for j in layers]
        if all(
            costs.counts[counts[j]] == 1
            or costs.amplification(j, counts[j], incoming[j]) <= costs.limit * (1 + 1e-9)
            for j in layers
        ):
            best = min(best, *(_makespan(costs, counts, lags, order, problem.gpus) for order in orders))
    return best


def _makespan(costs, counts, lags, order, gpus):
    free, end = [0.0] * gpus, {}
    for layer in order:
        free.sort()
        count = int(costs.counts[counts[layer]])
        ready = max((end[i] + lags[i, layer] for i in costs.prev[layer]), default=0.0)
        begin = max(ready, free[count - 1])
        end[layer] = begin + float(costs.time_us[layer, counts[layer]])
        # Those that have been free the shortest, so that the others are there for who can begin earlier.
        chosen = [gpu for gpu in range(gpus) if free[gpu] <= begin][-count:]
        for gpu in chosen:
            free[gpu] = end[layer]
    return max(end.values())


def _orders(prev, done):
    if len(done) == len(prev):
        yield done
    for layer, earlier in enumerate(prev):
        if layer not in done and all(before in done for before in earlier):
            yield from _orders(prev, (*done, layer))


def check(problem, plan):
    """The plan is one: no GPU does two things at once, everything waits for its inputs, the limit holds."""
    costs = problem.costs
    number = {int(count): i for i, count in enumerate(costs.counts)}
    spots = {x.id: Spot(count=number[len(x.ranks)], first=x.ranks[0]) for x in plan.layers}
    end = {x.id: x.end_us for x in plan.layers}
    assert sorted(spots) == list(range(costs.sink))
    for x in plan.layers:
        assert x.ranks == tuple(range(x.ranks[0], x.ranks[0] + len(x.ranks)))
        assert x.ranks[-1] < problem.gpus
        assert abs(x.end_us - x.start_us - costs.time_us[x.id, spots[x.id].count]) < 1e-6
        lag = max((costs.lag_us(i, spots[i], x.id, spots[x.id]) for i in costs.prev[x.id]), default=0.0)
        assert len(x.ranks) == 1 or x.amplification <= costs.limit * (1 + 1e-6)
        assert abs(x.amplification - costs.amplification(x.id, spots[x.id].count, lag)) < 1e-9
        for i in costs.prev[x.id]:
            assert x.start_us >= end[i] + costs.lag_us(i, spots[i], x.id, spots[x.id]) - 1e-6
    for a, b in itertools.combinations(plan.layers, 2):
        if set(a.ranks) & set(b.ranks):
            assert a.end_us <= b.start_us + 1e-6 or b.end_us <= a.start_us + 1e-6
    assert abs(plan.iter_us - max(end.values())) < 1e-6
