"""Rows of the database, as what they are: others of a group may have written them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from hpcsched.decoding import convert
from hpcsched.errors import BadInput, StoreError
from hpcsched.printing import printable

T = TypeVar("T")


def entries(path: Path, kind: type[T], rows: Iterable[Mapping[Any, Any]]) -> tuple[T, ...]:
    """The rows of the database at `path` as a dataclass; `_at` ends the names of times. Raises StoreError."""
    found = []
    try:
        for row in rows:
            for name, value in row.items():
                if name.endswith("_at") and value is not None:
                    datetime.fromisoformat(value)
            found.append(convert(dict(row), kind))
    except (BadInput, ValueError, TypeError) as error:
        raise StoreError(f"{path}: holds a bad {kind.__name__}: {printable(str(error))}") from error
    return tuple(found)
