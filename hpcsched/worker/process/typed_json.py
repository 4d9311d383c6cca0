"""Facts as JSON: dataclasses, containers, numbers, text. What is read must be of the type that is expected.

A dataclass is an object, a mapping a list of pairs (its keys may be of any type), bytes are text (Latin-1).
Where one of several types is expected (`Plan | int`) the first that fits is taken: `str` and `bytes` do not
go together.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import json
import sys
import types
from functools import cache
from typing import Any, Union, get_args, get_origin

import numpy as np

from hpcsched.compat import zip


def encoded(fact: Any) -> bytes:
    """Raises TypeError for what is no fact."""
    return json.dumps(_plain(fact), separators=(",", ":")).encode()


def decoded(data: bytes, kind: Any) -> Any:
    """Raises ValueError for anything but a fact of this type."""
    try:
        return _read(json.loads(data), kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(fact: Any) -> Any:
    if fact is None or isinstance(fact, (str, bool, int, float)):
        return fact
    if isinstance(fact, bytes):
        return fact.decode("latin-1")
    if isinstance(fact, np.generic):
        return fact.item()
    if dataclasses.is_dataclass(fact) and not isinstance(fact, type):
        return {field.name: _plain(getattr(fact, field.name)) for field in dataclasses.fields(fact)}
    if isinstance(fact, collections.abc.Mapping):
        return [[_plain(key), _plain(value)] for key, value in fact.items()]
    if isinstance(fact, (list, tuple, set, frozenset)):
        return [_plain(item) for item in fact]
    raise TypeError(f"a {type(fact).__name__} cannot be told to other ranks")


def _read(value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(value, kind)
    origin, items = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return _read_one_of(value, items)
    if origin in _MANY:
        return _read_many(value, origin, items)
    if origin in (dict, collections.abc.Mapping):
        pairs = _read(value, list[tuple[items]])  # type: ignore[valid-type]
        return dict(pairs)
    if kind is bytes:
        return _read(value, str).encode("latin-1")
    if kind is float and type(value) is int:
        return float(value)
    if kind not in (str, bool, int, float, type(None)):
        raise TypeError(f"{kind} is no type of facts")
    if type(value) is not kind:
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _read_dataclass(value: Any, kind: Any) -> Any:
    kinds = _fields(kind)
    if not isinstance(value, dict) or not value.keys() <= kinds.keys():
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    try:
        return kind(**{name: _read(item, kinds[name]) for name, item in value.items()})
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _read_many(value: Any, origin: Any, items: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is no {origin.__name__}")
    if origin is tuple and items[-1] is not ...:
        return tuple(_read(item, kind) for item, kind in zip(value, items, strict=True))
    return _MANY[origin](_read(item, items[0]) for item in value)


def _read_one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _read(value, kind)
    raise ValueError(f"{value!r:.80} is none of {', '.join(getattr(k, '__name__', str(k)) for k in kinds)}")


_UNIONS = (Union, getattr(types, "UnionType", Union))  # A | B is a type of its own from Python 3.10 on
_MANY: dict[Any, Any] = {list: list, tuple: tuple, set: set}


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields. `A | B` in them is read as such before Python 3.10 too."""
    names = {**vars(sys.modules[kind.__module__]), "_Union": Union}
    return {field.name: _evaluated(field.type, names) for field in dataclasses.fields(kind)}


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    tree = _Unions().visit(ast.parse(annotation, mode="eval"))
    code = compile(ast.fix_missing_locations(tree), "<annotation>", "eval")
    return eval(code, names)  # nosec B307 # an annotation of our own source


class _Unions(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        either = ast.Tuple([node.left, node.right], ast.Load())
        return ast.Subscript(ast.Name("_Union", ast.Load()), either, ast.Load())
