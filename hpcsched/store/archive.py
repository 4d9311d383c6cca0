"""The archive of a journal: a folder beside it with older records, a compressed file for each time that the
journal was begun anew. They are as they were in the journal, byte by byte; nothing changes them any more.
"""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpcsched.decoding import read_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import patiently
from hpcsched.store.files import sync_folder, write_atomically
from hpcsched.watchers import make_folder

MOST_PART_BYTES = 2**32
"""The longest file of an archive that is read, unpacked (chosen)."""

CHECKPOINT = "checkpoint"
"""The name of the file in the folder that has the state after so many records (`store.checkpoint`)."""

_GZIP = 16 + zlib.MAX_WBITS


class Mark(NamedTuple):
    """A place between two records of a run: the number of those before it, their bytes, and the CRC-32 of all
    of these in order."""

    records: int = 0
    bytes: int = 0
    crc: int = 0


class Unreadable(StoreError):
    """A file of an archive is gone, or is not as it was written."""


def folder_of(journal: Path) -> Path:
    """The folder beside a journal."""
    return journal.with_suffix("")


def part_path(journal: Path, end: Mark) -> Path:
    """A file of the archive, by the number of its last record: no other records ever get its name."""
    return folder_of(journal) / f"{end.records:012d}.jsonl.gz"


def write_part(journal: Path, end: Mark, data: bytes) -> None:
    """Put the records up to this place into the archive, durable. Raises StoreError."""
    make(journal)
    write_atomically(part_path(journal, end), gzip.compress(data, 1, mtime=0), durable=True)


def make(journal: Path) -> None:
    """Make the folder. Raises StoreError."""
    folder = folder_of(journal)
    try:
        if not folder.is_dir():
            make_folder(folder)
            sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(f"cannot make {folder}: {error.strerror}") from error


def read_part(journal: Path, before: Mark, end: Mark) -> bytes:
    """The records between these two places. Raises Unreadable."""
    path, length = part_path(journal, end), end.bytes - before.bytes
    try:
        if not 0 <= length <= MOST_PART_BYTES:
            raise BadInput("a length is wrong")
        packed = patiently(partial(read_file, path, most_bytes=MOST_PART_BYTES))
        data = zlib.decompressobj(_GZIP).decompress(packed, length + 1)
        if len(data) != length or zlib.crc32(data, before.crc) != end.crc:
            raise BadInput("it is not what was written")
    except (OSError, BadInput, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Unreadable(
            f"cannot read {path}, records {before.records + 1} to {end.records}: {why}"
        ) from error
    return data


def found_parts(journal: Path) -> list[Mark]:
    """The ends of the files that lie in an archive, where nothing else tells them. Raises Unreadable."""
    found, mark = list[Mark](), Mark()
    for path in sorted(folder_of(journal).glob("*.jsonl.gz")):
        try:
            data = zlib.decompressobj(_GZIP).decompress(
                read_file(path, most_bytes=MOST_PART_BYTES), MOST_PART_BYTES
            )
            records = mark.records + data.count(b"\n")
            mark = Mark(records, mark.bytes + len(data), zlib.crc32(data, mark.crc))
            if path != part_path(journal, mark):
                raise BadInput("it does not follow the one before")
        except (OSError, BadInput, zlib.error) as error:
            raise Unreadable(f"cannot read {path}: {error}") from error
        found.append(mark)
    return found
