"""Whose a folder or a file is, and folders that are this user's alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpcsched.accounts import name_of


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, so that nobody else can enter them, whatever the
    umask says. Raises OSError."""
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def foreign(path: Path) -> str:
    """What belongs to neither this user nor root, of a file, or of a folder with all that is in it; "" if
    nothing does. Where symbolic links lead counts, too; what is not there is nobody's."""
    for part in _parts(path):
        with contextlib.suppress(FileNotFoundError):
            for seen in (part.lstat(), part.stat()):
                if seen.st_uid not in (os.geteuid(), 0):
                    return f"{part} belongs to {name_of(seen.st_uid)}"
    return ""


def _parts(path: Path) -> Iterator[Path]:
    yield path
    for folder, below, names in os.walk(path):
        yield from (Path(folder, name) for name in [*below, *names])
