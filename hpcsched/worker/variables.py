"""Environment variables with types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hpcsched.errors import ConfigError

_Number = TypeVar("_Number", int, float)


class Variables:
    """Reads them; the empty string counts as absent. Raises ConfigError naming the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def needed(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise ConfigError(where="environment", key=name, got="not set", accepted="a value")
        return value

    def number(self, name: str, kind: Callable[[str], _Number], default: _Number | None = None) -> _Number:
        value = self.text(name)
        if value is None and default is not None:
            return default
        try:
            return kind(self.needed(name))
        except ValueError:
            raise ConfigError(where="environment", key=name, got=repr(value), accepted="a number") from None

    def maybe(self, name: str) -> int | None:
        return None if self.text(name) is None else self.number(name, int)

    def table(self, name: str, default: dict[str, Any]) -> dict[str, Any]:
        value = self.text(name)
        if value is None:
            return default
        try:
            table = json.loads(value)
        except ValueError:
            table = None
        if not isinstance(table, dict):
            raise ConfigError(where="environment", key=name, got=repr(value), accepted="a JSON object")
        return table
