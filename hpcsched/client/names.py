"""Names for jobs that were given none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MOST = 64
"""Characters that a job's name may have."""

LONGEST = 50
"""Characters of a name that is made here: there is room for a number."""


def program(words: Sequence[str]) -> str:
    """The name of a command's program: of a script behind its interpreter, the script's."""
    first, *rest = words
    if re.fullmatch(r"python[\d.]*|bash|sh", Path(first).name):
        if "-m" in rest[:-1]:
            return rest[rest.index("-m") + 1].rpartition(".")[2]
        script = next((word for word in rest if not word.startswith("-")), "")
        if script.endswith((".py", ".sh")):
            return Path(script).stem
    return Path(first).name


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
