"""Throughput between, below and beyond what was measured; the best count; costs by GPU count."""

from __future__ import annotations

import math

import pytest

from hpcsched.core.profile import Profile, cost_at
from hpcsched.testing.builders import a_profile


def test_measured_between_beyond_and_below():
    profile = a_profile("m", {2: 4.0, 4: 6.0, 8: 5.0})
    rates = [profile.rate(gpus) for gpus in (1, 2, 3, 4, 6, 8, 9, 100)]
    assert rates == [2.0, 4.0, 5.0, 6.0, 5.5, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("table", "most", "least", "best"),
    [
        ({1: 1.0, 2: 2.0, 4: 2.0}, 6, 1, 2),
        ({1: 1.0, 4: 4.0, 6: 3.0}, 6, 1, 4),
        ({1: 1.0, 4: 4.0, 6: 3.0}, 3, 1, 3),
        ({1: 1.0, 4: 4.0, 6: 3.0}, 6, 5, 5),
        ({1: 5.0, 2: 4.0}, 6, 1, 1),
        ({1: 5.0, 2: 4.0}, 6, 3, 3),
        ({3: 5.0}, 6, 1, 3),
        ({3: 5.0}, 2, 1, 2),
        ({8: 5.0}, 1, 1, 1),
    ],
)
def test_the_best_count_is_the_smallest_that_is_fastest(table, most, least, best):
    profile = a_profile("m", table)
    assert profile.optimal(most, least) == best
    rates = {gpus: profile.rate(gpus) for gpus in range(least, most + 1)}
    assert best == min(gpus for gpus, rate in rates.items() if rate == max(rates.values()))


def test_costs():
    assert cost_at(None, 3) is None
    assert cost_at(7, 3) == 7.0
    assert [cost_at({2: 10.0, 4: 20.0}, gpus) for gpus in (1, 2, 3, 4, 6)] == [10, 10, 15, 20, 20]


def test_a_resume_costs_what_a_start_does_where_that_is_all_that_is_known():
    both = a_profile("m", [1], start_s=9.0, resume_s=4.0)
    assert (both.launch_s(1, first=True), both.launch_s(1, first=False)) == (9.0, 4.0)
    one = a_profile("m", [1], start_s=9.0)
    assert one.launch_s(1, first=False) == 9.0
    assert a_profile("m", [1], start_s=None).launch_s(1, first=True) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"throughput": {}}, "throughput is empty"),
        ({"throughput": {0: 1.0}}, "GPU count 0"),
        ({"throughput": {1: 0.0}}, "not a positive"),
        ({"throughput": {1: math.nan}}, "not a positive"),
        ({"throughput": {1: math.inf}}, "not a positive"),
        ({"throughput": {1: 1.0}, "memory_mib": {1: -1.0}}, "memory_mib"),
        ({"throughput": {1: 1.0}, "start_s": -1.0}, "start_s is -1.0"),
        ({"throughput": {1: 1.0}, "suspend_s": {1: math.nan}}, "suspend_s"),
        ({"throughput": {1: 1.0}, "resume_s": {0: 1.0}}, "resume_s"),
        ({"throughput": {1: 1.0}, "grow_s": -1.0}, "grow_s"),
        ({"throughput": {1: 1.0}, "shrink_s": {2: math.inf}}, "shrink_s"),
        ({"throughput": {1: 1.0}, "source": "guessed"}, "guessed"),
    ],
)
def test_what_is_no_profile(wrong, message):
    with pytest.raises(ValueError, match=message):
        Profile(model="m", device="d", **wrong)


def packed(**rest):
    return Profile(model="m", device="d", throughput={1: 10.0}, **rest)


def test_a_step_of_several_models_as_one_is_read_between_and_beyond_what_was_measured():
    profile = packed(packed_s={1: 0.1, 2: 0.12, 4: 0.16})
    assert [profile.packed_step_s(models) for models in (1, 2, 3, 4, 6)] == pytest.approx(
        [0.1, 0.12, 0.14, 0.16, 0.2]
    )
    assert packed().packed_step_s(2) is None


def test_models_whose_common_memory_was_never_measured_take_what_they_take_apart():
    assert packed(packed_mib={1: 4000.0, 2: 5000.0}).packed_memory_mib(2) == 5000.0
    assert packed(memory_mib={1: 3000.0}).packed_memory_mib(3) == 9000.0
    assert packed().packed_memory_mib(2) is None
