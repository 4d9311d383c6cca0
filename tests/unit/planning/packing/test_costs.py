"""What is measured of packs, and the speed that is predicted from it."""

import json
from math import nan

import pytest

from hpcsched.errors import ConfigError
from hpcsched.planning.packing.admission import PackLimits, peak_mib
from hpcsched.planning.packing.costs import ModelBatch, PackCosts
from hpcsched.planning.packing.distance import DistanceAxis, apart, axes_of, places
from hpcsched.planning.packing.speeds import PackMember, Speeds


def costs(model="mlp", batch=32, **more):
    return PackCosts(**{"model": model, "batch": batch, "separate_s": 0.010, "shared_s": 0.004, **more})


def members(*keys, **more):
    return tuple(
        PackMember(name=f"m{i}", model=model, batch=batch, **more) for i, (model, batch) in enumerate(keys)
    )


# -- one model -----------------------------------------------------------------------------------------


def test_steps_lie_on_lines_between_what_was_measured_and_go_on_along_the_last():
    found = costs(points={2: 0.016, 4: 0.020})
    assert [found.step_s(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([0.010, 0.016, 0.018, 0.020, 0.024])


def test_a_model_never_measured_packed_saves_what_is_shared():
    assert costs().step_s(3) == pytest.approx(0.004 + 3 * 0.006)
    assert costs(points={1: 0.011}).step_s(2) == pytest.approx(0.004 + 2 * 0.007)


def test_more_models_never_take_less_time_whatever_noise_says():
    noisy = costs(points={1: 0.012, 2: 0.011, 4: 0.030, 8: 0.029})
    taken = [noisy.step_s(n) for n in range(1, 20)]
    assert taken == sorted(taken)
    assert noisy.step_s(2) == 0.012


def test_memory_grows_by_what_each_model_takes():
    assert costs().peak_mib(2) is None
    assert [costs(memory_mib={1: 500, 3: 700}).peak_mib(n) for n in (1, 2, 5)] == [500, 600, 900]
    assert [costs(memory_mib={2: 600}).peak_mib(n) for n in (1, 2, 4)] == [600, 600, 1200]


def test_raw_measurements_become_medians_the_best_mode_and_what_is_shared():
    made = PackCosts.fit(
        model="mlp",
        batch=32,
        separate_s=[0.011, 0.010, 0.010],
        packed_s={
            "loop": {2: [0.016, 0.016, 0.9], 4: [0.028]},
            "stack": {2: [0.020], 4: [0.018], 8: [0.022]},
        },
        memory_mib={1: [400, 420], 2: [500]},
        switch_s=[0.02, 0.05, 0.03],
        stackable=True,
    )
    assert made.points == {2: 0.016, 4: 0.018, 8: 0.022}
    assert made.shared_s == pytest.approx((0.004 + 0.012) / 4)  # of the loop: 2 and 4 models
    assert (made.separate_s, made.switch_s, made.memory_mib) == (0.010, 0.03, {1: 420, 2: 500})
    given = PackCosts.fit(model="m", batch=1, separate_s=[0.01], packed_s={}, input_s=[0.003, 0.5, 0.003])
    assert given.shared_s == 0.003
    with pytest.raises(ValueError, match="no step of m"):
        PackCosts.fit(model="m", batch=1, separate_s=[], packed_s={})


def test_what_is_shared_is_part_of_every_step():
    gains = PackCosts.fit(model="m", batch=1, separate_s=[0.010], packed_s={"loop": {2: [0.004]}})
    loses = PackCosts.fit(model="m", batch=1, separate_s=[0.010], packed_s={"loop": {2: [0.030]}})
    assert (gains.shared_s, loses.shared_s) == (0.004, 0.0)


def test_costs_come_back_from_their_json_as_they_were():
    made = costs(points={2: 0.016}, memory_mib={1: 500.0}, switch_s=0.1, stackable=True, device="P5000")
    assert PackCosts.parse(json.loads(json.dumps(made.to_table())), where="f") == made


def test_memory_may_be_given_as_a_base_and_what_each_takes():
    row = {**costs().to_table(), "memory_mib": {"base": 400, "each": 100}}
    assert [PackCosts.parse(row, where="f").peak_mib(n) for n in (1, 2, 7)] == [500, 600, 1100]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", 5, "f: costs.model: 5; accepted: text"),
        ("batch", 0, "f: costs.batch: 0; accepted: a positive whole number"),
        ("batch", True, "f: costs.batch: True"),
        ("separate_s", None, "f: costs ('mlp', batch 32).separate_s: missing; accepted: seconds, above 0"),
        ("separate_s", nan, "f: costs ('mlp', batch 32).separate_s: nan"),
        ("separate_s", 10**400, "f: costs ('mlp', batch 32).separate_s: 1000"),
        ("shared_s", 0.02, "f: costs ('mlp', batch 32).shared_s: 0.02; accepted: at most what the shortest"),
        ("points", {"two": 1}, "f: costs ('mlp', batch 32).points: 'two'; accepted: positive whole numbers"),
        ("points", {"2": -1}, "f: costs ('mlp', batch 32).points.2: -1; accepted: seconds, above 0"),
        ("points", [1], "f: costs ('mlp', batch 32).points: [1]; accepted: a table of seconds"),
        ("memory_mib", {"base": 1}, "f: costs ('mlp', batch 32).memory_mib.each: missing"),
        ("stackable", 1, "f: costs ('mlp', batch 32).stackable: 1; accepted: true or false"),
        ("speed", 1, "f: costs: unknown key 'speed'; accepted: the keys model, batch,"),
    ],
)
def test_wrong_costs_are_refused_by_file_model_and_key(key, value, words):
    with pytest.raises(ConfigError) as refused:
        PackCosts.parse({**costs().to_table(), key: value}, where="f")
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


