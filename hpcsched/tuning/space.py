"""Search spaces: what may be chosen for each argument of a trainer, and samples that any machine repeats.

Samples come from `random.Random(text).random()` alone, whose sequence Python promises to keep, and from
arithmetic that gives the same last bit everywhere.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context
from typing import Any, Literal, NoReturn

from hpcsched.errors import ConfigError

Value = int | float | str | bool
Config = dict[str, Value]
"""One configuration: a value for each argument, by name."""

KINDS = {
    "log": "{ log = [a, b] } with 0 < a < b",
    "uniform": "{ uniform = [a, b] } with a < b",
    "int": "{ int = [a, b] } with whole numbers a < b",
    "choice": "{ choice = [...] } with numbers, texts, true or false, none of them twice",
}
_ANY = "one of { log = [a, b] }, { uniform = [a, b] }, { int = [a, b] }, { choice = [...] }"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EXACT = Context(prec=25)
_BITS = 53  # of one random number
_TENTHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What one argument may be.

    `values` are those of a choice, in the order written, or of an `int` that has only a few; `low` and `high`
    are the bounds of the kinds but choice, both allowed. `log`: even in the logarithm.
    """

    name: str
    written: Literal["log", "uniform", "int", "choice"]
    values: tuple[Value, ...] = ()
    low: float | int = 0
    high: float | int = 0

    @property
    def kind(self) -> Literal["categorical", "numeric"]:
        """A choice among numbers is numeric: its values have an order, that in which they are written."""
        if self.written == "choice" and not all(type(value) in (int, float) for value in self.values):
            return "categorical"
        return "numeric"

    @property
    def log(self) -> bool:
        return self.written == "log"

    @property
    def size(self) -> int | None:
        """How many values there are (None: infinitely many)."""
        if self.values:
            return len(self.values)
        return int(self.high - self.low) + 1 if self.written == "int" else None

    def value(self, index: int) -> Value:
        """The value at `index`, 0 to size - 1, of a finite axis."""
        return self.values[index] if self.values else int(self.low) + index

    def draw(self, generator: random.Random) -> Value:
        """A value at random, all equally likely (or evenly spread)."""
        if self.size is not None:
            return self.value(_below(self.size, generator))
        share = generator.random()
        if self.log:
            # The C library's exp and log differ in the last bit between machines; decimal's are exact.
            low, high = (_EXACT.ln(_EXACT.create_decimal_from_float(x)) for x in (self.low, self.high))
            span = _EXACT.multiply(_EXACT.subtract(high, low), _EXACT.create_decimal_from_float(share))
            value = float(_EXACT.exp(_EXACT.add(low, span)))
        else:
            value = self.low * (1 - share) + self.high * share
        return min(max(value, float(self.low)), float(self.high))

    def coordinate(self, value: Value) -> float:
        """Where `value` lies, in units that compare between axes (pack, section 5.3).

        The paper counts the places between two values in the list of a hyperparameter. So does this where
        there are a few values, and counts tenths of the range (of its logarithm) otherwise.
        """
        if self.values:
            return float(self.values.index(value))
        number = float(value)
        if self.log:
            return _TENTHS * math.log(number / self.low) / math.log(self.high / self.low)
        return _TENTHS * (number - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All configurations a search may try: the product of its axes, in the order written."""

    parameters: tuple[Axis, ...]

    @property
    def size(self) -> int | None:
        """How many configurations there are (None: infinitely many)."""
        sizes = [axis.size for axis in self.parameters]
        return math.prod(size for size in sizes if size is not None) if None not in sizes else None

    def axes(self) -> list[Axis]:
        """The axes, for distances between configurations; see `coordinates`."""
        return list(self.parameters)

    def coordinates(self, config: Mapping[str, Any]) -> tuple[float, ...]:
        """Where `config` lies on each axis; on categorical axes only equal or not equal means anything."""
        return tuple(axis.coordinate(config[axis.name]) for axis in self.parameters)

    def configuration(self, index: int) -> Config:
        """The configuration at `index`, 0 to size - 1, of a finite space; the last axis changes fastest."""
        config: Config = {}
        for axis in reversed(self.parameters):
            index, place = divmod(index, axis.size or 1)
            config[axis.name] = axis.value(place)
        return dict(reversed(config.items()))

    def grid(self) -> Iterator[Config]:
        """Every configuration of a finite space, the last axis changing fastest."""
        return map(self.configuration, range(self.size or 0))

    def sample(self, count: int, seed: int) -> list[Config]:
        """`count` configurations at random; the first k are the same whatever the count.

        A finite space is drawn from without replacement: with no more than `count` configurations in it, all
        of them once.
        """
        if (size := self.size) is None:
            generators = (_generator(seed, trial) for trial in range(count))
            return [{axis.name: axis.draw(generator) for axis in self.parameters} for generator in generators]
        # A shuffle that goes only as far as asked: `moved` holds those places whose number is not their own.
        moved: dict[int, int] = {}
        drawn: list[Config] = []
        for trial in range(min(count, size)):
            place = trial + _below(size - trial, _generator(seed, trial))
            drawn.append(self.configuration(moved.get(place, place)))
            moved[place] = moved.pop(trial, trial)
        return drawn


def _generator(seed: int, trial: int) -> random.Random:
    return random.Random(f"{seed}/{trial}")


def _below(count: int, generator: random.Random) -> int:
    """A whole number at random, 0 to count - 1, from as many random bits as make all of them likely."""
    whole, bits = 0, 0
    while bits < count.bit_length() + _BITS:
        whole = whole << _BITS | int(generator.random() * 2**_BITS)
        bits += _BITS
    return whole * count >> bits


def parse_space(table: object, *, where: str) -> Space:
    """The space that a [space] table describes; ConfigError (file `where`, key) if it describes none."""
    if not isinstance(table, Mapping) or not table:
        _refuse(where, "space", repr(table) if table else "no arguments", "a table of what may be chosen")
    return Space(parameters=tuple(_axis(name, given, where) for name, given in table.items()))


def _axis(name: str, given: object, where: str) -> Axis:
    key = f"space.{name}" if name.isprintable() else f"space.{name!r}"
    if not _NAME.fullmatch(name):
        _refuse(where, key, repr(name), "names of 1 to 64 of A-Z a-z 0-9 _, no digit first")
    if not isinstance(given, Mapping):
        _refuse(where, key, repr(given), _ANY)
    if len(given) != 1:
        _refuse(where, key, " and ".join(map(str, given)) or "none of them", _ANY)
    [(written, value)] = given.items()
    if written not in KINDS:
        _refuse(where, key, f"unknown kind {written!r}", _ANY)
    accepted = KINDS[written]
    if not isinstance(value, list):
        _refuse(where, key, repr(given), accepted)
    for entry in value:
        if type(entry) is float and not math.isfinite(entry):
            _refuse(where, key, f"{entry!r} in {value!r}", f"finite numbers: {accepted}")
        if type(entry) is int and not -(2**63) <= entry < 2**63:
            _refuse(where, key, repr(entry), f"numbers of 64 bits: {accepted}")
    if written == "choice":
        _check_choice(value, where, key)
        return Axis(name=name, written="choice", values=tuple(value))
    types = (int,) if written == "int" else (int, float)
    if len(value) != 2 or not all(type(entry) in types for entry in value):
        _refuse(where, key, repr(value), accepted)
    low, high = value
    if not low < high or (written == "log" and low <= 0):
        _refuse(where, key, repr(value), accepted)
    few = written == "int" and high - low <= _TENTHS
    return Axis(
        name=name, written=written, low=low, high=high, values=tuple(range(low, high + 1)) if few else ()
    )


def _check_choice(values: Sequence[object], where: str, key: str) -> None:
    if not values:
        _refuse(where, key, "nothing to choose from", KINDS["choice"])
    seen = set()
    for value in values:
        if not isinstance(value, Value):
            _refuse(where, key, repr(value), KINDS["choice"])
        # In Python true is 1; for a trainer it may well be something else.
        marked = (isinstance(value, bool), value)
        if marked in seen:
            _refuse(where, key, f"{value!r} twice", KINDS["choice"])
        seen.add(marked)


def _refuse(where: str, key: str, got: str, accepted: str) -> NoReturn:
    raise ConfigError(where=where, key=key, got=got, accepted=accepted)
