"""The name of the user."""

from __future__ import annotations

import getpass
import os
import pwd


def user_name() -> str:
    """The name of the user; the uid where there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError: from Python 3.13 on
        return str(os.getuid())


def name_of(uid: int | None) -> str:
    """The name of a user by id; the id where there is no name."""
    try:
        return f"user {uid}" if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
