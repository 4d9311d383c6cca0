"""The steps of an attempt that says nothing itself, and does not save by itself, read from its output."""

from __future__ import annotations

import threading
import time

from hpcsched.dialects import Reader, Report
from hpcsched.threads import started

LOOK_S = 1.0
"""How often its output is read (chosen)."""

LAST_LOOK_S = 5.0
"""Time that the look after its end may take (chosen); a file system that hangs holds nothing up longer."""


class Followed:
    """One attempt whose output is read by a thread of its own: no file system makes the agent wait."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.report: Report | None = None
        """The newest step that was seen."""
        self._over_at: float | None = None
        self._wake, self._done = threading.Event(), threading.Event()
        try:
            started(self._follow, "progress")
        except OSError:  # no room for one more
            self._done.set()

    def _follow(self) -> None:
        try:
            while self._over_at is None:
                self._read()
                self._wake.wait(LOOK_S)
            self._read(over=True)
        finally:
            self._done.set()

    def _read(self, *, over: bool = False) -> None:
        self.report = self._reader.read(time.time(), over=over) or self.report

    def looked(self) -> bool:
        """Whether its output was read since it ended, or that takes too long; called once it has ended."""
        if self._over_at is None:
            self._over_at = time.monotonic()
            self._wake.set()
        return self._done.is_set() or time.monotonic() > self._over_at + LAST_LOOK_S
