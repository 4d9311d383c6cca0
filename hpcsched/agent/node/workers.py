"""The ranks of an attempt on one host (a part), as the host's node agent watches them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hpcsched.contract import files
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.launch.remote import protocol
from hpcsched.launch.workers import LocalWorkers
from hpcsched.patience import patiently

READY_FAST_POLL_FOR_S, READY_FAST_POLL_S, READY_POLL_S = 10.0, 0.05, 0.25
"""The ready file is polled often for this time after a launch, so that no promotion waits for it, then less
often (chosen)."""

RECORD_PERIOD_S = 1.0
"""How often STATE.json is checked for changes (chosen)."""

MAX_RECORD_BYTES = SMALL_BYTES
"""The longest file of the contract that is sent to the head."""

PROGRESS_PERIOD_S = 0.1
"""How often the progress of rank 0 is read (chosen)."""

CATCHES_PERIOD_S = 1.0
"""How often it is looked whether a program that saves by itself catches the signal to do so (chosen)."""

SAVING_PERIOD_S = 0.1
"""How often it is looked whether a command that saves a program from outside is over (chosen)."""

MAX_READS, READ_BYTES = 16, 65536
"""Reads at a time, and bytes of each (chosen): a program that never stops writing must not block us."""

_ANSWERS: dict[Callable[[int], str], type[protocol.Ready] | type[protocol.Refused]] = {
    files.ready: protocol.Ready,
    files.refused: protocol.Refused,
}


class PartWatcher:
    """Gives the messages about a part to send to the head; the part with rank 0 reports for the attempt."""

    def __init__(self, order: protocol.Launch, workers: LocalWorkers, now: float) -> None:
        self.order, self.workers = order, workers
        self._part, self._first = order.part, order.first_rank == 0
        self._folder = Path(order.folder)
        self._attempt = order.attempt
        """The attempt whose answers are awaited."""
        self._awaits, self._soon = self._first, now + READY_FAST_POLL_FOR_S
        self._ready = self._failing = False
        self._living = order.ranks
        self._ready_due = self._record_due = 0.0
        self._asks = signal.Signals(order.asks) if order.asks else None
        self._catches, self._catches_due = False, now if order.asks else float("inf")
        self._saved_by: tuple[int, str] | None = None
        self._late = False
        self._mtime_ns = 0
        self.progress_due = now
        """The time to read the progress descriptor again (monotonic clock)."""

    def running(self) -> protocol.Running:
        """What another head is told of the part."""
        held = self.workers.held if self._first else None
        return protocol.Running(
            order=self.order,
            port=self.workers.port,
            living=self._living,
            attempt=self._attempt,
            failing=self._failing,
            catches=self._catches,
            ready=_read(self._file(files.ready)) if self._first else None,
            record=_read(self._folder / files.STATE) if self._first else None,
            held=held,
        )

    @property
    def ready(self) -> bool:
        """Whether the program has said that it can be suspended."""
        with contextlib.suppress(OSError):
            self._ready = self._ready or self._file(files.ready).exists()
        return self._ready

    def expect(self, attempt: int, now: float) -> None:
        """Await rank 0's answer to a resize into `attempt`."""
        self.workers.expect(attempt)
        self._attempt = attempt
        if self._first:
            sweep_answers(self._folder, attempt)
            self._awaits, self._soon, self._ready_due = True, now + READY_FAST_POLL_FOR_S, now

    def look(self, now: float) -> Iterator[protocol.NodeMessage]:
        """Messages about what no descriptor reports: the answers of rank 0, STATE.json, handlers."""
        if self._asks and now >= self._catches_due:
            self._catches_due = now + CATCHES_PERIOD_S
            if (catches := self.workers.catches(self._asks)) != self._catches:
                self._catches = catches
                yield protocol.Catches(self._part, catches)
        yield from self._saved_outside()
        if not self._first:
            return
        if self._awaits and now >= self._ready_due:
            self._ready_due = now + (READY_FAST_POLL_S if now < self._soon else READY_POLL_S)
            yield from self._answer()
        if now >= self._record_due:
            self._record_due = now + RECORD_PERIOD_S
            yield from self._record()

    def wake(self) -> None:
        """Have the next `look` check everything: a worker has signalled news."""
        self._ready_due = self._record_due = 0.0

    def due(self) -> float:
        """The time of the next `look` (monotonic clock); infinity if none is needed."""
        if self.workers.saving or self._saved_by != self.workers.saved_by or self._late:
            return time.monotonic() + SAVING_PERIOD_S
        if not self._first:
            return self._catches_due
        due = min(self._record_due, self._catches_due)
        return min(self._ready_due, due) if self._awaits else due

    def _saved_outside(self) -> Iterator[protocol.NodeMessage]:
        if (saved_by := self.workers.saved_by) != self._saved_by and saved_by:
            self._saved_by = saved_by
            yield protocol.SavedBy(self._part, *saved_by)

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
        """What rank 0 has written, and whether more can come. To be called again at `progress_due`."""
        self.progress_due = now + PROGRESS_PERIOD_S
        chunks: list[bytes] = []
        more, descriptor = True, self.workers.progress_fd
        for _ in range(MAX_READS if descriptor is not None else 0):
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

    @property
    def late(self) -> bool:
        """Whether `ended` is to be called again: its end waited for the command that saves it."""
        return self._late and not self.workers.saving

    def ended(self) -> Iterator[protocol.NodeMessage]:
        """Messages after a rank's end: how many live, and whether it failed; or that all have ended."""
        code = self.workers.reap()
        self._late = code is not None and self.workers.saving
        if self._late:
            return
        if code is None:
            if self.workers.living != self._living:
                self._living = self.workers.living
                yield protocol.Living(self._part, self._living)
            if not self._failing and self.workers.failed_early():
                self._failing = True
                yield protocol.Failing(self._part)
            return
        yield from self._saved_outside()  # the command may have ended since the last look
        yield from self.progress(time.monotonic())[0]
        oom: dict[str, Any] = {"oom": self.workers.oom, "over_limit": self.workers.over_limit}
        if not self._first:
            yield protocol.Exited(self._part, code, **oom)
            return
        yield from self._answer()
        # Read after what is held: whoever makes that durable writes the record first.
        record = _read(self._folder / files.STATE, patient=True)
        yield protocol.Exited(self._part, code, record, self.workers.held, **oom)

    def ask_to_save(self) -> None:
        """Send SIGTSTP if the program has made its ready file, the signal that it saves on, or SIGTERM."""
        if self._asks and not self.ready:
            self.workers.ask_to_save(self._asks)
        else:
            self.workers.signal(signal.SIGTSTP if self.ready else signal.SIGTERM)


def sweep_answers(folder: Path, attempt: int) -> None:
    """Remove the answers of an attempt before it starts: NFS may still show old, removed ones."""
    for name in _ANSWERS:
        with contextlib.suppress(OSError):
            (folder / name(attempt)).unlink(missing_ok=True)


def _read(path: Path, *, patient: bool = False) -> bytes | None:
    read = partial(read_file, path, most_bytes=MAX_RECORD_BYTES)
    try:
        return patiently(read) if patient else read()
    except (OSError, BadInput):
        return None
