"""Packs of random problems: each member in one, within memory, and close to the best by trying everything."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.planning.packing.admission import PackLimits
from hpcsched.planning.packing.costs import PackCosts
from hpcsched.planning.packing.planner import NoPackPlan, plan
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.search import dealt, makespan_s
from hpcsched.planning.packing.speeds import PackMember, Speeds
from hpcsched.planning.packing.strategies import STRATEGIES

MODES = ("loop", "stacked", "late", "loses", "noise")


def random_costs(rng, model, batch):
    """One of several shapes of curves: some gain at once, some from four on, some never."""
    separate_s = batch * rng.uniform(0.5, 2) / 1000
    shared_s = separate_s * rng.choice([0, 0.1, 0.3, 0.6])
    own_s = separate_s - shared_s
    step_s = {
        "loop": lambda n: shared_s + n * own_s,
        "stacked": lambda n: shared_s + own_s * n ** rng.uniform(0.3, 0.9),
        "late": lambda n: separate_s * (1, 2.5, 3.0, 3.0, 3.2, 3.3, 3.4)[n - 1],
        "loses": lambda n: separate_s * n * 1.1,
        "noise": lambda n: separate_s * rng.uniform(0.9, 1.1) * n**0.8,
    }[rng.choice(MODES)]
    counts = rng.choice([(1, 2, 4), (1, 2, 3, 4, 5, 6, 7), (2, 7), (1,), ()])
    points = {n: step_s(n) for n in counts}
    memory = rng.choice([{}, {1: rng.uniform(50, 400)}, {1: 150.0, 2: rng.uniform(180, 300)}])
    return PackCosts(
        model=model,
        batch=batch,
        separate_s=separate_s,
        shared_s=min([shared_s, *points.values()]),
        points=points,
        memory_mib=memory,
        switch_s=rng.choice([0, 0, 0.001 * separate_s, separate_s]),
    )


def random_problem(rng, members, devices):
    kinds = [(model, batch) for model in "ab" for batch in (8, 16, 50)][: rng.randint(1, 6)]
    costs = [random_costs(rng, *kind) for kind in kinds]
    factors = {
        (one.key, other.key): rng.uniform(0.8, 1.5)
        for one, other in itertools.combinations(costs, 2)
        if rng.random() < 0.3
    }
    steps = rng.choice([(None,), (None,), (10, 20), (5, 10, 40, None)])
    chosen = [rng.choice(kinds) for _ in range(members)]
    return PackProblem(
        members=tuple(
            PackMember(name=f"m{i}", model=model, batch=batch, steps=rng.choice(steps), config={"lr": i % 3})
            for i, (model, batch) in enumerate(chosen)
        ),
        speeds=Speeds(costs, factors=factors, epoch=rng.choice([200, 1000])),
        limits=PackLimits(
            capacity_mib=rng.choice([None, 500, 900]), most=rng.choice([2, 3, 16]), reserve=0.1
        ),
        devices=devices,
        seed=rng.randint(0, 99),
    )


def partitions(items):
    """Every way to put the items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [(first,), *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], (first, *group), *groups[i + 1 :]]


def fastest_s(problem):
    """The least time that any packs on any devices take."""
    speeds, limits = problem.speeds, problem.limits
    times = {}

    def time_s(pack):
        if pack not in times:
            groups = Counter(problem.members[i].key for i in pack)
            refused = len(pack) > 1 and limits.refusal(groups, speeds)
            members = [problem.members[i] for i in pack]
            times[pack] = inf if refused else speeds.time_s(speeds.shape(members))
        return times[pack]

    best = inf
    for groups in partitions(list(range(len(problem.members)))):
        each_s = sorted(map(time_s, groups), reverse=True)
        if sum(each_s) < inf:
            best = min(best, _least_makespan(each_s, [0.0] * problem.devices, best))
    return best


def _least_makespan(times_s, loads, best):
    if max(loads) >= best:
        return best
    if not times_s:
        return max(loads)
    for load in set(loads):
        place = loads.index(load)
        best = min(
            best,
            _least_makespan(times_s[1:], [x + times_s[0] * (i == place) for i, x in enumerate(loads)], best),
        )
    return best


WORST = 1.12
"""Of 6,000 random problems with up to six members, 3 take more than 1.5 % longer than the best packs there
are; the worst takes 1.106 times as long."""

