"""The distance of two configurations (section 5.3).

The paper speaks of Euclid's distance, but its worked example adds up the axes' differences: batch sizes 20
and 40 of Table 3 lie 4 places apart, another optimizer counts 1, and the distance is 5. So does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any, TypeGuard

from hpcsched.errors import ConfigError
from hpcsched.planning.json_reader import MAX_NUMBER, JsonReader
from hpcsched.planning.packing.speeds import PackMember

CONTINUOUS_STEPS = 10
"""The length of a continuous axis, in steps between values (chosen)."""

AxisPlace = float | str | None
"""The place of a configuration on an axis: a number, a category, or none (it has no such key)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceAxis:
    """One hyper-parameter.

    Args:
        name: its key in `PackMember.config`; `model` and `batch` are those of the member if it is not there.
        kind: "categorical": 0 apart if the same, else 1. "numeric": as many apart as there are places between
            the two in `values`, or by tenths of the range from `low` to `high`.
        values: of a numeric axis with a few values, ascending.
        log: the range is measured in its logarithm.
    """

    name: str
    kind: str = "categorical"
    values: tuple[float, ...] | None = None
    log: bool = False
    low: float | None = None
    high: float | None = None

    def place(self, member: PackMember) -> AxisPlace:
        """The member's place on the axis. Raises ConfigError if it lies outside."""
        value: Any = member.config.get(self.name)
        if value is None and self.name in ("model", "batch"):
            value = getattr(member, self.name)
        if value is None:
            return None
        if self.kind == "categorical":
            return repr(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(member, value, "a number")
        if self.values is not None:
            if value not in self.values:
                self._refuse(member, value, f"one of {', '.join(f'{x:g}' for x in self.values)}")
            return float(self.values.index(value))
        assert self.low is not None and self.high is not None
        if not self.low <= value <= self.high:
            self._refuse(member, value, f"from {self.low:g} to {self.high:g}")
        if self.log:
            return float(CONTINUOUS_STEPS * log(value / self.low) / log(self.high / self.low))
        return float(CONTINUOUS_STEPS * (value - self.low) / (self.high - self.low))

    def _refuse(self, member: PackMember, value: Any, accepted: str) -> None:
        where = f"member {member.name!r}"
        raise ConfigError(where=where, key=f"config.{self.name}", got=repr(value)[:200], accepted=accepted)

    @classmethod
    def parse(cls, value: Any, *, where: str, key: str = "axis") -> DistanceAxis:
        """An axis of its JSON form. Raises ConfigError naming the key that is wrong."""
        read = JsonReader(where)
        row = read.table(value, key, ("name", "kind", "values", "log", "low", "high"))
        name = read.text(row.get("name"), f"{key}.name")
        kind = row.get("kind", "categorical")
        if kind not in ("categorical", "numeric"):
            read.refuse(f"{key}.kind", kind, "categorical or numeric")
        if kind == "categorical":
            return cls(name=name)
        values = row.get("values")
        if values is not None:
            numbers = isinstance(values, list) and all(map(_is_number, values))
            if not (numbers and values and sorted(set(values)) == values):
                read.refuse(f"{key}.values", values, "different numbers, ascending")
            return cls(name=name, kind=kind, values=tuple(values))
        low, high = row.get("low"), row.get("high")
        logarithmic = read.flag(row.get("log", False), f"{key}.log")
        if not (_is_number(low) and _is_number(high) and low < high):
            read.reject(key, f"low {low!r} and high {high!r}", "values, or two numbers low < high")
        if logarithmic and not low > 0:
            read.refuse(f"{key}.low", low, "a number above 0 on a logarithmic axis")
        return cls(name=name, kind=kind, log=logarithmic, low=float(low), high=float(high))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def axes_of(members: Sequence[PackMember]) -> tuple[DistanceAxis, ...]:
    """An axis for the model, the batch and every key of the members' configurations.

    Numeric if all values are numbers, with those that occur as its values; else categorical.
    """
    found: dict[str, list[Any]] = {"model": [], "batch": []}
    for member in members:
        for name, value in ({"model": member.model, "batch": member.batch} | dict(member.config)).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return tuple(
        DistanceAxis(name=name, kind="numeric", values=tuple(sorted(set(values))))
        if all(type(x) in (int, float) for x in values)
        else DistanceAxis(name=name)
        for name, values in found.items()
    )


def places(member: PackMember, axes: Sequence[DistanceAxis]) -> tuple[AxisPlace, ...]:
    """The member's place on each axis. Raises ConfigError if it lies outside of one."""
    return tuple(axis.place(member) for axis in axes)


def apart(one: Sequence[AxisPlace], other: Sequence[AxisPlace]) -> float:
    """The distance between two configurations by their places on the same axes, summed over the axes.

    Where one of them has no place on an axis, they are 1 apart.
    """
    total = 0.0
    for a, b in zip(one, other, strict=True):
        if isinstance(a, float) and isinstance(b, float):
            total += abs(a - b)
        elif a != b:
            total += 1.0
    return total
