"""Atomic writes of small files: a reader sees the old one or the new one, never a part of either."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from hpcsched.errors import StoreError
from hpcsched.patience import patiently
from hpcsched.watchers import let_read, mode_in


def write_atomically(
    path: Path, data: bytes, *, durable: bool = False, patient: bool = False, mode: int | None = None
) -> None:
    """Replace the file `path` by `data`; `durable`: wait until it is on disk; then, or if `patient`, also for
    errors that may pass. `mode`: who may read it; None: as its folder says, see `watchers`.

    Raises StoreError if it cannot be written; the old file is untouched then.
    """
    mode = mode_in(path.parent) if mode is None else mode
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def replace() -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            if mode != 0o600:
                os.fchmod(descriptor, mode)  # whatever the umask says
            write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)

    try:
        if durable or patient:
            patiently(replace)
        else:
            replace()
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def open_behind(path: Path, length: int) -> tuple[int, os.stat_result]:
    """A file, made if it is not there, open behind its first `length` bytes, and what is after them cut off.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        let_read(descriptor, path.parent)
        os.ftruncate(descriptor, length)
        os.lseek(descriptor, length, os.SEEK_SET)
        return descriptor, os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        raise


def copied(path: Path) -> tuple[Path, BinaryIO, BinaryIO, contextlib.ExitStack]:
    """A copy beside a file, on disk; both of them, open; and what closes them. Raises OSError."""
    copy = path.with_name(f".{path.name}.tmp")
    copy.unlink(missing_ok=True)
    with contextlib.ExitStack() as both:
        old, new = both.enter_context(path.open("rb")), both.enter_context(copy.open("xb"))
        os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o777)
        copy_from(0, old, new)
        return copy, old, new, both.pop_all()


def copy_from(offset: int, old: BinaryIO, new: BinaryIO) -> None:
    """Copy what is behind an offset, on disk when this returns. Raises OSError; can be done again."""
    old.seek(offset)
    new.seek(offset)
    new.truncate()
    shutil.copyfileobj(old, new)
    new.flush()
    os.fsync(new.fileno())
