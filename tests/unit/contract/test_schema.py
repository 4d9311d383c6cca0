"""What a value may be: the reader accepts exactly what the schema for editors says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract import schema
from hpcsched.errors import ConfigError

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | st.sampled_from(("", "a", "b", "abc"))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=5,
)


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@given(value=VALUES)
def test_each_kind_admits_what_it_says(value: Any) -> None:
    """Against the same rules, written out."""
    rules = [
        (schema.whole("", 2, 9), type(value) is int and 2 <= value <= 9),
        (schema.number("", minimum=0, exclusiveMaximum=5), is_number(value) and 0 <= value < 5),
        (schema.number("", exclusiveMinimum=0, maximum=5), is_number(value) and 0 < value <= 5),
        (schema.flag(), type(value) is bool),
        (schema.text(""), type(value) is str and value != ""),
        (schema.text("", "^[a-b]$"), value in ("a", "b")),
        (schema.one_of("a", "abc"), value in ("a", "abc")),
        (schema.many(schema.flag(), ""), type(value) is list and all(type(each) is bool for each in value)),
        (schema.table(""), type(value) is dict),
        (
            schema.either("", schema.one_of("a"), schema.whole("", 0)),
            value == "a" or (type(value) is int and value >= 0),
        ),
    ]  # fmt: skip
    for accepted, right in rules:
        assert accepted.admits(value) is right, accepted
        json.dumps(accepted.schema, allow_nan=False)


LIMITS = schema.table("", properties={"min": schema.whole("").schema}, additionalProperties=False)


@pytest.mark.parametrize(
    ("accepted", "value", "fault"),
    [
        (schema.many(schema.text(""), ""), ["a", 3], ("[1]", "3")),
        (LIMITS, {"min": 0}, (".min", "0")),
        (LIMITS, {"most": 1}, (".most", "unknown key")),
        (schema.either("", schema.whole(""), LIMITS), {"min": "a"}, (".min", "'a'")),
        (schema.either("", schema.whole(""), LIMITS), "a", ("", "'a'")),
        (schema.printed(""), "a\nb", ("", r"'a\nb'")),
        (schema.text("", "^a$"), "a\n", ("", r"'a\n'")),
        (schema.many(schema.printed(""), "", least=1), [], ("", "[]")),
        (schema.whole(""), True, ("", "True")),
    ],
)
def test_what_is_wrong_is_found_where_it_stands(accepted: schema.Accepted, value: Any, fault: Any) -> None:
    assert accepted.fault(value) == fault


@dataclass(frozen=True)
class Table:
    size: int = schema.option(schema.whole("a size"))
    names: list[str] = schema.option(schema.many(schema.text(""), "names"), [])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "f: t.size: missing; accepted: a size"),
        ({"size": 0}, "f: t.size: 0; accepted: a size"),
        ({"size": 2**60}, f"f: t.size: {2**60}; accepted: a size, at most {2**53}"),
        ({"size": 1, "names": ["", "x"]}, "f: t.names[0]: ''; accepted: names"),
        ({"size": 1, "a\nb": 1}, "f: 't.a\\nb': unknown key; accepted: size, names"),
        ({"size": "x" * 999}, f"f: t.size: {'x' * 999!r:.200}...; accepted: a size"),
    ],
)
def test_a_table_is_refused_on_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schema.read(Table, given, where="f", prefix="t.", unknown="unknown key")
    assert str(refused.value) == line


def test_a_table_that_is_right_is_read() -> None:
    found = schema.read(Table, {"size": 3}, where="f", unknown="unknown key")
    assert found == Table(size=3) and found.names == []
    assert found.names is not Table(size=3).names
