"""--share GROUP: a run that the members of a group may watch, and not change."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpcsched.cli.common import option
from hpcsched.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_SHARE = "A group of yours that may watch the run (status, top, explain, report, metrics, logs)."


def share_option(command: F) -> F:
    return option("--share", metavar="GROUP", help=_SHARE)(command)


def group_of(name: str) -> int:
    """The id of a group of this user's. Raises ConfigError."""
    mine = {os.getegid(), *os.getgroups()}
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        found = None
    if found not in mine:
        names = []
        for number in sorted(mine):
            try:
                names.append(grp.getgrgid(number).gr_name)
            except KeyError:
                continue
        got = f"{name!r}, which is {'no group' if found is None else 'no group of yours'}"
        raise ConfigError(where="--share", got=got, accepted=f"one of {', '.join(names) or 'your groups'}")
    assert found is not None
    return found


def closed_before(root: Path, group: int) -> Path | None:
    """The first folder above a run directory that keeps the group from it; None: there is none."""
    for folder in reversed(root.absolute().parents):
        try:
            about = folder.stat()
        except OSError:
            return folder
        by_group = stat.S_IXGRP if about.st_gid == group else 0
        if not about.st_mode & (stat.S_IXOTH | by_group):
            return folder
    return None
