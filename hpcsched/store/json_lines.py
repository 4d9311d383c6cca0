"""Records that grow while a run lasts, as lines of JSON: read without trust; a torn line costs no other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcsched.decoding import decode, read_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.watchers import let_read

T = TypeVar("T")


def read_lines(path: Path, kind: type[T], *, most_bytes: int) -> Iterator[T]:
    """The lines that can be decoded as `kind`; none where there is no such file.

    Raises StoreError if it cannot be read, or is longer than `most_bytes`.
    """
    try:
        data = read_file(path, most_bytes=most_bytes)
    except FileNotFoundError:
        return
    except (OSError, BadInput) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"cannot read {path}: {why}") from error
    for line in data.split(b"\n"):
        try:
            row = decode(line, kind)
        except BadInput:
            continue
        yield row


def encoded(rows: Iterable[msgspec.Struct]) -> bytes:
    """These as lines."""
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def append_lines(path: Path, rows: Iterable[msgspec.Struct], *, most_bytes: int) -> bool:
    """Add these lines, unless the file would be longer than `most_bytes`; whether they were added.

    Raises OSError if the file cannot be written.
    """
    lines = encoded(rows)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            let_read(descriptor, path.parent)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # the line before is torn
        if size + len(lines) > most_bytes:
            return False
        os.write(descriptor, lines)
        return True
    finally:
        os.close(descriptor)