# -- a pack --------------------------------------------------------------------------------------------

MLP = costs(points={2: 0.016})
WIDE = costs(batch=64, separate_s=0.015, shared_s=0.006)
CNN = costs("cnn", 64, separate_s=0.050, shared_s=0.005)


def test_identical_members_take_what_was_measured_for_so_many():
    speeds = Speeds([MLP], epoch=3200)
    shape = speeds.shape(members(("mlp", 32), ("mlp", 32)))
    assert speeds.time_s(shape) == pytest.approx(3200 / 32 * 0.016)
    assert speeds.separate_s(shape) == pytest.approx(3200 / 32 * 0.020)


def test_members_with_different_batches_share_one_stream_and_end_their_epoch_together():
    speeds = Speeds([MLP, WIDE, CNN], epoch=6400)
    shape = speeds.shape(members(("mlp", 32), ("mlp", 32), ("mlp", 64), ("cnn", 64)))
    shared_s = max(0.004 / 32, 0.006 / 64, 0.005 / 64)
    own_s = (0.016 - 0.004) / 32 + (0.015 - 0.006) / 64 + (0.050 - 0.005) / 64
    assert speeds.time_s(shape) == pytest.approx(6400 * (shared_s + own_s))


def test_a_member_alone_takes_what_it_takes_with_its_own_pipeline():
    speeds = Speeds([costs(points={1: 0.007})], epoch=320)
    assert speeds.time_s(speeds.shape(members(("mlp", 32)))) == pytest.approx(10 * 0.010)


def test_measured_factors_of_pairs_multiply():
    factors = {(CNN.key, MLP.key): 1.5, (WIDE.key, MLP.key): 0.9}  # in any order
    plain, disturbed = Speeds([MLP, WIDE, CNN]), Speeds([MLP, WIDE, CNN], factors=factors)
    pair = {MLP.key: 1, CNN.key: 1}
    assert disturbed.pace_s(pair) == pytest.approx(1.5 * plain.pace_s(pair))
    three = {**pair, WIDE.key: 2}
    assert disturbed.pace_s(three) == pytest.approx(1.5 * 0.9 * plain.pace_s(three))


