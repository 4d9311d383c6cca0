"""[job.matrix]: one [[job]] table for each combination of values, with {key} for a value in its texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from hpcsched.contract import schema
from hpcsched.jobfile.keys import AT_ONCE, MATRIX, NAME

MOST = 10_000
"""Jobs that one table may make."""

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
RESERVED = ("accumulation", "attempt", "checkpoint", "checkpoint_dir", "id", "index", "job_id", "name")
"""Not for values: what is filled in otherwise, or may be. {index} is the job's number in its array."""

_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(\d{1,9}))?")
_ODD = re.compile(r"[^A-Za-z0-9._=-]+")
_LONGEST = 64
IN_BRACES = r"\{[A-Za-z_]"
"""What begins a place for a value: the names that have one are checked when it is filled."""

_PLACES = re.compile(rf"\{{\{{(?P<literal>{KEY.pattern})\}}\}}|\{{(?P<key>{KEY.pattern})\}}")

_TEXTS = frozenset({"name", "model", "output", "workdir", "continues", "trainer", "env", "command", "after"})
"""Keys whose values are texts. Elsewhere a text that is all {key} becomes the value itself."""


def expanded(table: Mapping[str, Any], *, where: str, place: str) -> Iterator[dict[str, Any]]:
    """The [[job]] tables that one stands for: itself, if it has no `matrix`. Raises ConfigError."""
    matrix, at_once = table.get("matrix"), table.get("at_once")
    if matrix is None:
        if at_once is not None:
            schema.refuse(where, f"{place}.at_once", repr(at_once), "a job with a matrix")
        yield dict(table)
        return
    if not isinstance(matrix, dict) or not matrix:
        schema.refuse(where, f"{place}.matrix", repr(matrix), MATRIX.words)
    if table.get("array") is not None:
        schema.refuse(
            where, f"{place}.array", repr(table["array"]), "no array beside a matrix, which makes one"
        )
    if at_once is not None and not AT_ONCE.admits(at_once):
        schema.refuse(where, f"{place}.at_once", repr(at_once), AT_ONCE.words)
    values = {key: _values(key, given, where, f"{place}.matrix.{key}") for key, given in matrix.items()}
    rest = {key: value for key, value in table.items() if key not in ("matrix", "at_once")}
    if (number := prod(map(len, values.values()))) > MOST:
        schema.refuse(where, f"{place}.matrix", f"{number} jobs", f"at most {MOST}")
    for key in values:
        if not mentions(rest, key):
            accepted = f"{{{key}}} in a text of the job, such as its command or args"
            schema.refuse(where, f"{place}.matrix.{key}", "used nowhere", accepted)
    yield from _made(rest, values, at_once)


def _made(
    rest: dict[str, Any], values: Mapping[str, Sequence[Any]], at_once: Any
) -> Iterator[dict[str, Any]]:
    template = rest.get("name")
    named = isinstance(template, str)
    array = _array_name(str(template) if named else "", rest)
    several = [key for key, found in values.items() if len(found) > 1]
    plain = named and not any(f"{{{key}}}" in str(template) for key in (*values, "index"))
    if plain or not named:
        template = "-".join([array, *(f"{{{key}}}" for key in several)])
    chosen = [
        dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())
    ]
    for index, one in enumerate(chosen, 1):
        one["index"] = index
    names = [_ODD.sub("-", filled_text(str(template), one)) for one in chosen]
    unlike = len(set(names)) == len(names) and all(NAME.fullmatch(name) for name in names)
    for one, name in zip(chosen, names, strict=True):
        ending = f"-{one['index']}"
        name = name if unlike else f"{name[: _LONGEST - len(ending)]}{ending}"
        yield _one(rest, one, name=name, array=array, at_once=at_once)


def after_arrays(tables: Sequence[dict[str, Any]], known: Mapping[str, Sequence[str]]) -> None:
    """Have what waits for an array of these tables, or of those that are `known`, wait for its jobs."""
    arrays = {name: list(jobs) for name, jobs in known.items()}
    for table in tables:
        if isinstance(table.get("array"), dict):
            arrays.setdefault(str(table["array"].get("name")), []).append(str(table.get("name")))
    names = {table.get("name") for table in tables if isinstance(table.get("name"), str)}
    for table in tables:
        after = table.get("after")
        if isinstance(after, list) and all(isinstance(key, str) for key in after):
            table["after"] = [
                name for key in after for name in ([key] if key in names else arrays.get(key, [key]))
            ]


