"""The truth of a run: an append-only file of events, one JSON record a line, each with its checksum.

    {"v":1,"seq":7,"crc":"90a1b2c3","type":"WorkersReady","event":{"at":1.5,...}}

`crc` is the CRC-32 of sequence number, type and event bytes. One process writes at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from hpcsched.core import events as ev
from hpcsched.errors import StoreError

VERSION = 1

_EVENTS: dict[str, type[ev.Event]] = {
    name: kind for name, kind in vars(ev).items() if isinstance(kind, type) and issubclass(kind, ev.Event)
}


class _Record(msgspec.Struct):
    v: int
    seq: int
    crc: str
    type: str
    event: msgspec.Raw


def _checksum(seq: int, kind: str, event: bytes) -> str:
    return f"{crc32(event, crc32(f'{seq} {kind} '.encode())):08x}"


def encode(seq: int, event: ev.Event) -> bytes:
    """One record, newline included."""
    kind, body = type(event).__name__, msgspec.json.encode(event)
    head = f'{{"v":{VERSION},"seq":{seq},"crc":"{_checksum(seq, kind, body)}","type":"{kind}","event":'
    return head.encode() + body + b"}\n"


def _checked(line: bytes) -> _Record:
    """A whole record with a right checksum, of whatever version; ValueError for anything else."""
    record = msgspec.json.decode(line, type=_Record)
    if record.crc != _checksum(record.seq, record.type, bytes(record.event)):
        raise ValueError("wrong checksum")
    return record


def decode(line: bytes) -> tuple[int, ev.Event]:
    """Sequence number and event of a whole record; raises ValueError for anything else."""
    record = _checked(line)
    if record.v != VERSION or record.type not in _EVENTS:
        raise ValueError(f"record version {record.v}, type {record.type}, of another hpcsched")
    return record.seq, msgspec.json.decode(record.event, type=_EVENTS[record.type])


def read(path: Path) -> Iterator[tuple[ev.Event, int]]:
    """Each event and the offset where its record ends; stops before a torn tail.

    Raises StoreError when the file cannot be read, or a bad record has good ones after it: that is
    no torn tail but damage.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    offset, expected = 0, 1
    while offset < len(data):
        end = data.find(b"\n", offset) + 1
        try:
            if not end:
                raise ValueError("no end of line")
            seq, event = decode(data[offset:end])
            if seq != expected:
                raise ValueError(f"record {seq} where {expected} belongs")
        except (ValueError, msgspec.MsgspecError) as error:
            if end and _has_whole_record(data, offset):
                raise StoreError(f"{path} is damaged at byte {offset}, record {expected}: {error}") from error
            return
        yield event, end
        offset, expected = end, expected + 1


def _has_whole_record(data: bytes, offset: int) -> bool:
    """Whether a record was written whole here or later: then what cannot be read is no torn tail."""
    for line in data[offset:].splitlines(keepends=True):
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            _checked(line)
            return True
    return False


class Journal:
    """The writing end. Opening cuts a torn tail off.

    Args:
        path: the file; made (mode 0600) if it is not there.
        length, records: where the last whole record ends and how many there are, as `read` told.
    """

    def __init__(self, path: Path, *, length: int = 0, records: int = 0) -> None:
        self.path = path
        self.seq = records
        self._length = length
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            os.ftruncate(self._descriptor, length)
            os.lseek(self._descriptor, length, os.SEEK_SET)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def append(self, events: Sequence[ev.Event], *, sync: bool = True) -> None:
        """Add events as one write; with `sync`, they are on disk when this returns.

        Raises StoreError with nothing added: a half-written record is cut off again.
        """
        data = b"".join(encode(self.seq + n, event) for n, event in enumerate(events, 1))
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            if sync:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self._cut()
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        self.seq += len(events)
        self._length += len(data)

    def _cut(self) -> None:
        # Where even that fails, the torn tail is cut off when the journal is next opened.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._length)
            os.lseek(self._descriptor, self._length, os.SEEK_SET)

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