def test_who_is_done_leaves_and_each_pays_for_joining_and_leaving():
    speeds = Speeds([costs(points={2: 0.016, 3: 0.020}, switch_s=0.5)])
    pack = [*members(("mlp", 32), steps=10), *members(("mlp", 32), ("mlp", 32), steps=30)]
    assert speeds.time_s(speeds.shape(pack)) == pytest.approx(10 * 0.020 + 20 * 0.016 + 3 * 0.5 + 0.5)
    two = [*members(("mlp", 32), steps=10), *members(("mlp", 32), steps=30)]
    assert speeds.time_s(speeds.shape(two)) == pytest.approx(10 * 0.016 + 20 * 0.010 + 2 * 0.5 + 0.5)


def test_a_member_of_which_nothing_was_measured_is_named():
    with pytest.raises(ConfigError, match="member 'm0': no costs of cnn with batch 8; accepted: mlp with ba"):
        Speeds([MLP]).shape(members(("cnn", 8)))
    with pytest.raises(ConfigError, match="costs: 'mlp' with batch 32 a second time"):
        Speeds([MLP, MLP])


# -- memory --------------------------------------------------------------------------------------------

SMALL = costs(memory_mib={1: 500, 2: 600})
LARGE = costs("cnn", memory_mib={1: 5000, 2: 9600})
UNKNOWN = costs("rnn")
KNOWN = Speeds([SMALL, LARGE, UNKNOWN])


def test_packs_fit_by_the_sum_of_their_peaks_less_a_reserve():
    three = {SMALL.key: 2, LARGE.key: 1}
    assert peak_mib(three, KNOWN) == 5600
    assert PackLimits(capacity_mib=6223).refusal(three, KNOWN) == ""
    assert PackLimits(capacity_mib=6222).refusal(three, KNOWN) == (
        "5600 MiB, the device has 6222, of which 10% stay free"
    )
    assert PackLimits(capacity_mib=5600, reserve=0.0).refusal(three, KNOWN) == ""


def test_a_training_alone_may_have_all_of_the_memory():
    assert PackLimits(capacity_mib=5000).refusal({LARGE.key: 1}, KNOWN) == ""
    assert PackLimits(capacity_mib=4999).refusal({LARGE.key: 1}, KNOWN) == "5000 MiB, the device has 4999"


def test_where_memory_was_not_measured_a_training_stays_alone():
    limits = PackLimits(capacity_mib=16000)
    assert limits.refusal({UNKNOWN.key: 1}, KNOWN) == ""
    why = "the memory of rnn with batch 32 was not measured"
    assert limits.refusal({UNKNOWN.key: 1, SMALL.key: 1}, KNOWN) == why
    assert PackLimits().refusal({UNKNOWN.key: 2, SMALL.key: 1}, KNOWN) == ""
    assert peak_mib({UNKNOWN.key: 1, SMALL.key: 1}, KNOWN) is None


def test_without_a_memory_limit_only_so_many_share_a_device():
    assert PackLimits(most=4).refusal({SMALL.key: 4}, KNOWN) == ""
    assert PackLimits(most=4).refusal({SMALL.key: 3, LARGE.key: 2}, KNOWN) == (
        "5 members, at most 4 may share a device"
    )
    assert PackLimits().refusal({SMALL.key: 17}, KNOWN)


# -- distances -----------------------------------------------------------------------------------------

TABLE_3 = (
    DistanceAxis(name="batch", kind="numeric", values=tuple(range(20, 71, 5))),
    DistanceAxis(name="optimizer"),
    DistanceAxis(name="lr", kind="numeric", values=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)),
    DistanceAxis(name="activation"),
)


def config(batch=20, **keys):
    keys = {"optimizer": "SGD", "lr": 0.01, "activation": "ReLu", **keys}
    return PackMember(name="m", model="mlp", batch=batch, config=keys)