def numbered(
    table: Mapping[str, Any], indices: Sequence[int], at_once: int | None
) -> Iterator[dict[str, Any]]:
    """The [[job]] tables of an array, with {index} for their numbers."""
    for index in indices:
        ending = f"-{index}"
        name = f"{table['name'][: _LONGEST - len(ending)]}{ending}"
        yield _one(table, {"index": index}, name=name, array=table["name"], at_once=at_once)


def _one(
    rest: Mapping[str, Any], chosen: Mapping[str, Any], *, name: str, array: str, at_once: Any
) -> dict[str, Any]:
    table = filled(rest, chosen)
    table.setdefault("model", array)
    table["name"], table["array"] = name, {"name": array, "index": chosen["index"]}
    if at_once is not None:
        table["array"]["at_once"] = at_once
    return table


def _array_name(template: str, rest: Mapping[str, Any]) -> str:
    """The name without what stands for values, and without what joined that."""
    bare = template
    for key in set(re.findall(r"\{([^{}]*)\}", template)):
        named = re.escape(key)
        bare = re.sub(rf"[-_.]*(?:(?<![A-Za-z0-9]){named}=)?\{{{named}\}}", "", bare)
    bare = _ODD.sub("-", bare).strip("-_.=")[: _LONGEST - 8]
    model = rest.get("model")
    return bare or (model if isinstance(model, str) and NAME.fullmatch(model) else "sweep")


def _values(key: str, given: Any, where: str, place: str) -> list[Any]:
    if not KEY.fullmatch(key):
        schema.refuse(
            where, place, repr(key), "a name of letters, digits, _ and . that does not begin with a digit"
        )
    if key in RESERVED:
        schema.refuse(where, place, repr(key), f"another name than {', '.join(RESERVED)}")
    if isinstance(given, str) and (numbers := range_of(given)) is not None:
        if numbers:
            return numbers
        schema.refuse(where, place, repr(given), f"a range that goes up, of at most {MOST} numbers")
    if not isinstance(given, list) or not given:
        schema.refuse(where, place, repr(given), MATRIX.words)
    for value in given:
        if not isinstance(value, str | int | float):
            schema.refuse(where, place, repr(value), MATRIX.words)
    return list(given)


def range_of(text: str) -> list[Any] | None:
    """The whole numbers of a range such as "1..5" or "0..100..25"; None for another text.

    Empty: it does not go up, or is too long. With zeros before the first, as in "01..10", they are texts.
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if not step or first > last or (last - first) // step >= MOST:
        return []
    numbers = range(first, last + 1, step)
    padded = len(found[1]) > 1 and found[1].startswith("0")
    return [str(number).zfill(len(found[1])) for number in numbers] if padded else list(numbers)


def mentions(value: Any, key: str) -> bool:
    """Whether there is a place for `key` in any text of a job's tables and lists."""
    if isinstance(value, str):
        return any(found["key"] == key for found in _PLACES.finditer(value))
    if isinstance(value, dict):
        return any(mentions(one, key) for one in value.values())
    return isinstance(value, list) and any(mentions(one, key) for one in value)


def filled(table: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A job's table with these values in their places."""
    return {key: _with(value, chosen, typed=key not in _TEXTS) for key, value in table.items()}


def _with(value: Any, chosen: Mapping[str, Any], *, typed: bool) -> Any:
    if isinstance(value, dict):
        return {key: _with(one, chosen, typed=typed) for key, one in value.items()}
    if isinstance(value, list):
        return [_with(one, chosen, typed=typed) for one in value]
    if not isinstance(value, str):
        return value
    if typed and value[:1] + value[-1:] == "{}" and value[1:-1] in chosen:
        return chosen[value[1:-1]]
    return filled_text(value, chosen)


def filled_text(text: str, chosen: Mapping[str, Any]) -> str:
    """The text with {key} replaced, and {{key}} by {key}; other braces stay, as shells and awk have them."""

    def value(found: re.Match[str]) -> str:
        if (literal := found["literal"]) is not None:
            return f"{{{literal}}}" if literal in chosen else found[0]
        return _said(chosen[found["key"]]) if found["key"] in chosen else found[0]

    return _PLACES.sub(value, text)


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
