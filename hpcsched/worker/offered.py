"""The descriptors that a program is offered, if they are still what was meant."""

from __future__ import annotations

import os

from hpcsched.worker.variables import Variables


def offered(read: Variables, name: str) -> int | None:
    """The descriptor of HPCSCHED_<name>_FD, if what is open there is what HPCSCHED_<name>_ID says.

    A launcher closes what it does not know, and the programs that it starts open files of their own under the
    same number. None if it is gone, or was not offered. Raises ConfigError for what is no number.
    """
    number, identity = read.maybe(f"HPCSCHED_{name}_FD"), read.text(f"HPCSCHED_{name}_ID")
    if number is None or identity is None:
        return number
    try:
        seen = os.fstat(number)
    except (OSError, OverflowError):
        return None
    return number if f"{seen.st_dev}:{seen.st_ino}" == identity else None
