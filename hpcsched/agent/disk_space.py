"""Full file systems: a failure for want of space is not the job's fault, and is tried again."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

MIN_FREE_BLOCKS = 16
"""Free blocks below which a file system counts as full (chosen; 64 KiB with blocks of 4 KiB)."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_WORDS = tuple(os.strerror(number) for number in sorted(FULL))


def full_directory(error: Exception, folder: Path) -> str:
    """The directory without space that caused `error`; "" if that was not the cause.

    The error of another host is known by its message only.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in FULL:
        return str(cause.filename or folder)
    return str(folder) if any(word in str(error) for word in _WORDS) else ""


def first_full_directory(folders: Iterable[Path]) -> str:
    """The first directory whose file system is full or read-only; "" if none is."""
    return next((str(folder) for folder in folders if is_full(folder)), "")


def is_full(folder: Path) -> bool:
    """Whether nothing can be written to a directory: no block, no inode, a read-only file system, a quota."""
    try:
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        about = os.statvfs(there)
    except OSError:
        return False
    no_inode = about.f_files > 0 and about.f_favail == 0
    read_only = bool(about.f_flag & os.ST_RDONLY)
    no_block = about.f_bavail < min(MIN_FREE_BLOCKS, about.f_blocks)
    return no_block or no_inode or read_only or _over_quota(there)


def _over_quota(folder: Path) -> bool:
    """Whether a quota takes no file of some blocks: only writing one tells, as file systems report quotas in
    ways of their own."""
    data = bytes(MIN_FREE_BLOCKS * 4096)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # NFS says it when this is closed
            return os.write(file.fileno(), data) < len(data)
    except OSError as error:
        return error.errno in FULL
