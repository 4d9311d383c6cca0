"""Takes JSON apart; whatever is wrong is refused with its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from hpcsched.errors import ConfigError

MIN_NUMBER, MAX_NUMBER = 1e-12, 1e15
"""The least and the largest number that are taken for meant (chosen)."""

_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)


class JsonReader:
    """Reads values of one file, named `where` in errors. Every method raises ConfigError."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, key: str, got: object, accepted: str) -> NoReturn:
        """`got` is shown as it was written; None: it is missing."""
        found = "missing" if got is None else repr(got)[:200]
        raise ConfigError(where=self.where, key=key, got=found, accepted=accepted)

    def reject(self, key: str, words: str, accepted: str) -> NoReturn:
        """The same with what was found in words of our own."""
        raise ConfigError(where=self.where, key=key, got=words[:200], accepted=accepted)

    def table(self, value: Any, key: str, known: Collection[str]) -> Mapping[str, Any]:
        """A table with no other keys than the `known`."""
        if not isinstance(value, Mapping):
            self.refuse(key, value, f"a table with the keys {', '.join(known)}")
        for name in value:
            if name not in known:
                self.reject(key, f"unknown key {name!r}", f"the keys {', '.join(known)}")
        return value

    def rows(self, value: Any, key: str, *, least: int = 0) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            self.refuse(key, value, "a list of tables" + (f", at least {least}" if least else ""))
        return value

    def text(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not value:
            self.refuse(key, value, "text")
        return value

    def whole(self, value: Any, key: str) -> int:
        """A positive whole number."""
        if type(value) is not int or not 1 <= value <= MAX_NUMBER:
            self.refuse(key, value, "a positive whole number")
        return value

    def number(self, value: Any, key: str, what: str, *, above_0: bool = False) -> float:
        """A number of `what`, such as seconds: finite and not negative."""
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER
        if not right or (above_0 and value < MIN_NUMBER):
            self.refuse(key, value, f"{what}, above 0" if above_0 else f"{what}, 0 or more")
        return float(value)

    def flag(self, value: Any, key: str) -> bool:
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def counted(self, value: Any, key: str, what: str) -> dict[int, float]:
        """Numbers above 0 by the number of models, which JSON has as text."""
        if not isinstance(value, Mapping):
            self.refuse(key, value, f'a table of {what} by the number of models, such as {{"2": 31.5}}')
        for count in value:
            if not isinstance(count, str) or not _COUNT.fullmatch(count):
                self.refuse(key, count, "positive whole numbers as keys")
        found = {int(n): self.number(x, f"{key}.{n}", what, above_0=True) for n, x in value.items()}
        return dict(sorted(found.items()))
