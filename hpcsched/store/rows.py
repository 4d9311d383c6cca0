"""Rows of jobs that are over: a file beside status.json, so that this does not grow with all jobs ever run.

A row is a job as status.json has it, one a line; a later one of the same id counts. The file only grows:
status.json names it, and how many of its bytes count, so that both are always of the same moment. An agent
that begins, or finds it damaged, writes another one, and removes the old one once status.json names that.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from hpcsched.core.states import JobState
from hpcsched.decoding import decode_lines, opened
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import passes
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import ENDED


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


class Row(msgspec.Struct):
    """What tells a job from the others."""

    id: int
    name: str


class _Job(Protocol):
    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=_Job)


class JobRows:
    """The writer's side: the jobs in status.json, and those that have become rows.

    Args:
        root: the run directory.
        mode: of the file.
        most: jobs that are over in status.json, at most; then all of them become rows.
    """

    def __init__(self, root: Path, mode: int, most: int) -> None:
        self._root, self._mode, self._most = root, mode, most
        self._jobs: dict[int, msgspec.Raw] = {}
        self._in_order = True
        self._ended: dict[int, JobState] = {}
        """Of these the ones that are over."""
        self._staying: set[int] = set()
        """Of these the ones that become no rows."""
        self._last_id = 0
        """Those with larger ids are neither in status.json nor rows."""
        self._file, self._length = "", 0
        """The name of the file ("": there is none), and the bytes that count."""
        self._rows, self._void = 0, 0
        """All rows, and those of jobs that have come back."""

    def put(self, job_id: int, row: bytes, state: JobState, *, stays: bool) -> None:
        """Put a job into status.json, in the place of what there was of it. `stays`: it becomes no row."""
        if job_id > self._last_id:
            self._last_id = job_id
        elif job_id not in self._jobs:
            self._void += bool(self._file)
            self._in_order = False
        self._jobs[job_id] = msgspec.Raw(row)
        self._ended.pop(job_id, None)
        self._staying.discard(job_id)
        if state.final:
            self._ended[job_id] = state
            if stays:
                self._staying.add(job_id)

    def lacks(self) -> bool:
        """Whether the file is damaged, or mostly void: then there is none, and all that are over have to be
        put in once more."""
        if not self._file or (self._is_there() and self._void <= max(self._most, self._rows // 2)):
            return False
        self._file, self._length, self._rows, self._void = "", 0, 0, 0
        return True

    def _is_there(self) -> bool:
        try:
            return (self._root / self._file).stat().st_size >= self._length
        except OSError as error:
            return passes(error)

    def move(self, number: int) -> list[int]:
        """Make rows of those that are over, if they are too many; their ids. `number`: of a new file.

        On a full disk they stay in status.json.
        """
        ids = [job_id for job_id in self._ended if job_id not in self._staying]
        if len(ids) <= self._most:
            return []
        data = b"".join(bytes(self._jobs[job_id]) + b"\n" for job_id in ids)
        try:
            if self._file:
                self._append(data)
            else:
                name = ENDED.replace("*", str(number))
                write_atomically(self._root / name, data, durable=True, mode=self._mode)
                self._file = name
        except (OSError, StoreError):
            return []
        self._length, self._rows = self._length + len(data), self._rows + len(ids)
        for job_id in ids:
            del self._jobs[job_id], self._ended[job_id]
        return ids

    def _append(self, data: bytes) -> None:
        descriptor = os.open(self._root / self._file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            view, at = memoryview(data), self._length
            while view:  # over what one that failed has left
                written = os.pwrite(descriptor, view, at)
                view, at = view[written:], at + written
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def jobs(self) -> list[msgspec.Raw]:
        """The jobs in status.json."""
        if not self._in_order:
            self._jobs, self._in_order = dict(sorted(self._jobs.items())), True
        return list(self._jobs.values())

    def ended(self, counts: Callable[[], Counter[JobState]]) -> Ended | msgspec.UnsetType:
        """What it says of the others; `counts`: all jobs of the run by state."""
        if not self._file:
            return msgspec.UNSET
        others = counts() - Counter(self._ended.values())
        final = {state: number for state, number in sorted(others.items()) if state.final}
        return Ended(file=self._file, bytes=self._length, counts=final)

    def remove_others(self) -> None:
        """Remove the files that status.json names no more."""
        with contextlib.suppress(OSError):  # the next time then
            for path in self._root.glob(ENDED):
                if path.name != self._file:
                    path.unlink(missing_ok=True)


def rows_of(
    root: Path, ended: Ended, others: Mapping[int, str], only: Sequence[str] | None, kind: type[R]
) -> list[tuple[R, bytes]]:
    """The jobs that are over but not among the `others` (names by id) in status.json, and their rows.

    `only`: those of these jobs (ids or names) are enough; where one is not found so, it is all of them.
    Raises FileNotFoundError if another file has taken its place, OSError, and BadInput if it is damaged.
    """
    if Path(ended.file).name != ended.file:
        raise BadInput("it is no file of the run directory")
    with opened(root / ended.file) as (file, _):
        data = file.read(ended.bytes)
    if len(data) < ended.bytes or not data.endswith(b"\n"):
        raise BadInput(f"{len(data)} of {ended.bytes} bytes are there")
    if only is not None:
        found = [_found(data, key, others) for words in only for key in words.split(",") if key]
        if None not in found:
            return _decoded(b"".join(dict.fromkeys(row for row in found if row)), kind)
    rows = {job.id: (job, row) for job, row in _decoded(data, kind) if job.id not in others}
    if len(rows) != ended.jobs:
        raise BadInput(f"{len(rows)} of {ended.jobs} jobs are there")
    return list(rows.values())


def _decoded(data: bytes, kind: type[R]) -> list[tuple[R, bytes]]:
    found, rows = decode_lines(data, kind), data.split(b"\n")[:-1]
    if len(found) != len(rows):
        raise BadInput("a line is empty")
    return [*zip(found, rows, strict=True)]


def _found(data: bytes, key: str, others: Mapping[int, str]) -> bytes | None:
    """The newest row of a job, without a look at the rest; b"" if it is one of the others."""
    job_id = int(key) if key.isdecimal() and len(key) < 19 else 0
    if key == str(job_id):
        if job_id in others:
            return b""
        if row := _last(data, f'{{"id":{key},'):
            return row
    return b"" if key in others.values() else _last(data, f',"name":"{key}",')


def _last(data: bytes, text: str) -> bytes | None:
    """The last line with this text, which no value of it can hold."""
    at = data.rfind(text.encode())
    return data[data.rfind(b"\n", 0, at) + 1 : data.index(b"\n", at) + 1] if at >= 0 else None
