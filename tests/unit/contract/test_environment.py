"""The environment of a process: both ways, and what is said of what makes no sense."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract import variables
from hpcsched.contract.environment import (
    FLAG,
    NUMBER,
    SEATS,
    TABLE,
    TEXT,
    VERSION,
    WHOLE,
    WORDS,
    Environment,
    Kind,
    Reader,
    needed,
)
from hpcsched.contract.seats import Seat
from hpcsched.contract.version import Version
from hpcsched.errors import ConfigError

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
shares = st.floats(0, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
BY_KIND: dict[Kind, st.SearchStrategy[Any]] = {
    TEXT: words,
    WHOLE: st.integers(),
    NUMBER: st.floats(allow_nan=False),
    FLAG: st.booleans(),
    TABLE: st.dictionaries(words, values, max_size=3),
    WORDS: st.lists(words.map(lambda word: word.replace(",", ".")), max_size=4).map(tuple),
    SEATS: st.lists(st.builds(Seat, st.booleans(), shares, words), max_size=3).map(tuple),
    VERSION: st.builds(Version, st.integers(0, 99), st.integers(0, 99)),
}
environments = st.fixed_dictionaries(
    {}, optional={field.name: BY_KIND[field.metadata["kind"]] for field in fields(Environment)}
).map(lambda told: Environment(**told))


@given(environments)
def test_what_is_told_is_read_as_it_was(told: Environment) -> None:
    environ = told.to_environ()
    assert all(name.startswith(variables.PREFIX) for name in environ)
    assert Environment.from_environ({"PATH": "/bin", **environ}) == told


@given(st.dictionaries(st.sampled_from(sorted(variables.OF_AN_ATTEMPT)), words | st.just("")))
def test_any_values_are_an_environment_or_a_config_error(environ: dict[str, str]) -> None:
    try:
        Environment.from_environ(environ)
    except ConfigError as error:
        assert error.where == "environment" and error.key in environ


def test_nothing_is_told_without_variables() -> None:
    assert Environment.from_environ({}) == Environment() and Environment().to_environ() == {}
    assert Environment.from_environ({variables.JOB_NAME: ""}) == Environment()
    assert Environment(devices=()).to_environ() == {variables.DEVICES: ""}


def test_each_field_is_a_variable_of_its_own() -> None:
    names = [field.metadata["name"] for field in fields(Environment)]
    assert len(set(names)) == len(names)
    apart = {variables.RUN_ID, *variables.OF_A_RANK}
    assert variables.OF_AN_ATTEMPT - set(names) == {variables.PACE}, "which has a decoder of its own"
    assert set(names) - variables.OF_AN_ATTEMPT == apart


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        (variables.STEPS, "many", "a number"),
        (variables.EPOCHS, "nan", "a number"),
        (variables.RESUME, "yes", "a number"),
        (variables.ARGS, "[1]", "a JSON object"),
        (variables.ARGS, "[" * 100_000, "a JSON object"),
        (variables.SEATS, '[{"server": 1}]', '[{"server": true'),
        (variables.CONTRACT, "one", "a version of the contract"),
    ],
)
def test_the_variable_that_makes_no_sense_is_named(name: str, value: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Environment.from_environ({name: value})
    assert str(raised.value).startswith(f"environment: {name}: ")
    assert f"accepted: {accepted}" in str(raised.value)


def test_what_has_to_be_there_is_named() -> None:
    assert needed({"A": "b"}, "A") == "b"
    with pytest.raises(ConfigError, match="A: not set"):
        needed({"A": ""}, "A")
    assert Reader({"A": "7"}).number("A", 1) == 7 and Reader({}).number("A", 1) == 1
