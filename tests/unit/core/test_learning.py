"""The curves that are drawn through what was seen."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.learning import (
    LEAST_SAMPLES,
    SeenRates,
    SeenThroughput,
    _solve,
    as_seen,
    contradicts,
    corrected,
    differs,
    estimated,
)
from hpcsched.core.profile import Profile

LINE = Profile(model="m", device="d", throughput={g: 10.0 * g for g in range(1, 9)})


def seen(rate: float, *, spread: float = 0.0, samples: int = 4) -> SeenRates:
    found = SeenRates()
    for i in range(samples):
        found.add(1000, 1000 / (rate * (1 + spread * (-1) ** i)))
    return found


def test_the_spread_is_that_of_the_samples_and_the_error_that_of_their_mean():
    found = seen(10.0, spread=0.1, samples=32)
    assert found.spread == pytest.approx(0.1, rel=0.02)
    assert found.error == pytest.approx(0.1 / 32**0.5, rel=0.03)
    assert found.rate == pytest.approx(10.0)


def test_a_noisy_throughput_contradicts_later_than_a_steady_one():
    assert contradicts(LINE, 1, seen(11.0))
    assert not contradicts(LINE, 1, seen(11.0, spread=0.15))
    spread = Profile(model="m", device="d", throughput={1: 10.0}, spread={1: 0.08})
    assert not contradicts(spread, 1, seen(11.0))
    assert contradicts(spread, 1, seen(12.0))


def test_what_comes_later_differs_by_more_than_either_is_uncertain():
    found = seen(11.0)
    found.told = (10.0, 0.0)
    assert differs(found)
    found.told = (10.0, 0.15)  # what was believed was uncertain
    assert not differs(found)
    found = seen(11.0, spread=0.3)  # what is seen now is
    found.told = (10.0, 0.0)
    assert not differs(found)


def test_what_was_seen_twice_as_often_pulls_more():
    few = corrected(("m", 1, ""), LINE, {4: seen(20.0, spread=0.3, samples=4)})
    many = corrected(("m", 1, ""), LINE, {4: seen(20.0, spread=0.3, samples=32)})
    assert many.rate(4) == pytest.approx(20.0, rel=0.1)
    assert many.rate(4) < few.rate(4) < 40.0
    assert many.spread[4] < few.spread[4]


def test_a_factor_seen_on_several_counts_is_taken_for_all():
    """Everything runs at half of the profile's speed."""
    half = corrected(("m", 1, ""), LINE, {g: seen(5.0 * g) for g in (1, 4, 8)})
    assert half.rate(2) == pytest.approx(10.0, rel=0.2)
    assert half.rate(6) == pytest.approx(30.0, rel=0.1)


def test_a_plateau_shows_from_two_counts():
    flat = as_seen(("m", 1, ""), {2: seen(10.0), 4: seen(10.1)})
    curve = estimated(flat)
    assert curve.rate(8) < 1.5 * curve.rate(4)
    assert curve.rate(3) == pytest.approx(10.5, rel=0.15)


rates = st.floats(0.01, 1e6)


@given(st.dictionaries(st.integers(1, 32), rates, min_size=1, max_size=8))
def test_curves_go_through_what_is_certain_and_are_positive_everywhere(table):
    points = {g: seen(rate) for g, rate in sorted(table.items())}
    for curve in (estimated(as_seen(("m", 1, ""), points)), corrected(("m", 1, ""), LINE, points)):
        for g, rate in table.items():
            assert isclose(curve.rate(g), rate, rel_tol=1e-3)
            assert curve.spread[g] < 1e-3
        assert all(x > 0 for x in curve.throughput.values())
        assert all(0 <= s < 25 for s in curve.spread.values())


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(*[st.lists(st.floats(-5, 5), min_size=n, max_size=n)] * (n + 1))
    )
)
def test_systems_are_solved(rows):
    *some, right = rows
    size = len(right)
    # a a^T + 1 is positive definite
    matrix = [
        [sum(x * y for x, y in zip(a, b, strict=True)) + (i == j) for j, b in enumerate(some)]
        for i, a in enumerate(some)
    ]
    found = _solve(matrix, right)
    for i in range(size):
        assert sum(matrix[i][j] * found[j] for j in range(size)) == pytest.approx(right[i], abs=1e-6)


def test_absurd_rates_are_no_crash():
    for table in ({1: 1e-300, 8: 1e300}, {1: 1e300, 8: 1e-300}):
        points = {g: seen(rate) for g, rate in table.items()}
        for curve in (estimated(as_seen(("m", 1, ""), points)), corrected(("m", 2, ""), LINE, points)):
            assert all(x > 0 for x in curve.throughput.values())
            assert curve.nodes in (1, 2)


def test_a_median_takes_no_notice_of_one_sample():
    found = seen(10.0, samples=8)
    found.add(1_000_000, 1.0)
    assert found.rate == pytest.approx(10.0)


def test_too_few_samples_of_an_unknown_model_are_no_belief():
    observed = SeenThroughput(seen={("m", 1, ""): {2: seen(10.0, samples=1)}})
    observed.believe(("m", 1, ""), None)
    assert (observed.beliefs, observed.curves) == ({}, {})
    observed.seen["m", 1, ""][2] = seen(10.0, samples=LEAST_SAMPLES)
    observed.believe(("m", 1, ""), None)
    assert observed.beliefs["m", 1, ""].throughput == {2: pytest.approx(10.0)}
