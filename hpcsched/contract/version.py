"""The version of the contract, and which versions get along.

The major number changes when something that was said is said no more, or means something else; the minor one
when something is added. Either side passes over what it does not know, and does without what it is not told:
so the same major number fits, with a minor number that is at most one older or one newer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcsched.errors import BadInput

_WRITTEN = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})", re.ASCII)


class Version(NamedTuple):
    """A version of the contract, written "1.0"."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version that is written so. Raises BadInput."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise BadInput(f"{text[:40]!r} is no version of the contract, such as {VERSION}")
        return cls(int(found[1]), int(found[2]))


VERSION = Version(1, 1)
"""Of this package."""


def fits(theirs: Version, ours: Version = VERSION) -> str | None:
    """None where both can work with each other; else in one line what is there, and what is needed."""
    if theirs.major == ours.major and abs(theirs.minor - ours.minor) <= 1:
        return None
    least, most = Version(ours.major, max(0, ours.minor - 1)), Version(ours.major, ours.minor + 1)
    return f"version {theirs} of the contract is there; {least} to {most} is needed"
