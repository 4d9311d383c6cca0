"""Names for jobs that were given none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from hpcsched.errors import ConfigError

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
    found = "".join(c if c.isalnum() or c in "._=-" else "-" for c in name)[:LONGEST]
    return found if found and found.isascii() else "job"


def labelled(name: str, label: str) -> str:
    """The name of a job of the array `name`: what a name may not have is "-", what is too much is cut off."""
    return f"{name}-{_fit(label)}"[:MOST]


def of_array(name: str, labels: Sequence[str], *, where: str) -> list[str]:
    """The names of an array's jobs. Raises ConfigError where two are the same only as they were cut off."""
    found, fitting = [labelled(name, label) for label in labels], {_fit(label) for label in labels}
    if len({*found}) < len(fitting):
        room = range(MOST - 2, 0, -1)
        fits = (most for most in room if len({label[: MOST - 1 - most] for label in fitting}) == len(fitting))
        most = next(fits, None)
        accepted = f"at most {most} characters" if most else "labels that differ in their first characters"
        got = f"too long with {len(name)} characters: two jobs have the same name up to character {MOST}"
        raise ConfigError(where=where, key="name", got=got, accepted=accepted)
    return found


def _fit(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]", "-", label)


def numbered(name: str, taken: Collection[str]) -> Iterator[str]:
    """The name, then with numbers from 2: one of them is not taken."""
    yield name
    yield from (f"{name}-{number}" for number in range(2, len(taken) + 3))
