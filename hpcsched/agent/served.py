"""One host's ranks of an attempt, as the host's node agent watches them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hpcsched.launch import wire
from hpcsched.launch.local import LocalWorkers

READY_SOON_S, READY_SOON_PERIOD_S, READY_PERIOD_S = 10.0, 0.05, 0.25
"""The ready file is looked for often so long after the launch, so that a promotion does not wait for it."""

RECORD_PERIOD_S = 1.0
MOST_RECORD_BYTES = 2**20

PROGRESS_PERIOD_S = 0.1
MOST_READS, READ_BYTES = 16, 65536


class Served:
    """Gives the messages that the head must have; the part with rank 0 speaks for the attempt."""

    def __init__(self, order: wire.Launch, workers: LocalWorkers, now: float) -> None:
        self.order, self.workers = order, workers
        self._part, self._first = order.part, order.first_rank == 0
        folder = Path(order.folder)
        self._ready_file, self._state = folder / f"ready.{order.attempt}", folder / "STATE.json"
        self._soon = now + READY_SOON_S
        self._ready = self._failing = False
        self._ready_due = self._record_due = 0.0
        self._mtime_ns = 0
        self.progress_due = now
        """When the progress descriptor is to be read again (monotonic clock)."""

    @property
    def ready(self) -> bool:
        """Whether the program has said that it can be suspended."""
        self._ready = self._ready or self._ready_file.exists()
        return self._ready

    def look(self, now: float) -> Iterator[wire.NodeMessage]:
        """What is not told by a descriptor: the ready file, the record."""
        if not self._first:
            return
        if not self._ready and now >= self._ready_due:
            self._ready_due = now + (READY_SOON_PERIOD_S if now < self._soon else READY_PERIOD_S)
            if self.ready:
                yield wire.Ready(self._part)
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
        return self._record_due if self._ready else min(self._ready_due, self._record_due)

    def _record(self) -> Iterator[wire.NodeMessage]:
        with contextlib.suppress(OSError):
            mtime_ns = self._state.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns and (data := self._read_record()):
                self._mtime_ns = mtime_ns
                yield wire.Recorded(self._part, data)

    def _read_record(self) -> bytes | None:
        try:
            with self._state.open("rb") as file:
                data = file.read(MOST_RECORD_BYTES + 1)
        except OSError:
            return None
        return data if len(data) <= MOST_RECORD_BYTES else None

    def progress(self, now: float) -> tuple[list[wire.NodeMessage], bool]:
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
        return [wire.Progressed(self._part, b"".join(chunks))] if chunks else [], more

    def ended(self) -> Iterator[wire.NodeMessage]:
        """After a rank's end: nothing, that it failed while others live, or that all have ended."""
        code = self.workers.reap()
        if code is None:
            if not self._failing and self.workers.failed_early():
                self._failing = True
                yield wire.Failing(self._part)
            return
        yield from self.progress(time.monotonic())[0]
        if self._first and not self._ready and self.ready:
            yield wire.Ready(self._part)
        yield wire.Exited(self._part, code, self._read_record() if self._first else None)

    def ask_to_save(self) -> None:
        """SIGTSTP where the program has said that it knows it, else SIGTERM."""
        self.workers.signal(signal.SIGTSTP if self.ready else signal.SIGTERM)
