"""The schemas that editors read accept what the readers accept."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract import schema
from hpcsched.contract.strategies import KINDS
from hpcsched.errors import ConfigError

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    name: json.loads((ROOT / f"schemas/{name}.json").read_text()) for name in ("jobs", "search", "settings")
}
WAYS = SCHEMAS["jobs"]["properties"]["job"]["items"]["properties"]["strategy"]["anyOf"]


def accepts(rule: Any, value: Any) -> bool:
    """By a schema in a file: also `required`, which `contract.schema` leaves to those who call it."""
    return schema.fault(rule, value) is None and all(key in value for key in rule.get("required", ()))


def read(kind: str, table: dict[str, Any]) -> bool:
    """Whether options are accepted one by one, whatever they are together."""
    given = {name: value for name, value in table.items() if name != "kind"}
    try:
        schema.read(KINDS[kind], given, where="x", unknown="unknown option")
    except ConfigError:
        return False
    return True


@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_an_editor_accepts_the_options_that_the_reader_accepts(kind: str, data: st.DataObject) -> None:
    """But for the order of two numbers, which JSON Schema cannot say: pairs are sorted here."""
    values = st.one_of(
        st.booleans(),
        st.integers(-2, 40) | st.just(2**60),
        st.floats(-1, 3),
        st.sampled_from(("", "auto", "shared", "sqrt", "none", "x")),
        st.lists(st.integers(-1, 64), max_size=3).map(sorted),
    )
    names = st.sampled_from((*schema.options_of(KINDS[kind]), "another"))
    table = {"kind": kind, **data.draw(st.dictionaries(names, values, max_size=4))}
    assert any(accepts(way, table) for way in WAYS) is read(kind, table)
    (way,) = (way for way in WAYS if way.get("title") == kind)
    assert accepts(way, table) is read(kind, table)


def test_files_that_ship_are_right_by_the_schemas() -> None:
    folders = ("jobscripts/**", "hpcsched/cli/demo", "site-config")
    shipped = (path for folder in folders for path in ROOT.glob(f"{folder}/*.toml"))
    files = {path: tomllib.loads(path.read_text()) for path in shipped}
    assert len(files) >= 9
    for path, table in files.items():
        name = "settings" if path.parent.name == "site-config" else "search" if "space" in table else "jobs"
        assert accepts(SCHEMAS[name], table), (path, schema.fault(SCHEMAS[name], table))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("jobs", "schema = 2", ".schema"),
        ("jobs", "schema = 1\n[[job]]\nname = 'a'\nstep = 3", ".job[0].step"),
        ("jobs", "schema = 1\n[defaults]\nnodes = 0", ".defaults.nodes"),
        (
            "jobs",
            "schema = 1\n[defaults]\nstrategy = { kind = 'ddp', shards = 0 }",
            ".defaults.strategy.shards",
        ),
        ("search", "[space]\nlr = { log = [1] }", ".space.lr.log"),
        ("settings", "[script]\nnodes = 0", ".script.nodes"),
    ],
)
def test_what_is_wrong_is_marked(name: str, text: str, place: str) -> None:
    fault = schema.fault(SCHEMAS[name], tomllib.loads(text))
    assert fault is not None and fault[0] == place
