"""Rows of jobs that are over: a file beside status.json, so that this does not grow with all jobs ever run.

A row is a job as status.json has it, one a line; a later one of the same id counts. The file only grows:
status.json names it, and how many of its bytes count, so that both are always of the same moment. An agent that
begins, or finds it damaged, writes another one, and removes the old one once status.json names that.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hpcsched.core.states import JobState
from hpcsched.decoding import opened
from hpcsched.errors import BadInput, StoreError
from hpcsched.store.files import write_atomically

PATTERN = "ended.*.jsonl"


class Ended(msgspec.Struct, kw_only=True, frozen=True):
    """In status.json: the file with the rows of jobs that are over and are not in its `jobs`, the bytes of it
    that count, and the number of these jobs by state."""

    file: str
    bytes: int
    counts: dict[JobState, int]

    @property
    def jobs(self) -> int:
        """Their number."""
        return sum(self.counts.values())


class _Row(msgspec.Struct):
    id: int


class Rows:
    """The writer's side.

    Args:
        root: the run directory.
        mode: of the file.
    """

    def __init__(self, root: Path, mode: int) -> None:
        self._root, self._mode = root, mode
        self.file, self.length = "", 0
        """The name of the file ("": there is none), and the bytes that count."""

    def is_whole(self) -> bool:
        """Whether all is there that was written."""
        try:
            return not self.file or (self._root / self.file).stat().st_size >= self.length
        except OSError:
            return False

    def begin(self, number: int, data: bytes) -> None:
        """Write a new file, with these rows. Raises StoreError."""
        file = PATTERN.replace("*", str(number))
        write_atomically(self._root / file, data, durable=True, mode=self._mode)
        self.file, self.length = file, len(data)

    def append(self, data: bytes) -> None:
        """Add rows. Raises StoreError: then nothing has been added that counts."""
        path, at = self._root / self.file, self.length
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                view = memoryview(data)
                while view:
                    written = os.pwrite(descriptor, view, at)
                    view, at = view[written:], at + written
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error
        self.length = at

    def remove_others(self) -> None:
        """Remove what earlier ones have left; status.json must name this one."""
        for path in self._root.glob(PATTERN):
            if path.name != self.file:
                path.unlink(missing_ok=True)


def read(root: Path, ended: Ended) -> bytes:
    """The rows that count. Raises FileNotFoundError if another file has taken its place, OSError, and BadInput
    if not all are there."""
    if Path(ended.file).name != ended.file:
        raise BadInput("it names no file of the run directory")
    with opened(root / ended.file) as (file, _):
        data = file.read(ended.bytes)
    if len(data) < ended.bytes or not data.endswith(b"\n"):
        raise BadInput(f"{len(data)} of {ended.bytes} bytes are there")
    return data


def newest(data: bytes) -> dict[int, bytes]:
    """Each row by the id of its job. Raises BadInput."""
    try:
        ids = _ROWS.decode_lines(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadInput(str(error)) from error
    return {row.id: line for row, line in zip(ids, data.splitlines(), strict=True)}


def find(data: bytes, *, job_id: int | None = None, name: str = "") -> bytes | None:
    """The newest row of a job, by its id or by its name, without a look at the others; None: it has none."""
    begins = f'{{"id":{job_id},' if job_id is not None else f',"name":{msgspec.json.encode(name).decode()},'
    at = data.rfind(begins.encode())
    start = data.rfind(b"\n", 0, max(at, 0)) + 1
    return data[start : data.index(b"\n", at)] if at >= 0 else None


_ROWS = msgspec.json.Decoder(_Row)
