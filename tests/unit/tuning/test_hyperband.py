"""Hyperband's brackets: published tables, and what holds for every R and eta."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import ConfigError
from hpcsched.tuning.hyperband import Bracket, brackets, halving


def table(most, eta, **rest):
    return {bracket.s: bracket.rungs for bracket in brackets(most, eta, **rest)}


def test_the_brackets_of_the_paper():
    # Li et al. 2018, algorithm 1 for R = 81, eta = 3.
    assert table(81, 3) == {
        4: ((81, 1), (27, 3), (9, 9), (3, 27), (1, 81)),
        3: ((34, 3), (11, 9), (3, 27), (1, 81)),
        2: ((15, 9), (5, 27), (1, 81)),
        1: ((8, 27), (2, 81)),
        0: ((5, 81),),
    }


def test_the_brackets_for_27():
    assert table(27, 3) == {
        3: ((27, 1), (9, 3), (3, 9), (1, 27)),
        2: ((12, 3), (4, 9), (1, 27)),
        1: ((6, 9), (2, 27)),
        0: ((4, 27),),
    }


def test_the_brackets_for_8_by_halves():
    # As mlr3hyperband documents them.
    assert table(8, 2) == {
        3: ((8, 1), (4, 2), (2, 4), (1, 8)),
        2: ((6, 2), (3, 4), (1, 8)),
        1: ((4, 4), (2, 8)),
        0: ((4, 8),),
    }


def test_brackets_come_in_the_order_of_most_trials_first():
    assert [bracket.s for bracket in brackets(81, 3)] == [4, 3, 2, 1, 0]
    assert [bracket.trials for bracket in brackets(81, 3)] == [81, 34, 15, 8, 5]


@pytest.mark.parametrize("power", range(12))
@pytest.mark.parametrize("eta", [2, 3, 4, 1.5, 2.1, 10])
def test_a_power_of_eta_has_as_many_brackets_as_it_has_factors(eta, power):
    # In floats log 243 / log 3 is below 5, and 2.1**5 is not 40.84101.
    most = float(Fraction(str(eta)) ** power)
    if Fraction(str(most)) == Fraction(str(eta)) ** power:
        assert len(brackets(most, eta)) == power + 1


def test_budgets_that_are_no_whole_epochs_are_parts_of_epochs_or_steps_rounded_up():
    assert table(10, 3)[2] == ((9, 10 / 9), (3, 10 / 3), (1, 10))
    assert table(10, 3, whole=True)[2] == ((9, 2), (3, 4), (1, 10))


def test_a_rung_that_would_train_no_further_step_is_left_out():
    # 1.03, 1.13 and so on are 2 steps, all of them.
    [first, *_] = brackets(2, 1.1, whole=True)
    assert first.rungs == ((2, 2),)
    assert halving(5, 1.5, whole=True).rungs == ((4, 2), (2, 3), (1, 4), (1, 5))


@given(most=st.integers(1, 3000), eta=st.sampled_from([1.7, 2, 2.5, 3, 4, 7]), whole=st.booleans())
def test_every_bracket_ends_with_a_trial_of_the_whole_budget(most, eta, whole):
    for bracket in brackets(most, eta, whole=whole):
        counts, budgets = zip(*bracket.rungs, strict=True)
        assert budgets[-1] == most
        assert counts[-1] >= 1
        assert list(budgets) == sorted(set(budgets))
        assert list(counts) == sorted(counts, reverse=True)
        assert budgets[0] >= 1
        if whole:
            assert all(type(budget) is int for budget in budgets)
    assert len(brackets(most, eta)) == 1 + max(s for s in range(99) if Fraction(str(eta)) ** s <= most)


@given(most=st.integers(1, 300), eta=st.integers(2, 5), trials=st.integers(1, 2000))
def test_halving_starts_all_it_is_given_and_brings_one_to_the_end(most, eta, trials):
    bracket = halving(most, eta, trials)
    assert bracket.trials == trials
    assert bracket.rungs[-1][1] == most
    assert bracket.rungs[-1][0] >= 1
    assert bracket.rungs[0][1] >= 1
    # It begins as low as it can.
    assert math.isclose(bracket.rungs[0][1] * eta**bracket.s, most)
    assert eta ** (bracket.s + 1) > min(trials, most)


def test_halving_on_its_own_is_the_first_bracket():
    assert halving(81, 3) == brackets(81, 3)[0]
    assert halving(81, 3, 20) == Bracket(2, ((20, 9), (6, 27), (2, 81)))


@pytest.mark.parametrize(
    ("most", "eta", "key"),
    [
        (0, 3, "R"),
        (0.99, 3, "R"),
        (-5, 3, "R"),
        (math.nan, 3, "R"),
        (math.inf, 3, "R"),
        (81, 1, "eta"),
        (81, 0.5, "eta"),
        (81, -3, "eta"),
        (81, math.nan, "eta"),
        (81, math.inf, "eta"),
        (81, 1.0001, "R"),
    ],
)
def test_what_makes_no_brackets_is_refused_by_name(most, eta, key):
    for make in (brackets, halving):
        with pytest.raises(ConfigError) as caught:
            make(most, eta, where="search.toml")
        assert (caught.value.where, caught.value.key) == ("search.toml", key)
