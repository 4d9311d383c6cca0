"""Names for jobs that were given none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

MOST = 64
"""Characters that a job's name may have."""

LONGEST = 50
"""Characters of a name that is made here: there is room for a number."""


def function(called: Any) -> str:
    """The name of a function, or of the class of an object that is called as one."""
    while isinstance(called, partial):
        called = called.func
    return str(getattr(called, "__name__", None) or type(called).__name__).strip("<>")


def fit(name: str) -> str:
    """The name with nothing in it that a job's may not have."""
    found = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:LONGEST]
    return found if found and found.isascii() else "job"


def labelled(name: str, label: str) -> str:
    """The name of a job of the array `name`: what a name may not have is "-", what is too much is cut off."""
    return f"{name}-{re.sub(r'[^A-Za-z0-9._-]', '-', label)}"[:MOST]


def numbered(name: str, taken: Collection[str]) -> Iterator[str]:
    """The name, then with numbers from 2: one of them is not taken."""
    yield name
    yield from (f"{name}-{number}" for number in range(2, len(taken) + 3))
