"""Whether a file system is full: what fails for that is not the job's fault, and works when there is room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

LEAST_BLOCKS = 16
"""With fewer free blocks (64 KiB, mostly) a file system is full: nothing that matters can be written."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_WORDS = tuple(os.strerror(number) for number in sorted(FULL))


def missing_for(error: Exception, folder: Path) -> str:
    """The directory that had no room, if that is why something failed; else "".

    Another host's error comes as its words.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in FULL:
        return str(cause.filename or folder)
    return str(folder) if any(word in str(error) for word in _WORDS) else ""


def missing_in(folders: Iterable[Path]) -> str:
    """The first of these directories whose file system is full or read-only; "" if none is."""
    return next((str(folder) for folder in folders if is_full(folder)), "")


def is_full(folder: Path) -> bool:
    """Whether nothing can be written there: no block, no inode, or not at all."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        about = os.statvfs(there)
    except OSError:
        return False
    no_inode = about.f_files > 0 and about.f_favail == 0
    read_only = bool(about.f_flag & os.ST_RDONLY)
    return about.f_bavail < min(LEAST_BLOCKS, about.f_blocks) or no_inode or read_only
