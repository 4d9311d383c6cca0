"""How a JSON document of others is read: bounds first, then each key as what it should be, or BadInput."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Callable, TypeVar

from hpcsched.contract.schema import LARGEST
from hpcsched.errors import BadInput
from hpcsched.printing import printable

SMALL_BYTES = 2**20
"""The longest document of the contract."""

LINE_BYTES = 2**16
"""The longest line of progress or of orders; a longer one counts for nothing."""

MOST_DEPTH = 64
"""The most tables and lists within each other: far below what any reader's recursion can take."""

MOST_STEPS = LARGEST

_MOST_WHOLE = 2**63 - 1
_MOST_SAID = 300
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_WHOLE_TEXT = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)

T = TypeVar("T")


def document(data: bytes, *, most_bytes: int = SMALL_BYTES) -> dict[str, Any]:
    """A JSON object; raises BadInput for whatever it is not."""
    if len(data) > most_bytes:
        raise BadInput(f"longer than {most_bytes} bytes")
    table = parsed(data)
    if type(table) is not dict:
        raise BadInput(f"an object is expected, not {_kind(table)}")
    return table


def parsed(data: bytes) -> Any:
    """A JSON value; raises BadInput."""
    if is_deeper(data, MOST_DEPTH):
        raise BadInput(f"more than {MOST_DEPTH} tables and lists within each other")
    try:
        return _decoder.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(said(error)) from error


def line(table: Any) -> bytes:
    """A value as one line."""
    return json.dumps(table).encode() + b"\n"


# -- keys of an object: a value that is missing or null is `default`, which `_MISSING` forbids ---------------

_MISSING: Any = object()


def whole(table: dict[str, Any], key: str, default: Any = _MISSING, *, least: int = -_MOST_WHOLE) -> Any:
    """A whole number, at least `least`."""
    value = table.get(key)
    if value is None:
        return _default(table, key, default)
    if type(value) is not int:
        raise _expected("a whole number", value, key)
    if not least <= value <= _MOST_WHOLE:
        raise BadInput(f"{key} {str(value)[:40]}, not one of {least} to {_MOST_WHOLE}")
    return value


def step(table: dict[str, Any], key: str = "step", default: Any = _MISSING) -> Any:
    """How many steps have been done."""
    value = whole(table, key, default)
    if value is not None and not 0 <= value <= MOST_STEPS:
        raise BadInput(f"{key} {value}, not one of 0 to {MOST_STEPS}")
    return value


def number(table: dict[str, Any], key: str, default: Any = _MISSING) -> Any:
    """A finite number, as float."""
    value = table.get(key)
    if value is None:
        return _default(table, key, default)
    return finite(value, key)


def flag(table: dict[str, Any], key: str, default: Any = _MISSING) -> Any:
    """True or false."""
    value = table.get(key)
    if value is None:
        return _default(table, key, default)
    if type(value) is not bool:
        raise _expected("true or false", value, key)
    return value


def text(table: dict[str, Any], key: str, default: Any = _MISSING) -> Any:
    """Text that can be written as UTF-8."""
    value = table.get(key)
    if value is None:
        return _default(table, key, default)
    return written(value, key)


def part(table: dict[str, Any], key: str, read: Callable[[Any], T], default: Any = _MISSING) -> T | Any:
    """Whatever `read` makes of the value."""
    value = table.get(key)
    return _default(table, key, default) if value is None else read(value)


# -- values --------------------------------------------------------------------------------------------------


def an_object(value: Any, where: str) -> dict[str, Any]:
    """An object within a document."""
    if type(value) is not dict:
        raise _expected("an object", value, where)
    return value


def a_list(value: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    """A list of which `read` takes each."""
    if type(value) is not list:
        raise _expected("a list", value, where)
    return tuple([read(item, where) for item in value])


def a_whole(value: Any, where: str) -> int:
    """A whole number by itself."""
    if type(value) is not int or not -_MOST_WHOLE <= value <= _MOST_WHOLE:
        raise _expected("a whole number", value, where)
    return value


def finite(value: Any, where: str) -> float:
    """A finite number by itself."""
    try:
        found = float(value) if type(value) in (float, int) else math.nan
    except OverflowError:
        found = math.nan
    if not math.isfinite(found):
        raise _expected("a finite number", value, where)
    return found


def written(value: Any, where: str) -> str:
    """Text by itself."""
    if type(value) is not str:
        raise _expected("text", value, where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{where}: text that cannot be written as UTF-8") from None
    return value


def number_of(key: str, where: str) -> int:
    """A whole number as JSON has it in the place of a key."""
    if not _WHOLE_TEXT.fullmatch(key):
        raise _expected("a whole number as key", key, where)
    return int(key)


# -- what is wrong, and how deep a document is ---------------------------------------------------------------


def said(error: Exception) -> str:
    """An exception of a reader in one printable line."""
    if isinstance(error, RecursionError):
        return "too many tables and lists within each other"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: byte 0x{error.object[error.start]:02x}"
    said_ = printable(str(error)) or type(error).__name__
    return said_ if len(said_) <= _MOST_SAID else f"{said_[:_MOST_SAID]}..."


def is_deeper(data: bytes, most: int) -> bool:
    """Whether a JSON document has more than `most` tables and lists within each other.

    Of one that is not well-formed it may say either: its decoder refuses it.
    """
    if data.count(b"[") + data.count(b"{") <= most:
        return False
    if b"\\" in data:
        data = re.sub(rb"\\.", b"", data, flags=re.DOTALL)
    # What is left are brackets outside of texts; each round takes the innermost ones away.
    data = re.sub(rb'"[^"]*"', b"", data.translate(_ALIKE, _NO_BRACKETS))
    for _ in range(most):
        inner = data.replace(b"[]", b"")
        if not inner or inner == data:
            return False
        data = inner
    return True


def _default(table: dict[str, Any], key: str, default: Any) -> Any:
    if default is not _MISSING:
        return default
    if key in table:
        raise BadInput(f"{key} is null")
    raise BadInput(f"{key} is missing")


def _expected(what: str, value: Any, where: str) -> BadInput:
    return BadInput(f"{where}: {what} is expected, not {_kind(value)}")


def _kind(value: Any) -> str:
    if value is None or type(value) is bool:
        return json.dumps(value)
    if type(value) in (int, float):
        return "the number " + (f"{value:.6g}" if type(value) is float else str(value)[:40])
    return "text" if type(value) is str else "a list" if type(value) is list else "an object"


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_decoder = json.JSONDecoder(parse_constant=_no_number)
