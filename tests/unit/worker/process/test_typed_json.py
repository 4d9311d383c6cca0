"""What ranks tell each other: read as what was told, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.worker.process.typed_json import decoded, encoded

Kind = tuple[int, int]


@dataclass(frozen=True)
class Place:
    name: str
    ranks: tuple[int, ...] = ()


@dataclass
class Table:
    size: float
    first: Place | None
    places: Mapping[Kind, Place] = field(default_factory=dict)
    full: set[Kind] = field(default_factory=set)
    raw: bytes | None = None


places = st.builds(Place, st.text(), st.lists(st.integers()).map(tuple))
kinds = st.tuples(st.integers(), st.integers())
tables = st.builds(
    Table,
    st.floats(allow_nan=False),
    st.none() | places,
    st.dictionaries(kinds, places),
    st.sets(kinds),
    st.none() | st.binary(),
)


@given(tables)
def test_a_fact_is_read_as_it_was_told(table: Table) -> None:
    assert decoded(encoded(table), Table) == table
    assert decoded(encoded([table, table]), list[Table]) == [table, table]
    assert decoded(encoded((table, True)), tuple[Table | None, bool]) == (table, True)
    assert decoded(encoded(table), Table | int) == table


def test_either_of_two_is_told_apart() -> None:
    for fact in (None, b"\x00\xff/tmp", Place("a", (1,))):
        assert decoded(encoded(fact), bytes | Place | None) == fact
    assert decoded(encoded(75), Place | int) == 75
    assert decoded(encoded(75), Union[Place, int]) == 75  # noqa: UP007 - as under Python 3.9
    assert math.isnan(decoded(encoded(math.nan), float))
    assert decoded(encoded(np.float64(0.1)), float) == 0.1
    whole = decoded(encoded(2), float)
    assert type(whole) is float and whole == 2


@pytest.mark.parametrize(
    ("fact", "kind"),
    [
        (1, str),
        (True, int),
        (1, bool),
        (1.0, int),
        ("1", float),
        (None, int),
        (3, bytes),
        ("\u2603", bytes),
        ([1, 2], Place),
        ({"x": 1}, list[tuple[str, str]]),
        ([1, "2"], list[int]),
        ((1, 2, 3), tuple[int, int]),
        ((1,), tuple[int, int]),
        (7, list[int]),
        (7, str | None),
    ],
)
def test_other_facts_are_refused(fact: Any, kind: Any) -> None:
    with pytest.raises(ValueError):
        decoded(encoded(fact), kind)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[" * 100_000, b'{"name": 1}', b'{"name": "a", "more": 1}', b"{}", b"[]", b"null"],
)
def test_what_was_told_by_nobody_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decoded(data, Place)


def test_what_is_no_fact_is_not_told() -> None:
    for thing in (object(), print, Place, {"a": object()}):
        with pytest.raises(TypeError):
            encoded(thing)
