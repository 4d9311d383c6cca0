"""A run directory that a group may read (`run --share`): told by the mode of its folders alone.

So every process that makes a file there, on any host, knows it. What is in a folder of another mode stays its
owner's alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hpcsched.patience import patiently

FOLDER = 0o2750
"""The mode of a folder that its group reads: what is made in it gets the group by its set-group-ID bit."""
FILE, PRIVATE = 0o640, 0o600


def mode_in(folder: str | os.PathLike[str]) -> int:
    """The mode of a file that is made in this folder."""
    try:
        return FILE if is_shared(patiently(Path(folder).stat).st_mode) else PRIVATE
    except OSError:
        return PRIVATE


def is_shared(mode: int) -> bool:
    """Whether a folder of this mode is one that its group reads."""
    return stat.S_IMODE(mode) == FOLDER


def let_read(descriptor: int, folder: str | os.PathLike[str]) -> None:
    """Have the group read a file that was made in this folder, whatever the umask says; if it may."""
    if mode_in(folder) == FILE:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, FILE)


def make_folder(folder: Path) -> bool:
    """Make a folder that is its owner's alone, or if the one above it is shared, as that one; whether it was
    not there."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        new = False
        if not folder.is_dir():
            raise
    else:
        new = True
    if mode_in(folder.parent) == FILE:
        with contextlib.suppress(OSError):
            folder.chmod(FOLDER)
    return new


def share(folder: Path, group: int, *files: Path) -> None:
    """Have this group read a folder, and those of the files that are there already. Raises OSError."""
    os.chown(folder, -1, group)
    folder.chmod(FOLDER)
    for file in files:
        if file.is_file() and not file.is_symlink():
            os.chown(file, -1, group)
            file.chmod(FILE)