def distance(one, other, axes):
    return apart(places(one, axes), places(other, axes))


def test_the_papers_example_is_5_apart():
    assert distance(config(), config(40, optimizer="Adagrad"), TABLE_3) == 5
    assert distance(config(), config(lr=1e-4, activation="Tanh"), TABLE_3) == 3
    assert distance(config(), config(), TABLE_3) == 0


def test_continuous_axes_are_measured_in_tenths_of_their_range():
    plain = DistanceAxis(name="lr", kind="numeric", low=0.0, high=1.0)
    logarithmic = DistanceAxis(name="lr", kind="numeric", log=True, low=1e-4, high=1.0)
    assert distance(config(lr=0.2), config(lr=0.5), [plain]) == pytest.approx(3)
    assert distance(config(lr=1e-3), config(lr=1e-2), [logarithmic]) == pytest.approx(2.5)


def test_who_lacks_a_hyper_parameter_is_one_away_from_who_has_it():
    axes = [DistanceAxis(name="momentum", kind="numeric", low=0.0, high=1.0)]
    assert distance(config(), config(momentum=0.9), axes) == 1
    assert distance(config(), config(), axes) == 0


def test_axes_are_those_of_the_members_if_none_are_given():
    axes = axes_of([config(20), config(40), config(30, lr=0.1, width=64)])
    kinds = {axis.name: (axis.kind, axis.values) for axis in axes}
    assert kinds["batch"] == ("numeric", (20, 30, 40))
    assert kinds["lr"] == ("numeric", (0.01, 0.1))
    assert kinds["optimizer"] == kinds["model"] == ("categorical", None)
    assert distance(config(20), config(40), axes) == 2


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ({}, "f: axis.name: missing"),
        ({"name": "lr", "kind": "ordinal"}, "f: axis.kind: 'ordinal'; accepted: categorical or numeric"),
        ({"name": "lr", "kind": "numeric"}, "f: axis: low None and high None; accepted: values, or two num"),
        ({"name": "lr", "kind": "numeric", "low": 1, "high": 1}, "f: axis: low 1 and high 1"),
        ({"name": "lr", "kind": "numeric", "low": nan, "high": 1}, "f: axis: low nan and high 1"),
        ({"name": "lr", "kind": "numeric", "values": [2, 1]}, "f: axis.values: [2, 1]; accepted: different"),
        ({"name": "lr", "kind": "numeric", "values": [1, "2"]}, "f: axis.values: [1, '2']"),
        (
            {"name": "lr", "kind": "numeric", "low": 0, "high": 1, "log": True},
            "f: axis.low: 0; accepted: a n",
        ),
        ({"name": "lr", "scale": 1}, "f: axis: unknown key 'scale'"),
    ],
)
def test_wrong_axes_are_refused(axis, words):
    with pytest.raises(ConfigError) as refused:
        DistanceAxis.parse(axis, where="f")
    assert str(refused.value).startswith(words)


def test_a_value_outside_of_its_axis_is_refused_with_the_members_name():
    with pytest.raises(ConfigError, match=r"member 'm': config.lr: 0.5; accepted: one of 1e-06, .*0.1"):
        distance(config(lr=0.5), config(), TABLE_3)
    with pytest.raises(ConfigError, match=r"config.lr: 'high'; accepted: a number"):
        distance(config(lr="high"), config(), TABLE_3)
    axes = [DistanceAxis(name="lr", kind="numeric", low=0.0, high=1.0)]
    with pytest.raises(ConfigError, match=r"config.lr: 3; accepted: from 0 to 1"):
        distance(config(lr=3), config(), axes)


def test_keys_are_ordered_by_model_and_batch():
    assert sorted([ModelBatch("b", 8), ModelBatch("a", 64), ModelBatch("a", 8)]) == [
        ("a", 8),
        ("a", 64),
        ("b", 8),
    ]
