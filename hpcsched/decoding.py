"""Decoders of bytes that this process did not write: files, pipes, messages (programs' messages have their
own, in `hpcsched.contract`).

All errors are one exception, `BadInput`, with one printable line. Size and depth are bounded before anything
is built.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from hpcsched.contract.codec import MOST_DEPTH, is_deeper, said
from hpcsched.errors import BadInput

MOST_BYTES = 64 * 2**20
"""The longest document (chosen): a snapshot, or an inbox file with a long queue in it."""

MOST_KEPT_DEPTH = 32
"""The most nested tables and lists in a kept part of a document, such as a job's `args` (chosen): it is put
into other documents."""

_AT_A_TIME = 2**20

T = TypeVar("T")


def decode(
    data: bytes, kind: type[T], *, most_bytes: int = MOST_BYTES, most_depth: int | None = MOST_DEPTH
) -> T:
    """A JSON document as `kind`. Raises BadInput.

    `most_depth` None: its depth is checked elsewhere, as the file may be long; or `kind` has no value of any
    type, and what is nested too deep for the decoder raises as well.
    """
    if len(data) > most_bytes:
        raise BadInput(f"longer than {most_bytes} bytes")
    if most_depth is not None and is_deeper(data, most_depth):
        raise BadInput(f"more than {most_depth} tables and lists within each other")
    try:
        return msgspec.json.decode(data, type=kind)
    except _EXPECTED as error:
        raise BadInput(said(error)) from error


def decode_lines(data: bytes, kind: type[T]) -> list[T]:
    """Lines of JSON, each as `kind`, which has no value of any type. Raises BadInput."""
    try:
        return msgspec.json.Decoder(kind).decode_lines(data)
    except _EXPECTED as error:
        raise BadInput(said(error)) from error


def decode_message(decoder: msgspec.msgpack.Decoder[T], data: bytes, *, most_bytes: int = MOST_BYTES) -> T:
    """A msgpack message; raises BadInput."""
    if len(data) > most_bytes:
        raise BadInput(f"longer than {most_bytes} bytes")
    try:
        return decoder.decode(data)
    except _EXPECTED as error:
        raise BadInput(said(error)) from error


def convert(table: Any, kind: type[T]) -> T:
    """Plain values (of TOML) as `kind`. Raises BadInput."""
    try:
        return msgspec.convert(table, kind)
    except _EXPECTED as error:
        raise BadInput(said(error)) from error


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A regular file and its stat. Never waits, as opening a pipe would. `follow` False: not through a
    symbolic link. Raises OSError, and BadInput if it is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:  # a file object takes no descriptor of a folder, and does not close it either
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise BadInput("it is no file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file, about
    finally:
        os.close(descriptor)


def read_tail(path: Path, most_bytes: int) -> str:
    """The last `most_bytes` of a regular file, as text. Raises OSError, BadInput."""
    with opened(path) as (file, about):
        file.seek(max(0, about.st_size - most_bytes))
        return file.read(most_bytes).decode(errors="replace")


def last_lines(path: Path, most_bytes: int) -> list[str]:
    """The lines in the last `most_bytes` of a regular file, without one that begins before; a carriage return
    ends one too, as progress bars have it. Raises OSError, BadInput."""
    with opened(path) as (file, about):
        before = about.st_size - most_bytes
        file.seek(max(0, before))
        lines = file.read(most_bytes).decode(errors="replace").replace("\r", "\n").split("\n")
    return lines[1:] if before > 0 else lines


def decode_object(data: bytes, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object as Python's own `json` writes it: NaN and Infinity, which JSON does not have, are None.
    Raises BadInput."""
    if len(data) > most_bytes:
        raise BadInput(f"longer than {most_bytes} bytes")
    if is_deeper(data, MOST_DEPTH):
        raise BadInput(f"more than {MOST_DEPTH} tables and lists within each other")
    try:
        table = _LENIENT.decode(data.decode())
    except _EXPECTED as error:
        raise BadInput(said(error)) from error
    if not isinstance(table, dict):
        raise BadInput("an object is expected")
    return table


def read_file(
    path: Path, *, most_bytes: int = MOST_BYTES, follow: bool = True, owner: int | None = None
) -> bytes:
    """The content of a regular file.

    Raises OSError if it cannot be read, BadInput if it is no file, longer than `most_bytes`, or of another
    user than `owner`.
    """
    with opened(path, follow=follow) as (file, about):
        if owner is not None and about.st_uid != owner:
            raise BadInput(f"it comes from user {about.st_uid}")
        data = b"" if about.st_size > most_bytes else file.read(about.st_size + 1)
        while about.st_size < len(data) <= most_bytes and (more := file.read(_AT_A_TIME)):
            data += more  # it is being written
    if max(len(data), about.st_size) > most_bytes:
        raise BadInput(f"longer than {most_bytes} bytes")
    return data


def decode_file(
    path: Path, kind: type[T], *, most_bytes: int = MOST_BYTES, most_depth: int | None = MOST_DEPTH
) -> T:
    """A file's JSON document as `kind`. Raises OSError and BadInput as `read_file` and `decode` do."""
    return decode(read_file(path, most_bytes=most_bytes), kind, most_bytes=most_bytes, most_depth=most_depth)


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded; a file name that is not UTF-8, which Linux allows, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def not_json(value: Any, depth: int = 1) -> Any:
    """The first value in a tree that the journal's JSON cannot hold; None if there is none."""
    match value:
        case dict() | list() if depth > MOST_KEPT_DEPTH:
            return f"more than {MOST_KEPT_DEPTH} tables and lists within each other"
        case dict() | list():
            inner = (*value, *value.values()) if isinstance(value, dict) else value
            found = (not_json(item, depth + 1) for item in inner)
            return next((odd for odd in found if odd is not None), None)
        case str():
            return None if is_utf8(value) else value
        case bool():
            return None
        case int():
            return None if abs(value) < 2**63 else value
        case float():
            return None if math.isfinite(value) else value
    return value


_LENIENT = json.JSONDecoder(parse_constant=lambda word: None)

_EXPECTED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)
