"""Samples of a search space: the same everywhere, none twice where they are few, and within their bounds."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import ConfigError
from hpcsched.tuning.space import parse_space

MIXED = {
    "lr": {"log": [1e-4, 1e-1]},
    "dropout": {"uniform": [0, 0.5]},
    "width": {"int": [16, 256]},
    "optimizer": {"choice": ["sgd", "adam"]},
}


def space(**table):
    return parse_space(table, where="search.toml")


def finite():
    names = st.sampled_from("abcde")
    axis = st.one_of(
        st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True).map(lambda v: {"choice": v}),
        st.tuples(st.integers(-9, 9), st.integers(1, 4)).map(lambda v: {"int": [v[0], v[0] + v[1]]}),
    )
    return st.dictionaries(names, axis, min_size=1, max_size=3)


def frozen(configs):
    return [tuple(config.items()) for config in configs]


def test_a_seed_means_the_same_samples_on_every_machine_and_in_every_version():
    assert space(**MIXED).sample(3, seed=1) == [
        {"lr": 0.05241012321258205, "dropout": 0.19064163770577974, "width": 121, "optimizer": "adam"},
        {"lr": 0.003049607498261439, "dropout": 0.31242587716785863, "width": 182, "optimizer": "adam"},
        {"lr": 0.00018418523888711396, "dropout": 0.4112857929471126, "width": 149, "optimizer": "adam"},
    ]
    few = space(a={"choice": [1, 2, 3]}, b={"int": [0, 1]})
    assert [tuple(config.values()) for config in few.sample(4, seed=1)] == [(3, 1), (2, 1), (2, 0), (1, 1)]


def test_another_seed_means_other_samples():
    samples = [space(**MIXED).sample(1, seed)[0]["lr"] for seed in range(-5, 5)]
    assert len(set(samples)) == 10


@given(table=finite(), seed=st.integers(), count=st.integers(0, 700))
def test_a_finite_space_is_drawn_from_without_replacement(table, seed, count):
    found = space(**table)
    drawn = frozen(found.sample(count, seed))
    assert len(drawn) == len(set(drawn)) == min(count, found.size)
    assert set(drawn) <= set(frozen(found.grid()))


@given(table=st.one_of(finite(), st.just(MIXED)), seed=st.integers(0, 9), few=st.integers(0, 20))
def test_the_first_samples_do_not_depend_on_how_many_follow(table, seed, few):
    assert space(**table).sample(few, seed) == space(**table).sample(40, seed)[:few]


@given(table=finite())
def test_the_grid_is_the_product_of_all_axes_in_order(table):
    values = [
        axis["choice"] if "choice" in axis else range(axis["int"][0], axis["int"][1] + 1)
        for axis in table.values()
    ]
    assert frozen(space(**table).grid()) == [
        tuple(zip(table, config, strict=True)) for config in product(*values)
    ]
    assert space(**table).size == math.prod(map(len, values))


def test_every_order_of_a_small_space_is_as_likely_as_any_other():
    three = space(a={"choice": ["x", "y", "z"]})
    orders = Counter(tuple(config["a"] for config in three.sample(3, seed)) for seed in range(6000))
    assert len(orders) == 6
    assert all(850 < times < 1150 for times in orders.values())


def test_samples_are_spread_evenly_within_their_bounds():
    drawn = space(**MIXED).sample(4000, seed=3)
    below = sum(config["lr"] < 1e-3 for config in drawn), sum(config["lr"] < 1e-2 for config in drawn)
    assert below == (pytest.approx(4000 / 3, rel=0.1), pytest.approx(8000 / 3, rel=0.1))
    assert sum(config["dropout"] < 0.25 for config in drawn) == pytest.approx(2000, rel=0.1)
    assert all(1e-4 <= config["lr"] <= 1e-1 and 0 <= config["dropout"] <= 0.5 for config in drawn)
    widths = Counter(config["width"] for config in drawn)
    assert set(widths) == set(range(16, 257))
    assert {type(config["width"]) for config in drawn} == {int}
    assert {type(config["dropout"]) for config in drawn} == {float}


def test_a_space_too_large_for_a_float_is_sampled_in_its_last_axis_too():
    huge = space(a={"int": [0, 2**62]}, b={"int": [0, 2**62]}, c={"choice": list(range(10))})
    assert len({config["c"] for config in huge.sample(60, seed=1)}) == 10
    assert len({config["b"] % 2 for config in huge.sample(60, seed=1)}) == 2


def test_narrow_bounds_are_kept_to_the_last_bit():
    high = math.nextafter(1.0, 2.0)
    for config in space(a={"log": [1.0, high]}, b={"uniform": [1.0, high]}).sample(50, seed=1):
        assert set(config.values()) <= {1.0, high}


def test_the_distance_of_the_paper_can_be_told_from_coordinates():
    # pack, table 3 and section 5.3: A and B differ by 4 places in the batch size and by their optimizer.
    table3 = space(
        batch={"choice": [20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70]},
        optimizer={"choice": ["Adam", "SGD", "Adagrad", "Momentum"]},
        lr={"choice": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]},
        activation={"choice": ["Sigmoid", "Leaky ReLu", "Tanh", "ReLu"]},
    )
    assert table3.size == 1056
    assert [axis.kind for axis in table3.axes()] == ["numeric", "categorical", "numeric", "categorical"]
    a = table3.coordinates({"batch": 20, "optimizer": "SGD", "lr": 0.01, "activation": "ReLu"})
    b = table3.coordinates({"batch": 40, "optimizer": "Adagrad", "lr": 0.01, "activation": "ReLu"})
    apart = [
        float(x != y) if axis.kind == "categorical" else abs(x - y)
        for axis, x, y in zip(table3.axes(), a, b, strict=True)
    ]
    assert sum(apart) == 5


def test_coordinates_of_ranges_count_tenths_or_the_few_values_there_are():
    found = space(
        lr={"log": [1e-6, 1e-1]},
        dropout={"uniform": [0, 0.5]},
        width={"int": [0, 200]},
        depth={"int": [1, 4]},
    )
    where = found.coordinates({"lr": 1e-2, "dropout": 0.25, "width": 100, "depth": 3})
    assert where == pytest.approx((8, 5, 5, 2))
    axes = {axis.name: (axis.low, axis.high, axis.log, axis.kind) for axis in found.axes()}
    assert axes["lr"] == (1e-6, 1e-1, True, "numeric")
    assert axes["width"] == (0, 200, False, "numeric")
    assert {axis.name: axis.values for axis in found.axes() if axis.values} == {"depth": (1, 2, 3, 4)}


def test_the_size_is_that_of_the_product_or_unknown_to_be_infinite():
    assert space(a={"choice": [True, False]}, b={"int": [3, 7]}).size == 10
    assert space(a={"choice": [True, False]}, b={"uniform": [0, 1]}).size is None


def test_true_and_1_are_different_choices_and_make_the_axis_categorical():
    [axis] = space(a={"choice": [True, 1]}).axes()
    assert axis.kind == "categorical"
    assert [type(config["a"]) for config in space(a={"choice": [True, 1]}).grid()] == [bool, int]


ANY = "one of { log = [a, b] }, { uniform"
BAD = [
    ("nothing", {}, "space", "no arguments", "a table"),
    ("no table", 3, "space", "3", "a table"),
    ("a plain value", {"lr": 0.1}, "space.lr", "0.1", ANY),
    ("an empty table", {"lr": {}}, "space.lr", "none of them", ANY),
    ("two kinds", {"lr": {"log": [1, 2], "int": [1, 2]}}, "space.lr", "log and int", ANY),
    ("unknown kind", {"lr": {"normal": [0, 1]}}, "space.lr", "unknown kind 'normal'", ANY),
    ("empty choice", {"lr": {"choice": []}}, "space.lr", "nothing to choose", "{ choice = [...] }"),
    ("choice of lists", {"lr": {"choice": [[1]]}}, "space.lr", "[1]", "numbers, texts"),
    ("twice", {"lr": {"choice": [1, 2, 1.0]}}, "space.lr", "1.0 twice", "none of them twice"),
    ("nan", {"lr": {"choice": [1.0, math.nan]}}, "space.lr", "nan in [1.0, nan]", "finite"),
    ("inf", {"lr": {"uniform": [0, math.inf]}}, "space.lr", "inf in", "finite"),
    ("too large", {"lr": {"int": [0, 2**63]}}, "space.lr", str(2**63), "64 bits"),
    ("no list", {"lr": {"log": 3}}, "space.lr", "{'log': 3}", "{ log = [a, b] } with 0 < a < b"),
    ("one bound", {"lr": {"log": [3]}}, "space.lr", "[3]", "0 < a < b"),
    ("bounds in words", {"lr": {"uniform": ["a", "b"]}}, "space.lr", "['a', 'b']", "a < b"),
    ("bounds true", {"lr": {"int": [False, True]}}, "space.lr", "[False, True]", "whole numbers"),
    ("half", {"lr": {"int": [1, 2.5]}}, "space.lr", "[1, 2.5]", "whole numbers a < b"),
    ("a = b", {"lr": {"int": [2, 2]}}, "space.lr", "[2, 2]", "a < b"),
    ("a > b", {"lr": {"uniform": [2, 1]}}, "space.lr", "[2, 1]", "a < b"),
    ("log of 0", {"lr": {"log": [0, 1]}}, "space.lr", "[0, 1]", "0 < a < b"),
    ("log below 0", {"lr": {"log": [-1, 1]}}, "space.lr", "[-1, 1]", "0 < a < b"),
    ("a name", {"l r": {"int": [1, 2]}}, "space.l r", "'l r'", "A-Z a-z 0-9 _"),
    ("a name over two lines", {"a\nb": {"int": [1, 2]}}, "space.'a\\nb'", "'a\\nb'", "names of"),
]


@pytest.mark.parametrize(("table", "key", "got", "accepted"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_what_is_wrong_is_refused_by_name(table, key, got, accepted):
    with pytest.raises(ConfigError) as caught:
        parse_space(table, where="search.toml")
    error = caught.value
    assert (error.where, error.key) == ("search.toml", key)
    assert got in error.got
    assert accepted in error.accepted
    assert "\n" not in str(error)
