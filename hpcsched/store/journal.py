"""The journal of a run: an append-only file of events, one JSON record a line, each with its checksum.

    {"v":1,"seq":7,"crc":"90a1b2c3","type":"WorkersReady","event":{"at":1.5,...}}

`crc` is the CRC-32 of sequence number, type and event bytes. One process writes at a time.

Of a long run the file holds the newest records alone. Its first line says then which ones are in the archive,
a folder beside it with a compressed file for each time that it was begun anew:

    {"v":2,"seq":5000,"crc":"...","type":"Archived","event":{"parts":[[5000,2750000,1804289383]]}}

For a hpcsched that knows of no archive it is a journal of another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from hpcsched.core import events as ev
from hpcsched.decoding import decode as decode_as
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import move, patiently
from hpcsched.store.archive import Mark, read_part
from hpcsched.store.files import copied, copy_from, open_behind, sync_folder, write_all
from hpcsched.store.rundir import NewerRun
from hpcsched.store.spare import preallocate

VERSION = 1
ARCHIVED_VERSION, ARCHIVED = 2, "Archived"
"""Version and type of the line that says what is in the archive: every hpcsched without one refuses these."""

MAX_JOURNAL_BYTES = 2**40
"""The longest journal that is read (chosen)."""

PREALLOCATED_BYTES = 2**18
"""Bytes of disk space allocated ahead of the journal's end (chosen): about a thousand records."""

_NEVER_WRITTEN = bytes(8)
"""The content of blocks that were not written before a power cut: zeros."""

_PATTERN_OF_0_6 = re.compile(rb'\],"progress_pattern":"[^"]')

_EVENTS: dict[str, type[ev.Event]] = {
    name: kind for name, kind in vars(ev).items() if isinstance(kind, type) and issubclass(kind, ev.Event)
}


class Damaged(StoreError):
    """A journal is damaged in a way that no crash leaves, at byte `offset`, where record `number` belongs."""

    def __init__(self, path: Path, offset: int, number: int, why: str) -> None:
        self.offset, self.number, self.why = offset, number, why
        where = f"at byte {offset}, record {number}: {why}"
        super().__init__(f"{path} is damaged {where}; `hpcsched journal repair` mends it, a copy is kept")


class UnknownRecord(ValueError):
    """A whole record of a version or type that only another version of hpcsched knows."""


class _Archived(msgspec.Struct):
    parts: list[Mark]
    """The end of each."""


class _Record(msgspec.Struct):
    v: int
    seq: int
    crc: str
    type: str
    event: msgspec.Raw


def _checksum(seq: int, kind: str, event: bytes) -> str:
    return f"{crc32(event, crc32(f'{seq} {kind} '.encode())):08x}"


def encode(seq: int, event: ev.Event) -> bytes:
    """The bytes of one record, with its newline."""
    kind, body = type(event).__name__, msgspec.json.encode(event)
    head = f'{{"v":{VERSION},"seq":{seq},"crc":"{_checksum(seq, kind, body)}","type":"{kind}","event":'
    return head.encode() + body + b"}\n"


def _checked(line: bytes) -> _Record:
    """A whole record with a right checksum, of whatever version; ValueError or BadInput for anything else."""
    record = decode_as(line, _Record, most_bytes=MAX_JOURNAL_BYTES, most_depth=None)
    if record.crc != _checksum(record.seq, record.type, bytes(record.event)):
        raise ValueError("wrong checksum")
    return record


def decode(line: bytes) -> tuple[int, ev.Event]:
    """Sequence number and event of a whole record. Raises ValueError or BadInput for anything else."""
    record = _checked(line)
    if record.v < VERSION:
        raise ValueError(f"record version {record.v}, which never was")
    if record.v > VERSION or record.type not in _EVENTS:
        raise UnknownRecord(f"record version {record.v}, type {record.type}, of another hpcsched")
    kind = _EVENTS[record.type]
    body = _as_of_today(bytes(record.event))
    event = decode_as(body, kind, most_bytes=MAX_JOURNAL_BYTES, most_depth=None)
    if isinstance(event, ev.AgentStarted) and not 1 <= event.rules <= ev.RULES:
        raise UnknownRecord(f"it decides by version {event.rules} of the rules, of another hpcsched")
    return record.seq, event