problems = st.builds(
    lambda seed, members, devices: random_problem(random.Random(seed), members, devices),
    st.integers(0, 2**20),
    st.integers(1, 24),
    st.integers(1, 5),
)


# -- what all promise ----------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(problem=problems)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_member_is_in_one_pack_and_every_pack_fits(name, problem):
    packs = STRATEGIES[name](problem)
    assert sorted(m.name for pack in packs for m in pack) == sorted(m.name for m in problem.members)
    for pack in packs:
        groups = {m.key: sum(x.key == m.key for x in pack) for m in pack}
        if name == "run":  # it tries what was not measured, and fewer at a time
            known = (problem.speeds.peak_mib(key, n) or 0.0 for key, n in groups.items())
            limit = (problem.limits.capacity_mib or inf) * (1 - problem.limits.reserve)
            assert len(pack) == 1 or (len(pack) <= problem.limits.most and sum(known) <= limit)
        else:
            assert len(pack) == 1 or not problem.limits.refusal(groups, problem.speeds)
    if name in ("batch", "off"):
        assert all(len({m.batch for m in pack}) == 1 for pack in packs)
    if len(problem.members) <= problem.devices:
        assert all(len(pack) == 1 for pack in packs)
    assert packs == STRATEGIES[name](replace(problem, speeds=fresh(problem.speeds)))


def fresh(speeds):
    return Speeds(speeds.costs.values(), factors=speeds.factors, epoch=speeds.epoch)


@settings(max_examples=examples(100))
@given(problem=problems)
def test_the_measured_strategy_is_never_slower_than_one_by_one_and_no_pack_of_it_gains_nothing(problem):
    try:
        made = plan(problem, "measured")
    except NoPackPlan:
        return
    assert made.time_s <= made.separate_s * (1 + 1e-9)
    assert all(pack.gain > 0 for pack in made.packs if len(pack.members) > 1)
    busy_s = [sum(p.time_s for p in made.packs if p.device == d) for d in range(problem.devices)]
    assert max(busy_s) == pytest.approx(made.time_s)


@settings(max_examples=examples(40))
@given(problem=problems)
def test_auto_is_the_best_predicted_of_all(problem):
    try:
        made = plan(problem)
    except NoPackPlan:
        return
    assert set(made.strategies) == set(STRATEGIES)
    others = {name: time_s for name, time_s in made.strategies.items() if name != "run"}
    assert made.time_s == min(others.values()) == made.strategies[made.strategy]
    alone = plan(problem, made.strategy, compare=False)
    assert alone.packs == made.packs
    assert set(alone.strategies) == {"off", made.strategy}


@pytest.mark.long
def test_the_measured_strategy_is_close_to_the_best_of_all_packs_on_all_devices():
    ratios = []
    for seed in range(300):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randint(2, 6), rng.choice([1, 1, 2, 3]))
        try:
            made = plan(problem, "measured", compare=False)
        except NoPackPlan:
            continue
        best_s = fastest_s(problem)
        assert made.time_s >= best_s * (1 - 1e-9)
        ratios.append(made.time_s / best_s)
    assert max(ratios) <= WORST
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.97 * len(ratios)


def test_few_packs_are_dealt_in_the_best_way_and_many_the_longest_first():
    assert makespan_s([3, 3, 2, 2, 2], 2) == 6  # the longest first would take 7
    assert makespan_s([5, 4], 8) == 5
    assert sorted(dealt([1.0] * 40, 4)) == sorted([0, 1, 2, 3] * 10)
    rng = random.Random(1)
    for _ in range(200):
        times_s = [rng.randint(1, 20) for _ in range(rng.randint(1, 7))]
        devices = rng.randint(1, 4)
        best_s = _least_makespan(sorted(times_s, reverse=True), [0.0] * devices, float("inf"))
        assert makespan_s(times_s, devices) == best_s


def test_more_packs_are_exchanged_until_no_single_exchange_helps():
    rng = random.Random(2)
    over = []
    for _ in range(100):
        times_s = [rng.random() for _ in range(rng.randint(13, 40))]
        devices = rng.randint(2, 5)
        busy_s = [0.0] * devices
        for time_s in sorted(times_s, reverse=True):
            busy_s[busy_s.index(min(busy_s))] += time_s
        found_s = makespan_s(times_s, devices)
        assert found_s <= max(busy_s) * (1 + 1e-9)
        over.append(found_s / max(sum(times_s) / devices, max(times_s)))
    assert sum(over) / len(over) < 1.01
