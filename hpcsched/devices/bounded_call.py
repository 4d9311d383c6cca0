"""Calls into a library that may hang, made in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Makes one call at a time, and lets go of one that does not come back.

    The thread begins with the first call, and does not hold up the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], within_s: float) -> tuple[bool, T | None]:
        """(True, what `work` returned), or (False, None) if it has not returned in time.

        While an earlier call hangs nothing else is called. `work` must not raise.
        """
        answers: list[T] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(work())
            finally:
                self._busy.release()
                done.set()

        if not self._busy.acquire(timeout=within_s):
            return False, None
        self._begin()
        self._calls.put(run)
        done.wait(within_s)
        return (True, answers[0]) if answers else (False, None)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._calls.get()()
