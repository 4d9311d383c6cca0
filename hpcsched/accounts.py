"""The name of the user."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """The name of the user; the uid where there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError: from Python 3.13 on
        return str(os.getuid())
