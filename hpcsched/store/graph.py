"""The codec of graphs of objects: of what the core is made of, and of nothing else.

Containers, enums, instances and bound methods become plain values for msgpack. Which classes there may be is
told by where they are defined; only these are ever looked up, by name, and no code of theirs runs but the
constructors of records. Objects that are in several places of a graph are one and the same in all of them
afterwards, as are equal ones of the kinds that are said to be shared, in all graphs with the same tables.

A value is itself (None, a boolean, a number, text, bytes), or a list of a number that says what it is and of
its parts. The objects of a graph are counted as they come: records after their fields, others before what is
in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from importlib import import_module
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple

import msgspec

from hpcsched.errors import BadInput

ROOMS = ("hpcsched.core.", "hpcsched.policy.", "hpcsched.contract.seats.")
"""Where classes are defined that may be in a graph."""

_REF, _TUPLE, _LIST, _SET, _FROZENSET, _DICT, _COUNTER = range(7)
_INT, _ENUM, _CLASS, _METHOD, _EXTERNAL, _SHARED, _APART = range(7, 14)
_INSTANCE = 14
"""From this on: an instance of a class, by the number of the class."""

_ALIKE = (str, int)
"""Equal ones may be one and the same or not, as the interpreter likes."""

_UNFINISHED = -1
"""In place of its number: a record whose fields are being encoded."""

_WRONG = (LookupError, TypeError, ValueError, AttributeError, ImportError, RecursionError)


class NotPlain(TypeError):
    """There is something in a graph that this codec does not take."""


class Tables(msgspec.Struct, array_like=True):
    """What the values of several graphs refer to by number: classes and members of enums by their names, and
    values that they share. They only grow."""

    classes: list[str] = []
    enums: list[tuple[int, str]] = []
    shared: list[Any] = []


# -- classes -------------------------------------------------------------------------------------------------


class _Record(NamedTuple):
    """A class whose constructor makes its instances again: the names of its fields, and by field what it is
    where nothing is said (`usual`), or what makes that."""

    names: tuple[str, ...]
    usual: tuple[Any, ...]
    makers: tuple[Callable[[], Any] | None, ...]


@cache
def _record(kind: Any) -> _Record | None:
    """A class as a record; None if there may be more in an instance than its constructor takes."""
    if any("__dict__" in vars(base) for base in kind.__mro__) or not is_dataclass(kind):
        return None
    found = fields(kind)
    if not all(field.init for field in found):
        return None
    makers = (None if one.default_factory is MISSING else one.default_factory for one in found)
    return _Record(tuple(one.name for one in found), tuple(one.default for one in found), tuple(makers))


@cache
def _slots(kind: Any) -> list[str]:
    """The names of the slots of a class, as they are called from outside."""
    names = list[str]()
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names


def _may_be(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(ROOMS) and "<locals>" not in kind.__qualname__


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    if not f"{module}.".startswith(ROOMS):
        raise ValueError(f"no class of the core: {name[:100]}")
    found: Any = import_module(module)
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or found.__module__ != module or found.__qualname__ != path:
        raise ValueError(f"no class: {name[:100]}")
    return found


def _member(kind: type, name: str) -> Enum:
    if not issubclass(kind, Enum):
        raise TypeError(f"{kind.__qualname__} is no enum")
    return kind[name]


def _method(owner: Any, name: str) -> Callable[..., Any]:
    """A bound method of an object in the graph; of a set only `add`."""
    if type(owner) is set and name == "add":
        return owner.add
    for base in type(owner).__mro__:
        function = vars(base).get(name)
        if isinstance(function, FunctionType) and _may_be(base):
            return MethodType(function, owner)
    raise ValueError(f"no method: {name[:100]}")


# -- there ---------------------------------------------------------------------------------------------------


class Encoder:
    """Makes values of graphs.

    Args:
        tables: those of an earlier encoder, which this one goes on with.
        externals: objects that whoever decodes has too, by name.
        shared: kinds of immutable objects; equal ones are to be one.
        apart: by kind, what gives the number of an object that is a graph of its own (None: it is none).
    """

    def __init__(
        self,
        tables: Tables,
        externals: Mapping[str, Any],
        *,
        shared: tuple[type, ...] = (),
        apart: Mapping[type, Callable[[Any], int | None]] | None = None,
    ) -> None:
        self.tables = tables
        classes = [_class(name) for name in tables.classes]
        self._externals = {id(one): name for name, one in externals.items()}
        self._class_numbers = {kind: number for number, kind in enumerate(classes)}
        self._enum_numbers = {
            _member(classes[kind], name): number for number, (kind, name) in enumerate(tables.enums)
        }
        self._shared_numbers = {
            msgspec.msgpack.encode(value): number for number, value in enumerate(tables.shared)
        }
        self._root: Any = None
        self._seen: dict[int, int] = {}
        self._count = 0
        self._by_type: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys((type(None), bool, float, str, bytes), lambda value: value),
            int: _int,
            tuple: lambda value: [_TUPLE, *map(self.value, value)],
            frozenset: lambda value: [_FROZENSET, *map(self.value, _in_order(value))],
            list: lambda value: self._container(_LIST, value, value),
            set: lambda value: self._container(_SET, value, _in_order(value)),
            dict: lambda value: self._container(_DICT, value, _flat(value)),
            Counter: lambda value: self._container(_COUNTER, value, _flat(value)),
            MethodType: self._bound,
            BuiltinMethodType: self._bound,
        }
        for kind in shared:
            self._by_type[kind] = partial(self._shared, self._encoder_of(kind))
        for kind, number_of in (apart or {}).items():
            self._by_type[kind] = partial(self._apart, self._encoder_of(kind), number_of)

    def graph(self, root: Any) -> Any:
        """The value of a graph. Raises NotPlain."""
        self._root, self._seen, self._count = root, {}, 0
        try:
            return self.value(root)
        except RecursionError as error:
            raise NotPlain("too deep") from error
        finally:
            self._root, self._seen = None, {}

    def value(self, value: Any) -> Any:
        """The value of an object in the graph."""
        kind = type(value)
        if encode := self._by_type.get(kind):
            return encode(value)
        if name := self._externals.get(id(value)):
            return [_EXTERNAL, name]
        if isinstance(value, type):
            return [_CLASS, self._class_number(value)]
        self._by_type[kind] = encode = self._encoder_of(kind)
        return encode(value)

    def _encoder_of(self, kind: Any) -> Callable[[Any], Any]:
        tag = _INSTANCE + self._class_number(kind)
        if issubclass(kind, Enum):
            return self._enum
        if issubclass(kind, tuple) and hasattr(kind, "_make"):
            return lambda value: [tag, *map(self.value, value)]
        if issubclass(kind, dict):
            return lambda value: self._mapping(tag, value)
        if issubclass(kind, (list, set, frozenset, tuple, str, bytes, int, float)):
            raise NotPlain(f"a {kind.__qualname__}")
        if record := _record(kind):
            return lambda value: self._of_record(tag, record, value)
        return lambda value: self._instance(tag, value)

    def _class_number(self, kind: type) -> int:
        if kind not in self._class_numbers:
            if not _may_be(kind):
                raise NotPlain(f"{kind.__module__}.{kind.__qualname__} is no class of the core")
            self._class_numbers[kind] = len(self.tables.classes)
            self.tables.classes.append(f"{kind.__module__}:{kind.__qualname__}")
        return self._class_numbers[kind]

    def _number(self, value: Any) -> None:
        self._seen[id(value)] = self._count
        self._count += 1

    def _again(self, value: Any) -> list[int] | None:
        number = self._seen.get(id(value))
        if number is None:
            return None
        if number == _UNFINISHED:
            raise NotPlain(f"a {type(value).__qualname__} that is within itself")
        return [_REF, number]

    def _seen_before(self, value: Any) -> list[int] | None:
        """What refers to an object; None, and it is counted, where it comes for the first time."""
        if (again := self._again(value)) is None:
            self._number(value)
        return again

    def _enum(self, value: Enum) -> list[int]:
        number = self._enum_numbers.get(value)
        if number is None:
            number = self._enum_numbers[value] = len(self.tables.enums)
            self.tables.enums.append((self._class_number(type(value)), value.name))
        return [_ENUM, number]

    def _shared(self, encode: Callable[[Any], Any], value: Any) -> list[int]:
        seen, count = self._seen, self._count
        self._seen, self._count = {}, 0  # a graph of its own
        found = encode(value)
        self._seen, self._count = seen, count
        number = self._shared_numbers.setdefault(msgspec.msgpack.encode(found), len(self.tables.shared))
        if number == len(self.tables.shared):
            self.tables.shared.append(found)
        return [_SHARED, number]

    def _apart(self, encode: Callable[[Any], Any], number_of: Callable[[Any], int | None], value: Any) -> Any:
        if value is not self._root and (number := number_of(value)) is not None:
            return [_APART, number]
        return encode(value)

    def _container(self, tag: int, value: Any, parts: Any) -> list[Any]:
        return self._seen_before(value) or [tag, *map(self.value, parts)]

    def _bound(self, value: Any) -> list[Any]:
        owner, name = value.__self__, value.__name__
        try:
            known = _method(owner, name) == value
        except ValueError:
            known = False
        if not known:
            raise NotPlain(f"the method {name} of a {type(owner).__qualname__}")
        return [_METHOD, self.value(owner), name]

    def _of_record(self, tag: int, record: _Record, value: Any) -> list[Any]:
        if again := self._again(value):
            return again
        self._seen[id(value)] = _UNFINISHED
        found: list[Any] = [tag]
        for number, (name, usual, make) in enumerate(zip(*record, strict=True)):
            part = getattr(value, name)
            usual = make() if make else usual
            if part is not usual and not (type(part) in _ALIKE and part == usual):
                found += (number, self.value(part))
        self._number(value)
        return found

    def _instance(self, tag: int, value: Any) -> list[Any]:
        return self._seen_before(value) or [tag, *self._attributes(value)]

    def _mapping(self, tag: int, value: Any) -> list[Any]:
        again = self._seen_before(value)
        return again or [tag, self._attributes(value), *map(self.value, _flat(value))]

    def _attributes(self, value: Any) -> list[Any]:
        parts = {name: getattr(value, name) for name in _slots(value.__class__) if hasattr(value, name)}
        parts |= getattr(value, "__dict__", {})
        found = list[Any]()
        for name, part in parts.items():
            found += (name, self.value(part))
        return found


def _int(value: int) -> Any:
    return value if -(2**63) <= value < 2**64 else [_INT, str(value)]


def _in_order(value: Collection[Any]) -> Collection[Any]:
    """What is in a set, always in the same order if it has one: the core asks for none."""
    try:
        return sorted(value)
    except TypeError:
        return value


def _flat(value: dict[Any, Any]) -> Iterator[Any]:
    for item in dict.items(value):  # whatever its class makes of that
        yield from item


# -- and back ------------------------------------------------------------------------------------------------


class Decoder:
    """Makes graphs of values again.

    `apart` gives the object of a number that is a graph of its own. Raises BadInput.
    """

    def __init__(
        self, tables: Tables, externals: Mapping[str, Any], *, apart: Callable[[int], Any] | None = None
    ) -> None:
        self._externals, self._seen = externals, list[Any]()
        with _as_bad_input():
            self._classes = [_class(name) for name in tables.classes]
            self._enums = [_member(self._classes[_index(kind)], name) for kind, name in tables.enums]
        self._by_tag: list[Callable[[list[Any]], Any]] = [
            lambda parts: self._seen[_index(parts[1])],
            lambda parts: tuple(map(self._value, parts[1:])),
            self._list,
            self._set,
            lambda parts: frozenset(map(self._value, parts[1:])),
            lambda parts: self._dict({}, parts),
            lambda parts: self._dict(Counter[Any](), parts),
            lambda parts: int(parts[1]),
            lambda parts: self._enums[_index(parts[1])],
            lambda parts: self._classes[_index(parts[1])],
            lambda parts: _method(self._value(parts[1]), parts[2]),
            lambda parts: self._externals[parts[1]],
            lambda parts: self._shared[_index(parts[1])],
            lambda parts: self._apart(parts[1], apart),
            *map(self._decoder_of, self._classes),
        ]
        self._shared = list[Any]()
        for value in tables.shared:
            self._shared.append(self.graph(value))

    def graph(self, value: Any) -> Any:
        """The root of a graph."""
        seen, self._seen = self._seen, []
        with _as_bad_input():
            found = self._value(value)
        self._seen = seen
        return found

    def _value(self, value: Any) -> Any:
        return self._by_tag[_index(value[0])](value) if type(value) is list else value

    def _apart(self, number: Any, find: Callable[[int], Any] | None) -> Any:
        if find is None:
            raise ValueError("nothing is apart here")
        return find(_index(number))

    def _list(self, parts: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._seen.append(made)
        made.extend(map(self._value, parts[1:]))
        return made

    def _set(self, parts: list[Any]) -> set[Any]:
        made: set[Any] = set()
        self._seen.append(made)
        made.update(map(self._value, parts[1:]))
        return made

    def _dict(self, made: dict[Any, Any], parts: list[Any]) -> dict[Any, Any]:
        self._seen.append(made)
        self._fill(made, parts, 1)
        return made

    def _decoder_of(self, kind: Any) -> Callable[[list[Any]], Any]:
        if issubclass(kind, tuple) and hasattr(kind, "_make"):
            make: Callable[..., Any] = kind._make
            return lambda parts: make(map(self._value, parts[1:]))
        if issubclass(kind, dict):
            return lambda parts: self._mapping(kind, parts)
        if record := _record(kind):
            return lambda parts: self._of_record(kind, record.names, parts)
        return lambda parts: self._instance(kind, parts)

    def _of_record(self, kind: type, names: tuple[str, ...], parts: list[Any]) -> Any:
        value = self._value
        said = {names[parts[n]]: value(parts[n + 1]) for n in range(1, len(parts), 2)}
        made = kind(**said)
        self._seen.append(made)
        return made

    def _instance(self, kind: Any, parts: list[Any]) -> Any:
        made = kind.__new__(kind)
        self._seen.append(made)
        self._set_attributes(made, parts, 1)
        return made

    def _mapping(self, kind: Any, parts: list[Any]) -> Any:
        made = kind.__new__(kind)
        self._seen.append(made)
        self._set_attributes(made, parts[1], 0)
        self._fill(made, parts, 2)
        return made

    def _fill(self, made: dict[Any, Any], parts: list[Any], first: int) -> None:
        value = self._value
        for n in range(first, len(parts), 2):
            key = value(parts[n])
            dict.__setitem__(made, key, value(parts[n + 1]))

    def _set_attributes(self, made: object, parts: list[Any], first: int) -> None:
        for n in range(first, len(parts), 2):
            name = parts[n]
            if type(name) is not str or name.startswith("__"):
                raise ValueError("no attribute")
            object.__setattr__(made, name, self._value(parts[n + 1]))


def _index(number: Any) -> int:
    """A place in a table: Python's own would count from the end where it is negative."""
    if type(number) is not int or number < 0:
        raise ValueError("a number is wrong")
    return number


class _as_bad_input:  # noqa: N801 - a generator would cost more than a small graph
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _WRONG) and not isinstance(error, BadInput):
            raise BadInput(f"{type(error).__name__}: {str(error)[:200]}") from error
