"""One host's ranks of an attempt, as the host's node agent watches them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.launch.remote import protocol
from hpcsched.launch.workers import LocalWorkers

READY_SOON_S, READY_SOON_PERIOD_S, READY_PERIOD_S = 10.0, 0.05, 0.25
"""The ready file is looked for often so long after the launch, so that a promotion does not wait for it."""

RECORD_PERIOD_S = 1.0
MOST_RECORD_BYTES = SMALL_BYTES
"""Of STATE.json, and of any other file of the contract: a longer one is not told."""

PROGRESS_PERIOD_S = 0.1
MOST_READS, READ_BYTES = 16, 65536

_ANSWERS: dict[Callable[[int], str], type[protocol.Ready] | type[protocol.Refused]] = {
    files.ready: protocol.Ready,
    files.refused: protocol.Refused,
}


class Served:
    """Gives the messages that the head must have; the part with rank 0 speaks for the attempt."""

    def __init__(self, order: protocol.Launch, workers: LocalWorkers, now: float) -> None:
        self.order, self.workers = order, workers
        self._part, self._first = order.part, order.first_rank == 0
        self._folder = Path(order.folder)
        self._attempt = order.attempt
        """Whose answers are looked for."""
        self._awaits, self._soon = self._first, now + READY_SOON_S
        self._ready = self._failing = False
        self._living = order.ranks
        self._ready_due = self._record_due = 0.0
        self._mtime_ns = 0
        self.progress_due = now
        """When the progress descriptor is to be read again (monotonic clock)."""

    @property
    def ready(self) -> bool:
        """Whether the program has said that it can be suspended."""
        self._ready = self._ready or self._file(files.ready).exists()
        return self._ready

    def expect(self, attempt: int, now: float) -> None:
        """The ranks are told to become `attempt`: look for what rank 0 answers."""
        self.workers.expect(attempt)
        self._attempt = attempt
        if self._first:
            sweep_answers(self._folder, attempt)
            self._awaits, self._soon, self._ready_due = True, now + READY_SOON_S, now

    def look(self, now: float) -> Iterator[protocol.NodeMessage]:
        """What is not told by a descriptor: the answers of rank 0, the record."""
        if not self._first:
            return
        if self._awaits and now >= self._ready_due:
            self._ready_due = now + (READY_SOON_PERIOD_S if now < self._soon else READY_PERIOD_S)
            yield from self._answer()
        if now >= self._record_due:
            self._record_due = now + RECORD_PERIOD_S
            yield from self._record()

    def wake(self) -> None:
        """A worker has news: look at once."""
        self._ready_due = self._record_due = 0.0

    def due(self) -> float:
        """When `look` has something to do; infinity if never."""
        if not self._first:
            return float("inf")
        return min(self._ready_due, self._record_due) if self._awaits else self._record_due

    def _answer(self) -> Iterator[protocol.NodeMessage]:
        for name, message in _ANSWERS.items() if self._awaits else ():
            data = _read(self._file(name))
            if data is not None:
                self._awaits = False
                self._ready = self._ready or name is files.ready
                yield message(self._part, self._attempt, data)
                return

    def _file(self, name: Callable[[int], str]) -> Path:
        return self._folder / name(self._attempt)

    def _record(self) -> Iterator[protocol.NodeMessage]:
        with contextlib.suppress(OSError):
            mtime_ns = (self._folder / files.STATE).stat().st_mtime_ns
            if mtime_ns != self._mtime_ns and (data := _read(self._folder / files.STATE)):
                self._mtime_ns = mtime_ns
                yield protocol.Recorded(self._part, data)

    def progress(self, now: float) -> tuple[list[protocol.NodeMessage], bool]:
        """What rank 0 has written, and whether more can come. To be asked again at `progress_due`."""
        self.progress_due = now + PROGRESS_PERIOD_S
        chunks: list[bytes] = []
        more, descriptor = True, self.workers.progress_fd
        for _ in range(MOST_READS if descriptor is not None else 0):
            assert descriptor is not None
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                more = False
                break
            chunks.append(data)
        return [protocol.Progressed(self._part, b"".join(chunks))] if chunks else [], more

    def ended(self) -> Iterator[protocol.NodeMessage]:
        """After a rank's end: how many live, and whether it failed; or that all have ended."""
        code = self.workers.reap()
        if code is None:
            if self.workers.living != self._living:
                self._living = self.workers.living
                yield protocol.Living(self._part, self._living)
            if not self._failing and self.workers.failed_early():
                self._failing = True
                yield protocol.Failing(self._part)
            return
        yield from self.progress(time.monotonic())[0]
        if not self._first:
            yield protocol.Exited(self._part, code)
            return
        yield from self._answer()
        # Read after what is held: whoever makes that durable writes the record first.
        yield protocol.Exited(self._part, code, _read(self._folder / files.STATE), self.workers.held)

    def ask_to_save(self) -> None:
        """SIGTSTP where the program has said that it knows it, else SIGTERM."""
        self.workers.signal(signal.SIGTSTP if self.ready else signal.SIGTERM)


def sweep_answers(folder: Path, attempt: int) -> None:
    """Before they can be given: on NFS this host may still see older ones, which the head has removed."""
    for name in _ANSWERS:
        with contextlib.suppress(OSError):
            (folder / name(attempt)).unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path, most_bytes=MOST_RECORD_BYTES)
    except (OSError, BadInput):
        return None
