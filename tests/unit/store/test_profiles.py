"""The JSON interchange of profiles, and which profile a job goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.profile import SOURCES, Profile
from hpcsched.errors import ConfigError, StoreError
from hpcsched.store.profiles import (
    choose,
    choose_all,
    describe,
    format_profiles,
    load_profiles,
    parse_profiles,
    save_profiles,
)

names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=20)
positive = st.floats(min_value=1e-300, max_value=1e300)
seconds = st.floats(min_value=0, max_value=1e300)
counts = st.integers(1, 999_999)
costs = st.none() | seconds | st.dictionaries(counts, seconds, min_size=1, max_size=5)


@st.composite
def profile(draw: st.DrawFn) -> Profile:
    rates = st.dictionaries(counts, positive, min_size=1, max_size=8)
    return Profile(
        model=draw(names),
        device=draw(names),
        throughput=draw(rates),
        nodes=draw(counts),
        global_batch=draw(st.none() | counts),
        unit=draw(names),
        start_s=draw(costs),
        suspend_s=draw(costs),
        resume_s=draw(costs),
        grow_s=draw(costs),
        shrink_s=draw(costs),
        memory_mib=draw(st.none() | rates),
        checkpoint_mib=draw(st.none() | seconds),
        source=draw(st.sampled_from(SOURCES)),
        note=draw(st.text(st.characters(codec="utf-8"))),
        software=draw(st.text(st.characters(codec="utf-8"))),
        spread=draw(st.none() | st.dictionaries(counts, seconds, min_size=1)),
    )


def key(p: Profile) -> tuple[object, ...]:
    return p.model, p.device, p.nodes, p.global_batch, p.software


@pytest.mark.long
@given(st.lists(profile(), max_size=4, unique_by=key))
def test_what_is_written_is_read_back(profiles: list[Profile]) -> None:
    assert parse_profiles(format_profiles(profiles), where="f") == tuple(profiles)


GOOD: dict[str, Any] = {"model": "m", "device": "d", "throughput": {"1": 1.5, "2": 2}}
FULL: dict[str, Any] = GOOD | {
    "nodes": 1,
    "global_batch": None,
    "unit": "step",
    "start_s": 3,
    "suspend_s": {"1": 0},
    "resume_s": None,
    "grow_s": {"2": 0.5},
    "shrink_s": None,
    "memory_mib": {"1": 9000},
    "checkpoint_mib": 98,
    "source": "measured",
    "note": "by hand",
}


def test_the_documented_shape_is_read() -> None:
    (found,) = parse_profiles(json.dumps({"schema": 1, "profiles": [FULL]}), where="f")
    assert found.throughput == {1: 1.5, 2: 2.0}
    assert (found.start_s, found.suspend_s, found.resume_s, found.global_batch) == (3.0, {1: 0.0}, None, None)
    assert (found.grow_s, found.shrink_s) == ({2: 0.5}, None)


@pytest.mark.parametrize(
    ("changed", "at", "got"),
    [
        ({"throughputs": {}}, ".throughputs", "unknown key"),
        ({"throughput": {}}, ".throughput", "{}"),
        ({"throughput": [1, 2]}, ".throughput", "[1, 2]"),
        ({"throughput": None}, ".throughput", "null"),
        ({"throughput": {"2": float("nan")}}, ".throughput.2", "NaN"),
        ({"throughput": {"2": float("inf")}}, ".throughput.2", "Infinity"),
        ({"throughput": {"2": 10**400}}, ".throughput.2", "1000000"),
        ({"throughput": {"2": -1}}, ".throughput.2", "-1"),
        ({"throughput": {"2": 0}}, ".throughput.2", "0"),
        ({"throughput": {"2": "7"}}, ".throughput.2", '"7"'),
        ({"throughput": {"2": True}}, ".throughput.2", "true"),
        ({"throughput": {"1.5": 1}}, ".throughput.1.5", '"1.5"'),
        ({"throughput": {"0": 1}}, ".throughput.0", '"0"'),
        ({"throughput": {"-1": 1}}, ".throughput.-1", '"-1"'),
        ({"throughput": {"two": 1}}, ".throughput.two", '"two"'),
        ({"throughput": {"02": 1}}, ".throughput.02", '"02"'),
        ({"throughput": {"٢": 1}}, ".throughput.٢", '"٢"'),
        ({"start_s": -0.5}, ".start_s", "-0.5"),
        ({"start_s": {"1": -0.5}}, ".start_s.1", "-0.5"),
        ({"suspend_s": {}}, ".suspend_s", "{}"),
        ({"resume_s": "19"}, ".resume_s", '"19"'),
        ({"grow_s": -1}, ".grow_s", "-1"),
        ({"shrink_s": {"0": 1}}, ".shrink_s.0", '"0"'),
        ({"memory_mib": {"1": 0}}, ".memory_mib.1", "0"),
        ({"checkpoint_mib": -1}, ".checkpoint_mib", "-1"),
        ({"spread": {"1": -0.1}}, ".spread.1", "-0.1"),
        ({"nodes": 0}, ".nodes", "0"),
        ({"nodes": 1.0}, ".nodes", "1.0"),
        ({"global_batch": 1.5}, ".global_batch", "1.5"),
        ({"global_batch": 2**63}, ".global_batch", str(2**63)),
        ({"global_batch": True}, ".global_batch", "true"),
        ({"model": ""}, ".model", '""'),
        ({"model": 5}, ".model", "5"),
        ({"device": "a\nb"}, ".device", '"a\\nb"'),
        ({"unit": None}, ".unit", "null"),
        ({"source": "guessed"}, ".source", '"guessed"'),
        ({"source": {}}, ".source", "{}"),
        ({"note": 1}, ".note", "1"),
    ],
)
def test_a_bad_profile_is_refused_where_it_is_bad(changed: dict[str, Any], at: str, got: str) -> None:
    text = json.dumps({"schema": 1, "profiles": [GOOD, FULL | {"model": "n"} | changed]})
    with pytest.raises(ConfigError) as error:
        parse_profiles(text, where="p.json")
    assert (error.value.where, error.value.key) == ("p.json", f"profiles[1]{at}")
    assert error.value.got.startswith(got) and error.value.accepted
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "key", "got"),
    [
        ("", "", "not readable"),
        ("{", "", "not readable"),
        ("[" * 100_000, "", "not readable"),
        ("[]", "", "[]"),
        ("3", "", "3"),
        ('{"profiles": []}', "schema", "missing"),
        ('{"schema": 1}', "profiles", "missing"),
        ('{"schema": 2, "profiles": []}', "schema", "2"),
        ('{"schema": true, "profiles": []}', "schema", "true"),
        ('{"schema": 1, "profiles": {}}', "profiles", "{}"),
        ('{"schema": 1, "profiles": [3]}', "profiles[0]", "3"),
        ('{"schema": 1, "profiles": [[]]}', "profiles[0]", "[]"),
        ('{"schema": 1, "profiles": [], "more": 1}', "more", "unknown key"),
        ('{"schema": 1, "profiles": [{"model": "m", "device": "d"}]}', "profiles[0].throughput", "missing"),
        ('{"schema": 1, "schema": 1, "profiles": []}', "schema", "given twice"),
        (
            '{"schema": 1, "profiles": [{"model": "m", "device": "d", "throughput": {"1": 1, "1": 2}}]}',
            "profiles[0].throughput.1",
            "given twice",
        ),
    ],
)
def test_a_bad_file_is_refused(text: str, key: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_profiles(text, where="p.json")
    assert (error.value.key, error.value.where) == (key, "p.json")
    assert error.value.got.startswith(got)


def test_a_profile_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profiles\[1\]: the same .* as profiles\[0\]"):
        parse_profiles(json.dumps({"schema": 1, "profiles": [GOOD, FULL]}), where="p.json")
    parse_profiles(json.dumps({"schema": 1, "profiles": [GOOD, FULL | {"global_batch": 64}]}), where="p.json")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="marble-summit"):
        load_profiles("no-such-profiles")
    with pytest.raises(ConfigError, match="No such file"):
        load_profiles(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="directory"):
        load_profiles(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_profiles(tmp_path / "latin")


def test_a_file_is_saved_as_a_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profiles(path, [Profile(model="m", device="d", throughput={1: 1.0})])
    assert [p.model for p in load_profiles(path)] == ["m"]
    save_profiles(path, [])
    assert load_profiles(path) == () and list(tmp_path.iterdir()) == [path]
    with pytest.raises(StoreError, match="absent"):
        save_profiles(tmp_path / "absent" / "p.json", [])


def a(device: str, source: str = "measured", **other: Any) -> Profile:
    return Profile(model="m", device=device, throughput={1: 1.0}, source=source, **other)


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ([], None),
        ([a("other")], 0),
        ([a("other"), a("here")], 1),
        ([a("here", nodes=2), a("here", "fitted")], 1),
        ([a("here", nodes=2), a("other")], 0),
        (
            [
                a("here", "fitted"),
                a("here", "learned", global_batch=8),
                a("here", "measured", global_batch=4),
            ],
            2,
        ),
        ([a("here", "fitted"), a("here", "learned", global_batch=8)], 1),
        ([a("here", software="new"), a("here", software="old")], 0),
        ([a("other", "fitted"), a("other", software="x")], 1),
    ],
)
def test_choose(known: list[Profile], chosen: int | None) -> None:
    others = [Profile(model="unrelated", device="here", throughput={1: 1.0})]
    expected = None if chosen is None else known[chosen]
    assert choose([*others, *known], "m", "here") is expected


@pytest.mark.parametrize(
    ("known", "named"),
    [
        (
            [a("x"), a("y", "fitted")],
            ["but none for device 'here'", "x, 1 node, measured", "y, 1 node, fitted"],
        ),
        ([a("x", global_batch=1), a("x", global_batch=2)], ["x, 1 node, batch 1", "x, 1 node, batch 2"]),
        ([a("here", global_batch=1), a("here", global_batch=2)], ["2 profiles fit", "batch 1", "batch 2"]),
        ([a("here", "published"), a("here", "fitted", global_batch=2)], ["published", "fitted"]),
    ],
)
def test_what_cannot_be_chosen_is_listed(known: list[Profile], named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        choose(known, "m", "here", where="p.json")
    assert str(error.value).startswith("p.json: m: ")
    assert all(text in str(error.value) for text in named)


def test_choose_all_takes_each_model_once_and_leaves_out_the_unknown() -> None:
    n = Profile(model="n", device="x", throughput={1: 1.0})
    assert choose_all([a("here"), n], ["n", "m", "n", "unknown"], "here") == (n, a("here"))


def test_a_description_is_one_short_line() -> None:
    text = describe(a("d", note="line one\nline two " + "x" * 100, global_batch=8))
    assert text.startswith("d, 1 node, batch 8, measured, line one line two xxx") and len(text) < 80
