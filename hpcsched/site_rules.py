"""What a site has fixed for its users: settings that are locked, and limits of others. Pure.

A guard rail and no wall: programs run as the user, who can install a scheduler of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsched.contract.schema import Accepted, check, many, number, printed, table
from hpcsched.errors import ConfigError
from hpcsched.patience import patiently

LIMIT_KEYS = {
    "least": number("the least that is accepted: a number"),
    "most": number("the most that is accepted: a number"),
    "below": many(printed(""), "a list of absolute paths of folders", least=1),
}
"""What may stand in a limit of a setting."""

PLACES = ("checkpoints", "dir")
"""Settings that are places, which alone have limits with `below`."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What is accepted of one setting, by which file."""

    file: str
    least: float | None = None
    most: float | None = None
    below: Sequence[str] = ()

    def __str__(self) -> str:
        if self.below:
            return "a place below " + " or ".join(self.below)
        words = [f"at least {self.least:g}"] if self.least is not None else []
        words += [f"at most {self.most:g}"] if self.most is not None else []
        return " and ".join(words)

    def nearest(self, value: Any) -> Any:
        """The accepted number that is nearest to a number; places, and what is no number, as they are."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        for bound, passed in ((self.least, min), (self.most, max)):
            if bound is not None and passed(value, bound) != bound:
                value = type(value)(bound)
        return value

    def admits(self, value: Any) -> bool:
        """Whether a value is accepted. Links in a place are followed."""
        if not self.below:
            return bool(self.nearest(value) == value)
        real = _real(value)
        roots = map(_real, self.below)
        return any(real == root or real.startswith(f"{root.rstrip('/')}/") for root in roots)


def _real(path: str) -> str:
    """A path without links; of one that is not there as far as it is."""
    try:
        return patiently(lambda: os.path.realpath(path, strict=True))
    except OSError:
        return os.path.realpath(path)


@dataclass
class SiteRules:
    """By setting the file that has locked it, the value that it has there (none: nobody sets it), and its
    limit."""

    locked: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Limit] = field(default_factory=dict)

    def take(self, given: dict[str, Any], keys: Mapping[str, Accepted], *, file: str) -> None:
        """Take `locked` and `limits` out of a file's settings. Raises ConfigError for what is not right."""
        locked, limits = given.pop("locked", []), given.pop("limits", {})
        names = [key for key in keys if key not in ("dir", "script")]
        accepted = {"locked": many(printed(""), f"a list of settings ({', '.join(names)})")}
        accepted["limits"] = table("a table of settings, each with least, most or below")
        check({"locked": locked, "limits": limits}, accepted, where=file)
        for key in locked:
            if key not in names:
                raise ConfigError(
                    where=file, key="locked", got=repr(key), accepted=f"settings: {', '.join(names)}"
                )
            self.locked[key] = file
        for key, about in limits.items():
            self.limits[key] = _limit(key, about, keys, file)
            if key in given and not self.limits[key].admits(given[key]):
                got = f"{given[key]!r}, beside its own limit"
                raise ConfigError(where=file, key=key, got=got, accepted=str(self.limits[key]))

    def add(self, others: SiteRules, values: Mapping[str, Any]) -> None:
        """Add the rules of a further file, with `values` in force; those that are there stay."""
        for key, file in others.locked.items():
            if key not in self.locked:
                self.locked[key] = file
                if key in values:
                    self.values[key] = values[key]
        self.limits = {**others.limits, **self.limits}

    def check(self, key: str, value: Any, *, where: str, place: str = "") -> None:
        """Raise ConfigError for a value that is not admitted; `where` it is said, and `place` in that."""
        if accepted := self.instead(key, value):
            raise ConfigError(where=where, key=place, got=_shown(value), accepted=accepted)

    def check_limit(self, key: str, value: Any, *, where: str) -> None:
        """Raise ConfigError for a value beyond the key's limit that nobody has set: locks do not count."""
        if accepted := self._beyond(key, value):
            raise ConfigError(where=where, got=_shown(value), accepted=accepted)

    def instead(self, key: str, value: Any) -> str:
        """What is accepted in the place of a value, and who says so; "": it is admitted."""
        if key in self.locked and (key not in self.values or not _same(self.values[key], value)):
            site = _shown(self.values[key]) if key in self.values else "no value, so that the default counts"
            return f"{site} ({self.locked[key]} has locked {key})"
        return self._beyond(key, value)

    def _beyond(self, key: str, value: Any) -> str:
        """What the limit accepts in the place of a value; "": it is admitted."""
        limit = self.limits.get(key)
        return "" if limit is None or limit.admits(value) else f"{limit} (a limit of {limit.file})"

    def nearest(self, key: str, value: Any) -> Any:
        """What counts where nobody insists on a number: the nearest that is accepted."""
        return self.limits[key].nearest(value) if key in self.limits else value


def _limit(key: str, about: Any, keys: Mapping[str, Accepted], file: str) -> Limit:
    where = f"limits.{key}"
    numbers = [name for name, way in keys.items() if way.schema.get("type") in ("integer", "number")]
    if key not in numbers and key not in PLACES:
        accepted = f"a setting with limits: {', '.join([*numbers, *PLACES])}"
        raise ConfigError(where=file, key=where, got="not one", accepted=accepted)
    names = ("below",) if key in PLACES else ("least", "most")
    if not isinstance(about, dict) or not about:
        raise ConfigError(
            where=file, key=where, got=repr(about), accepted=f"a table with {' or '.join(names)}"
        )
    check(about, {name: LIMIT_KEYS[name] for name in names}, where=file, prefix=f"{where}.")
    limit = Limit(file=file, **about)
    for folder in limit.below:
        if not folder.startswith("/"):
            raise ConfigError(where=file, key=f"{where}.below", got=repr(folder), accepted="absolute paths")
    if limit.least is not None and limit.most is not None and limit.least > limit.most:
        raise ConfigError(
            where=file, key=where, got=str(limit), accepted="a least that is not above the most"
        )
    return limit


def _same(one: Any, other: Any) -> bool:
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(part) for part in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
