"""Options of policies: words and numbers, from the command line, job files and journals."""

from __future__ import annotations

import math

import msgspec
import pytest

from hpcsched.core import events as ev
from hpcsched.errors import ConfigError
from hpcsched.policy import POLICIES, make_policy
from hpcsched.policy.options import NumberOption, read, said
from hpcsched.store import journal

EPS = NumberOption(least=0, or_inf=True)
BUDGET = NumberOption(least=0, most=100_000, whole=True)
SEED = NumberOption(whole=True)


@pytest.mark.parametrize(
    ("accepted", "given", "meant"),
    [
        (EPS, "1.5", 1.5),
        (EPS, 1.5, 1.5),
        (EPS, 0, 0.0),
        (EPS, "0", 0.0),
        (EPS, "inf", math.inf),
        (EPS, math.inf, math.inf),
        (EPS, None, math.inf),
        (BUDGET, "200", 200),
        (BUDGET, 200, 200),
        (BUDGET, 200.0, 200),
        (BUDGET, 0, 0),
        (BUDGET, 100_000, 100_000),
        (SEED, "-3", -3),
        (SEED, -(10**30), -(10**30)),
        (("both", "jct"), "jct", "jct"),
    ],
)
def test_what_is_accepted_is_read(accepted, given, meant):
    found = read(accepted, given)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("accepted", "given"),
    [
        *(
            (EPS, value)
            for value in ("-0.1", -0.1, "nan", math.nan, -math.inf, "-inf", "much", "", True, [1])
        ),
        *((NumberOption(least=0), value) for value in ("inf", math.inf, None, "1e999")),
        *((BUDGET, value) for value in ("1.5", 1.5, -1, "100001", math.inf, math.nan, "inf", None, False)),
        *((("both", "jct"), value) for value in ("", "bot", 1, None, ["both"])),
    ],
)
def test_anything_else_is_not(accepted, given):
    with pytest.raises(ValueError):
        read(accepted, given)


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        (EPS, "a number of at least 0, or inf"),
        (BUDGET, "a whole number from 0 to 100000"),
        (SEED, "a whole number"),
        (NumberOption(most=0.5), "a number of at most 0.5"),
        (("both", "jct"), "both, jct"),
    ],
)
def test_it_is_said_what_is_accepted(accepted, words):
    assert said(accepted) == words


class Picky:
    moves_packed = reshapes = spreads = False
    OPTIONS = {"goal": ("both", "jct"), "eps": EPS, "budget": BUDGET}  # noqa: RUF012

    def __init__(self, *, goal="both", eps=1.0, budget=200):
        self.goal, self.eps, self.budget = goal, eps, budget


def test_a_policy_gets_numbers_and_the_journal_what_was_given(monkeypatch):
    monkeypatch.setitem(POLICIES, "picky", Picky)
    given = {"goal": "jct", "eps": math.inf, "budget": "7"}
    policy = make_policy("picky", given)
    assert (policy.goal, policy.eps, policy.budget) == ("jct", math.inf, 7)
    assert given["budget"] == "7"

    started = ev.AgentStarted(at=0.0, wall=0.0, devices=(), policy="picky", policy_options=given)
    line = msgspec.json.decode(journal.encode(1, started))
    (body,) = (value for value in line.values() if isinstance(value, dict))
    again = make_policy("picky", body["policy_options"])
    assert (again.goal, again.eps, again.budget) == ("jct", math.inf, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": "-1"}, "--policy-option: eps: '-1'; accepted: a number of at least 0, or inf"),
        ({"budget": 1.5}, "--policy-option: budget: 1.5; accepted: a whole number from 0 to 100000"),
        ({"goal": "fun"}, "--policy-option: goal: 'fun'; accepted: both, jct"),
        ({"epsilon": 1}, "--policy-option: picky.epsilon: unknown option; accepted: goal, eps, budget"),
    ],
)
def test_the_error_says_what_is_accepted(monkeypatch, options, message):
    monkeypatch.setitem(POLICIES, "picky", Picky)
    with pytest.raises(ConfigError) as caught:
        make_policy("picky", options)
    assert str(caught.value) == message
