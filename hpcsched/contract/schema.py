"""What a value in a user's file may be: said in words, and as a part of JSON Schema that is checked here.

Job files, search files, settings and the options of strategies are read by these. The same limits make the
schemas that editors read, so an editor and the reader cannot differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Callable, NoReturn, TypeVar

from hpcsched.errors import ConfigError
from hpcsched.printing import suggestion

T = TypeVar("T")

LARGEST = 2**53
"""Whole numbers are exact up to here, in floating-point arithmetic too."""

Fault = tuple[str, str]
"""Where in a value, such as ".min" or "[2]", and what was found there."""

_MOST_SHOWN = 200
_ANY_TEXT = re.compile(".*", re.DOTALL)
_TYPES = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True)
class Accepted:
    """What is accepted: in `words`, and as JSON Schema. `also`: what JSON Schema cannot say."""

    words: str
    schema: Mapping[str, Any]
    also: Callable[[Any], bool] | None = None

    def fault(self, value: Any) -> Fault | None:
        """What is wrong in a value; None: nothing."""
        found = fault(self.schema, value)
        return found or (None if self.also is None or self.also(value) else ("", repr(value)))

    def admits(self, value: Any) -> bool:
        """Whether a value is right."""
        return self.fault(value) is None


def whole(words: str, least: int = 1, most: int = LARGEST) -> Accepted:
    """A whole number in [least, most]."""
    return Accepted(words, {"type": "integer", "minimum": least, "maximum": most})


def number(words: str, **limits: float) -> Accepted:
    """A finite number. `limits`: minimum, maximum, exclusiveMinimum, exclusiveMaximum."""
    return Accepted(words, {"type": "number", **limits})


def flag(words: str = "") -> Accepted:
    """`true` or `false`; `words` say what it does."""
    return Accepted(f"true or false: {words}" if words else "true or false", {"type": "boolean"})


def text(words: str, pattern: str = "", least: int = 1) -> Accepted:
    """A text of at least so many letters; one that matches `pattern`, which begins with ^ and ends with $."""
    return Accepted(words, {"type": "string", **({"pattern": pattern} if pattern else {"minLength": least})})


def printed(words: str) -> Accepted:
    """A text that is not empty and can be printed in a line."""
    return Accepted(words, text(words).schema, str.isprintable)


def one_of(*choices: str, words: str = "") -> Accepted:
    """One of these texts."""
    quoted = [f'"{choice}"' for choice in choices]
    said = ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
    return Accepted(words or said, {"type": "string", "enum": list(choices)})


def many(each: Accepted, words: str, least: int = 0) -> Accepted:
    """A list of at least so many of these."""
    schema = {"type": "array", "items": each.schema, "minItems": least}
    return Accepted(words, schema, lambda values: all(map(each.admits, values)))


def table(words: str, **schema: Any) -> Accepted:
    """A table. `schema`: properties, additionalProperties."""
    return Accepted(words, {"type": "object", **schema})


def either(words: str, *ways: Accepted) -> Accepted:
    """What one of these accepts."""
    schema = {"anyOf": [way.schema for way in ways]}
    return Accepted(words, schema, lambda value: any(way.admits(value) for way in ways))


def fault(schema: Mapping[str, Any], value: Any, place: str = "") -> Fault | None:
    """What is wrong in a value by a schema, of which the keys are those that the functions above give it."""
    here = place, repr(value)
    if "anyOf" in schema:
        faults = [fault(way, value, place) for way in schema["anyOf"]]
        return None if None in faults else max(filter(None, faults), key=lambda found: len(found[0]))
    kind = schema.get("type")
    if kind is not None and type(value) not in _TYPES[kind]:
        return here
    if kind in ("integer", "number"):
        least, most = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        right = -math.inf < value < math.inf and least <= value <= most and above < value < below
        return None if right else here
    if kind == "string":
        right = len(value) >= schema.get("minLength", 0) and value in schema.get("enum", (value,))
        return None if right and re.fullmatch(schema.get("pattern", _ANY_TEXT), value) else here
    faults = []
    if kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return here
        faults = [fault(schema["items"], each, f"{place}[{at}]") for at, each in enumerate(value)]
    if kind == "object":
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, each in value.items():
            rule, at = known.get(key, others), f"{place}.{key}"
            faults.append((at, "unknown key") if rule is False else fault(rule, each, at))
    return next(filter(None, faults), None)


def option(accepted: Accepted, default: Any = MISSING, *, about: str = "", unset: str = "") -> Any:
    """A field of a dataclass that `read` reads; required without a default.

    accepted: what its value may be.
    about: a sentence that says what it means, with its unit.
    unset: what holds where it is not given, if the default does not say it.
    """
    told = {"accepted": accepted, "about": about, "unset": unset}
    if isinstance(default, (dict, list)):
        return field(default_factory=type(default), metadata=told)
    return field(default=default, metadata=told)


@cache
def options_of(cls: type[Any]) -> Mapping[str, Accepted]:
    """What each field of such a dataclass accepts."""
    return {each.name: each.metadata["accepted"] for each in fields(cls)}


@cache
def required(cls: type[Any]) -> tuple[str, ...]:
    """Its fields without a default."""
    return tuple(each.name for each in fields(cls) if each.default is MISSING is each.default_factory)


def read(cls: type[T], given: Mapping[str, Any], *, where: str, prefix: str = "", unknown: str) -> T:
    """A dataclass of `option`s from a table; raises ConfigError, see `check`."""
    accepted, needed = options_of(cls), required(cls)  # type: ignore[arg-type]
    check(given, accepted, where=where, prefix=prefix, needed=needed, unknown=unknown)
    return cls(**given)


def check(
    given: Mapping[str, Any],
    accepted: Mapping[str, Accepted],
    *,
    where: str,
    prefix: str = "",
    needed: Collection[str] = (),
    unknown: str = "unknown key",
) -> None:
    """Refuse a table with a key that is not known, a value that is not right, or without one that is needed.

    Raises ConfigError: in `where`, `prefix` and the key, what was found, and what is accepted.
    """
    for key, value in given.items():
        if key not in accepted:
            refuse(where, prefix + key, unknown + suggestion(key, accepted), ", ".join(accepted) or "none")
        found = accepted[key].fault(value)
        if found is not None:
            place, got = found
            too_large = type(value) is int and value > LARGEST == accepted[key].schema.get("maximum")
            more = f", at most {LARGEST}" if too_large else ""
            refuse(where, prefix + key + place, got, accepted[key].words + more)
    for key in needed:
        if key not in given:
            refuse(where, prefix + key, "missing", accepted[key].words)


def refuse(where: str, key: str, got: str, accepted: str) -> NoReturn:
    """Raise ConfigError on one line, however long or odd the key and what was found are."""
    key = key if key.isprintable() else repr(key)
    got = got if len(got) <= _MOST_SHOWN else f"{got[:_MOST_SHOWN]}..."
    raise ConfigError(where=where, key=key, got=got, accepted=accepted)
