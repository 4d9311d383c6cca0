"""Which packs each strategy chooses, and what a plan says of them."""

from dataclasses import replace

import pytest

from hpcsched.errors import ConfigError
from hpcsched.planning.packing.admission import PackLimits
from hpcsched.planning.packing.costs import PackCosts
from hpcsched.planning.packing.distance import DistanceAxis
from hpcsched.planning.packing.planner import NoPackPlan, plan
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.speeds import PackMember, Speeds
from hpcsched.planning.packing.strategies import STRATEGIES, by_batch, knn, measured, random_packs


def mlps(count, *, batches=(32,), step_s=lambda n: 0.006 + 0.004 * n, **more):
    costs = [
        PackCosts(
            model="mlp",
            batch=batch,
            separate_s=0.010,
            shared_s=0.005,
            points={n: step_s(n) for n in (1, 2, 4, 8)},
            memory_mib={1: 500, 2: 600},
        )
        for batch in batches
    ]
    members = tuple(
        PackMember(name=f"m{i}", model="mlp", batch=batches[i % len(batches)]) for i in range(count)
    )
    return PackProblem(members=members, speeds=Speeds(costs), **more)


def names(packs):
    return sorted(sorted(member.name for member in pack) for pack in packs)


# -- the paper's strategies ----------------------------------------------------------------------------


def test_packs_are_filled_until_the_memory_is():
    full = PackLimits(capacity_mib=1000, reserve=0.1)  # 500 MiB and 100 for each more: five in 900
    for strategy in (by_batch, random_packs, knn):
        assert sorted(map(len, strategy(mlps(12, limits=full)))) == [2, 5, 5]


def test_only_members_of_one_batch_size_share_a_pack():
    packs = by_batch(mlps(6, batches=(16, 32), limits=PackLimits(most=2)))
    assert names(packs) == [["m0", "m2"], ["m1", "m3"], ["m4"], ["m5"]]


def test_neighbours_within_the_threshold_share_a_pack_and_the_nearest_come_first():
    problem = mlps(5, axes=(DistanceAxis(name="x", kind="numeric", values=tuple(range(30))),), threshold=4.0)
    places = (0, 1, 3, 20, 22)
    spread = tuple(
        replace(member, config={"x": x}) for member, x in zip(problem.members, places, strict=True)
    )
    for seed in range(10):
        near = replace(problem, members=spread, seed=seed)
        assert names(knn(near)) == [["m0", "m1", "m2"], ["m3", "m4"]]
        assert names(knn(replace(near, threshold=0.5))) == [["m0"], ["m1"], ["m2"], ["m3"], ["m4"]]
        for pack in knn(replace(near, limits=PackLimits(most=2))):
            assert {m.name for m in pack} != {"m0", "m2"}


def test_another_seed_draws_other_packs():
    assert (
        len({str(names(random_packs(mlps(12, limits=PackLimits(most=3), seed=seed)))) for seed in range(9)})
        > 5
    )


def test_no_heuristic_packs_more_than_a_devices_share():
    for name in ("knn", "batch", "random"):
        packs = STRATEGIES[name](mlps(9, devices=4))
        assert max(map(len, packs)) <= 3
        assert all(len(pack) == 1 for pack in STRATEGIES[name](mlps(4, devices=4)))


# -- ours ----------------------------------------------------------------------------------------------


def test_identical_models_that_gain_are_stacked():
    assert [len(pack) for pack in measured(mlps(8))] == [8]


def test_nothing_is_packed_where_packing_loses():
    assert all(len(pack) == 1 for pack in measured(mlps(8, step_s=lambda n: 0.011 * n)))
    assert plan(mlps(8, step_s=lambda n: 0.011 * n)).strategy == "off"


def test_eight_are_stacked_where_two_would_lose():
    """As measured for stacks of small networks: two take longer than apart, eight less."""
    step_s = {1: 0.010, 2: 0.033, 4: 0.034, 8: 0.037}
    made = plan(mlps(9, step_s=step_s.get, limits=PackLimits(most=8)), "measured")
    assert sorted(len(pack.members) for pack in made.packs) == [1, 8]


def test_packs_are_spread_over_the_devices_and_not_piled_onto_one():
    made = plan(mlps(12, devices=3))
    assert sorted(len(pack.members) for pack in made.packs) == [4, 4, 4]
    assert {pack.device for pack in made.packs} == {0, 1, 2}


def test_a_long_training_has_a_device_for_itself_while_short_ones_share_the_other():
    problem = mlps(6, devices=2)
    long = replace(problem.members[0], steps=1_000_000)
    made = plan(replace(problem, members=(long, *problem.members[1:])), "measured")
    assert [m.name for pack in made.packs for m in pack.members if pack.device == 0] == ["m0"]
    assert made.time_s == pytest.approx(10_000)


def test_who_disturbs_whom_is_kept_apart():
    costs = [PackCosts(model=model, batch=8, separate_s=0.01, shared_s=0.006) for model in "ab"]
    problem = PackProblem(
        members=tuple(PackMember(name=f"{m}{i}", model=m, batch=8) for m in "ab" for i in range(3)),
        speeds=Speeds(costs, factors={(costs[0].key, costs[1].key): 3.0}),
    )
    assert names(measured(problem)) == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]


@pytest.mark.long
def test_thousands_of_identical_members_are_no_work():
    made = plan(mlps(3000, devices=8, limits=PackLimits(most=8)), "measured", compare=False)
    assert len(made.packs) == 375


# -- devices and answers -------------------------------------------------------------------------------


def test_a_plan_says_what_is_extrapolated_and_what_is_not_packed():
    made = plan(mlps(12))
    assert made.notes == (
        "mlp with batch 32: measured with at most 8 in a pack, the time of 12 is extrapolated",
    )
    unknown = PackCosts(model="cnn", batch=8, separate_s=0.1)
    problem = mlps(2, limits=PackLimits(capacity_mib=9999))
    speeds = Speeds([unknown, *problem.speeds.costs.values()])
    members = (*problem.members, PackMember(name="c", model="cnn", batch=8))
    made = plan(replace(problem, members=members, speeds=speeds))
    assert made.notes == ("cnn with batch 8: its memory was not measured, so it is not packed",)
    assert ["c"] in names(pack.members for pack in made.packs)


def test_a_member_that_fits_nowhere_is_named():
    with pytest.raises(NoPackPlan, match="member 'm0' fits on no device: 500 MiB, the device has 499"):
        plan(mlps(2, limits=PackLimits(capacity_mib=499)))


def test_unknown_strategies_are_refused():
    with pytest.raises(
        ConfigError, match="plan: strategy: 'best'; accepted: auto, off, run, measured, knn, batch"
    ):
        plan(mlps(2), "best")


def test_a_plan_of_nothing_is_empty():
    assert plan(mlps(0, devices=2)).packs == ()
