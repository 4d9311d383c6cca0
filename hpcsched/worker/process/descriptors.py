"""The descriptors that a program is offered, if they are still what was meant."""

from __future__ import annotations

import os


def offered(number: int | None, identity: str | None) -> int | None:
    """This descriptor, if what is open there is what `identity` ("device:inode") says.

    A launcher closes what it does not know, and the programs that it starts open files of their own under the
    same number. None if it is gone, or was not offered.
    """
    if number is None or identity is None:
        return number
    try:
        seen = os.fstat(number)
    except (OSError, OverflowError):
        return None
    return number if f"{seen.st_dev}:{seen.st_ino}" == identity else None
