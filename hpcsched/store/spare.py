"""Disk space kept for a small file, so that it can be replaced on a full file system.

Two spare files of the same size lie ready. On a full disk one is filled and renamed into place, and the file
that it replaces becomes the next spare: no block and no inode is freed, which another process would take. A
reader of the old content that takes longer than the next two replacements may see the new content in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from hpcsched.watchers import let_read

BLOCK_BYTES = 2**16
"""The size of spare files is a multiple of this (chosen)."""

_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2)."""


def preallocate(descriptor: int, offset: int, length: int) -> bool:
    """Allocate blocks for this part of a file without making the file longer; False if that is not possible,
    or would take more than an eighth of the free space."""
    about = os.fstatvfs(descriptor)
    if about.f_bavail * about.f_frsize < 8 * length:
        return False
    fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(descriptor, _KEEP_SIZE, offset, length) == 0)


class SpareFile:
    """The spare files of the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = [path.with_name(f".{path.name}.spare.{n}") for n in (1, 2)]
        self._old = path.with_name(f".{path.name}.old")
        self._size = 0
        self._in_place = False

    def keep(self, length: int) -> None:
        """Keep space for a file of this length, and some growth; on a full disk the old spare files stay."""
        self._in_place = False
        size = (length // BLOCK_BYTES + 1) * BLOCK_BYTES
        with contextlib.suppress(OSError):
            if length <= self._size and all(name.exists() for name in self._names):
                return
            for name in self._names:
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    let_read(descriptor, name.parent)
                    os.posix_fallocate(descriptor, 0, size)
                finally:
                    os.close(descriptor)
            self._size = size

    def replace(self, data: bytes) -> bool:
        """Replace the file by these bytes, a JSON document; False if no space was kept for them."""
        if len(data) > self._size:
            return False
        try:
            name = next((name for name in self._names if name.exists()), None)
            if name is None:
                return False
            descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, data.ljust(self._size, b"\n"), 0)
            finally:
                os.close(descriptor)
            if self._in_place:  # what is replaced has as much room: it is kept
                self._old.unlink(missing_ok=True)  # of an agent that was killed here
                os.link(self._path, self._old)
            name.replace(self._path)
            if self._in_place:
                self._old.replace(name)
        except OSError:
            return False
        self._in_place = True
        return True

    def drop(self) -> None:
        """Remove the spare files."""
        for name in (*self._names, self._old):
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)
        self._size = 0