def _as_of_today(event: bytes) -> bytes:
    """The event with each job's `progress_pattern` beside its `restart`: in 0.6.0 it was within that."""
    if not _PATTERN_OF_0_6.search(event):
        return event
    told = decode_as(event, dict[str, Any], most_bytes=MAX_JOURNAL_BYTES, most_depth=None)
    jobs = [*told.get("jobs", ()), *told.get("updated", {}).values()]
    for job in jobs:
        restart = job.get("restart")
        if isinstance(restart, dict) and "progress_pattern" in restart:
            job["progress_pattern"] = restart.pop("progress_pattern")
    return msgspec.json.encode(told)


class Contents:
    """What is in a journal now, and in its archive, of which `archived` has the ends of the parts.

    Raises StoreError when the file cannot be read, and Damaged when no crash can have left it so.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, content(path)
        self.archived, self.first = begin_of(path, self.data)
        """And the place of the first record in the file, in bytes."""

    @property
    def begin(self) -> Mark:
        """The place in the run of the first record that is in the file."""
        return self.archived[-1] if self.archived else Mark()

    def mark(self, records: int, end: int) -> Mark:
        """The place in the run that is here in the file, after so many records."""
        crc = crc32(memoryview(self.data)[self.first : end], self.begin.crc)
        return Mark(records, self.begin.bytes + end - self.first, crc)

    def place_of(self, mark: Mark) -> int | None:
        """Where a place of the run is in the file, in bytes; None: not there, or after other records."""
        end = self.first + mark.bytes - self.begin.bytes
        there = mark.records >= self.begin.records and self.first <= end <= len(self.data)
        return end if there and self.mark(mark.records, end) == mark else None

    def parts(self) -> Iterator[bytes]:
        """The records of each part of the archive. Raises StoreError."""
        for before, end in pairwise([Mark(), *self.archived]):
            yield read_part(self.path, before, end)

    def bodies(self) -> Iterator[bytes]:
        """All that is in the archive, and then what is in the file. Raises StoreError."""
        yield from self.parts()
        yield self.data

    def backwards(self) -> Iterator[bytes]:
        """The same, the newest first."""
        yield self.data
        places = [Mark(), *self.archived]
        for before, end in reversed([*pairwise(places)]):
            yield read_part(self.path, before, end)

    def all(self) -> Iterator[tuple[ev.Event, int]]:
        """Each event of the run, and the end of its record in the file (`first` where it is in the archive).

        Stops before a torn tail. Raises StoreError.
        """
        records = 0
        for part in self.parts():
            for line in part.splitlines(keepends=True):
                records += 1
                try:
                    event = _in_place(line, records)
                except (ValueError, BadInput) as error:  # as it was written: by another hpcsched
                    raise NewerRun(f"{self.path}: record {records}: {error}") from error
                yield event, self.first
        yield from self.rest(self.begin.records, self.first)

    def rest(self, records: int, offset: int) -> Iterator[tuple[ev.Event, int]]:
        """Each event after a place in the file, and the end of its record; stops before a torn tail.

        Raises StoreError.
        """
        data, expected = self.data, records + 1
        while offset < len(data):
            end = data.find(b"\n", offset) + 1
            try:
                if not end:
                    raise ValueError("no end of line")
                event = _in_place(data[offset:end], expected)
            except UnknownRecord as error:
                raise NewerRun(f"{self.path} is not of this hpcsched: record {expected}: {error}") from error
            except (ValueError, BadInput) as error:
                if is_torn(data[offset:]):
                    return
                raise Damaged(self.path, offset, expected, str(error)) from error
            yield event, end
            offset, expected = end, expected + 1


def read(path: Path) -> Iterator[tuple[ev.Event, int]]:
    """Each event of a run, and the end of its record in the file: see `Contents.all`. Raises StoreError."""
    return Contents(path).all()


def first_line(archived: Sequence[Mark]) -> bytes:
    """The first line of a journal with an archive, whose parts end so."""
    records, body = archived[-1].records, msgspec.json.encode(_Archived(list(archived)))
    head = f'{{"v":{ARCHIVED_VERSION},"seq":{records},"crc":"{_checksum(records, ARCHIVED, body)}",'
    return head.encode() + f'"type":"{ARCHIVED}","event":'.encode() + body + b"}\n"


_FIRST = f'{{"v":{ARCHIVED_VERSION},'.encode()


def begin_of(path: Path, data: bytes) -> tuple[list[Mark], int]:
    """The ends of the parts of the archive, and the length of the line that says so; none of both if there is
    no such line. Raises Damaged."""
    if not data.startswith(_FIRST):
        return [], 0
    length = data.find(b"\n") + 1
    try:
        record = _checked(data[:length])
        if record.type != ARCHIVED:
            return [], 0  # of another hpcsched, as the reader of the records tells
        parts = decode_as(bytes(record.event), _Archived, most_bytes=MAX_JOURNAL_BYTES).parts
        if not parts or parts[-1].records != record.seq or sorted(parts) != parts:
            raise ValueError("no archive")
    except (ValueError, BadInput) as error:
        raise Damaged(path, 0, 1, f"what the archive has: {error}") from error
    return parts, length


def _in_place(line: bytes, expected: int) -> ev.Event:
    seq, event = decode(line)
    if seq != expected:
        raise ValueError(f"record {seq} where {expected} belongs")
    return event


def content(path: Path) -> bytes:
    """The bytes of the whole file. Raises StoreError."""
    try:
        return patiently(partial(read_file, path, most_bytes=MAX_JOURNAL_BYTES))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except BadInput as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def is_torn(tail: bytes) -> bool:
    """Whether the unreadable end of a journal was left by a crash: a record without its end, or blocks that
    were never written. Such a record was not acknowledged, any other one may have been."""
    lines = tail.splitlines(keepends=True)
    if any(is_whole(line) for line in lines):
        return False
    if _NEVER_WRITTEN in tail:
        return True
    # A record that is whole but for its last byte had its end of line, and lost it.
    return not tail.endswith(b"\n") and len(lines) == 1 and not is_whole(tail[:-1] + b"\n")


def is_whole(line: bytes) -> bool:
    """Whether a line is a whole record, of whatever version."""
    with contextlib.suppress(ValueError, BadInput):
        _checked(line)
        return line.endswith(b"\n")
    return False


def detach(path: Path) -> None:
    """Put a copy in a journal's place, so that an agent that still has the other one open writes no record
    any more: it finds that its file is gone, and what it had written by then is in the copy. Raises
    StoreError."""
    try:
        copy, old, new, both = patiently(partial(copied, path))
        with both:
            move(copy, path)
            patiently(partial(copy_from, new.tell(), old, new))  # what was written between the two
        patiently(partial(sync_folder, path.parent))
    except OSError as error:
        raise StoreError(f"cannot take {path} over: {error.strerror or error}") from error


class Journal:
    """The writer of a journal. Opening cuts a torn tail off. Disk space is allocated ahead, so that a full
    disk does not stop the run at once.

    `seq` is the number of the last record, `length` its end in bytes.

    Args:
        path: the file; created (mode 0600) if it is missing.
        length, records: the end of the last whole record and the number of records, from `read`.
    """

    def __init__(self, path: Path, *, length: int = 0, records: int = 0) -> None:
        self.path = path
        self.seq = records
        self.length = length
        try:
            self._descriptor, self._file = patiently(partial(open_behind, path, length))
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        self._unsynced = b""
        """The records, as they were written, that may not be on disk yet."""
        self._whole = True
        """Whether the file ends after the last record, as far as is known."""
        self._tried = b""
        """What may follow that, where it does not."""
        self._kept = 0
        self._renamed = False
        self._keep_room()

    def append(self, events: Sequence[ev.Event], *, sync: bool = True) -> None:
        """Append events in one write; with `sync`, they and all before are on disk when this returns.

        Raises StoreError, with nothing added: a half-written record is cut off again. An error that may pass
        is waited for.
        """
        data = b"".join(encode(self.seq + n, event) for n, event in enumerate(events, 1))
        sync = sync or len(self._unsynced) > PREALLOCATED_BYTES
        try:
            patiently(lambda: self._add(data, sync))
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        self.seq += len(events)
        self.length += len(data)
        self._unsynced = b"" if sync else self._unsynced + data
        self._keep_room()

    def _add(self, data: bytes, sync: bool) -> None:
        """Write after the last record. Raises OSError, with nothing added."""
        try:
            if not self._whole:
                self._restore()
            write_all(self._descriptor, data)
            if sync:
                os.fdatasync(self._descriptor)
            if sync and self._renamed:  # until then the old file may be what is left after a power cut
                sync_folder(self.path.parent)
                self._renamed = False
            if not os.fstat(self._descriptor).st_nlink:
                raise OSError(errno.ENOENT, "it was removed while the run goes on")
        except OSError:
            self._whole, self._kept, self._tried = False, 0, data
            # Where even that fails, the torn tail is cut off when the journal is next opened.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)
            raise

    def _restore(self) -> None:
        """Have the file end after the last record, by a new handle: after an error the old one may be stale
        for good, and anything that was not synchronised may be lost. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not os.path.samestat(os.fstat(descriptor), self._file):
                raise OSError(errno.ENOENT, "another one is in its place")
            if not self._tried.startswith(os.pread(descriptor, len(self._tried) + 1, self.length)):
                raise OSError(errno.EBUSY, "another agent has written to it")
            os.dup2(descriptor, self._descriptor, inheritable=False)
        finally:
            os.close(descriptor)
        os.ftruncate(self._descriptor, self.length)
        os.lseek(self._descriptor, self.length - len(self._unsynced), os.SEEK_SET)
        write_all(self._descriptor, self._unsynced)
        os.fdatasync(self._descriptor)
        self._whole, self._unsynced = True, b""

    def _keep_room(self) -> None:
        """Keep at least PREALLOCATED_BYTES / 2 allocated ahead, if the file system can; the length stays."""
        if self._kept - self.length < PREALLOCATED_BYTES // 2:
            with contextlib.suppress(OSError):
                if preallocate(self._descriptor, self.length, PREALLOCATED_BYTES):
                    self._kept = self.length + PREALLOCATED_BYTES

    def begin_anew(self, archived: Sequence[Mark], offset: int) -> None:
        """Go on in a new file, with what follows this place in the old one: the rest of it is in the archive.

        Raises StoreError: all is as it was then.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        descriptor = -1
        try:
            if not self._whole:
                self._restore()
            os.fdatasync(self._descriptor)
            mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            os.fchmod(descriptor, mode)  # whatever the umask says
            data = first_line(archived) + os.pread(self._descriptor, self.length - offset, offset)
            write_all(descriptor, data)
            os.fsync(descriptor)
            file = os.fstat(descriptor)
            if not os.path.samestat(self._file, self.path.stat()):
                raise OSError(errno.ENOENT, "another one is in its place")
            temporary.replace(self.path)
        except OSError as error:
            self._whole = False
            with contextlib.suppress(OSError):
                temporary.unlink()
            if descriptor >= 0:
                os.close(descriptor)
            raise StoreError(f"cannot begin {self.path} anew: {error.strerror}") from error
        old, self._descriptor, self._file = self._descriptor, descriptor, file
        with contextlib.suppress(OSError):
            os.close(old)
        self.length, self._kept, self._unsynced = len(data), 0, b""
        self._renamed = True
        self._keep_room()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.length)  # gives back what was kept
                os.fsync(self._descriptor)
            with contextlib.suppress(OSError):  # NFS may say here what became of earlier writes
                os.close(self._descriptor)
            self._descriptor = -1
