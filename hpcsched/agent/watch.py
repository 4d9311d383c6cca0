"""Follows the end of the allocation, in a thread of its own: a batch system that hangs does not stop us."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

from hpcsched.batch.base import BatchSystem
from hpcsched.errors import BatchError

PERIOD_S = 60.0
"""How often the batch system is asked for the end time, and at most told a comment."""


@dataclass(frozen=True, slots=True)
class EndTime:
    """An answer: the Unix time the job will be ended at (None: never), or why there is no answer."""

    deadline: float | None = None
    error: str = ""


class AllocationWatch:
    """Asks for the end time every `period_s`, and shows the newest comment beside the job, as seldom.

    Args:
        at_once: ask the first time now, as whoever made us has had no answer.
    """

    def __init__(self, batch: BatchSystem, *, at_once: bool = False, period_s: float = PERIOD_S) -> None:
        self._batch, self._period_s = batch, period_s
        self.comment = ""
        """The line to show beside the job; set by whoever made us."""
        self._answers: SimpleQueue[EndTime] = SimpleQueue()
        self._wake = threading.Event()
        self._stopped = False
        self._said = ""
        self._commented_at = float("-inf")
        if at_once:
            self._wake.set()
        self._thread = threading.Thread(target=self._run, name="allocation", daemon=True)
        self._thread.start()

    def ask_now(self) -> None:
        """Ask at once; the answer comes through `take`."""
        self._wake.set()

    def take(self) -> EndTime | None:
        """The newest answer since the last call, or None."""
        newest = None
        while not self._answers.empty():
            newest = self._answers.get()
        return newest

    def wait(self, timeout_s: float) -> EndTime | None:
        """Ask, and wait for the answer; None if none comes in time."""
        self.take()
        self.ask_now()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if answer := self.take():
                return answer
            time.sleep(0.02)
        return None

    def close(self) -> None:
        """Ask no more; a question under way is left to end by itself."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._period_s)
            self._wake.clear()
            if self._stopped:
                return
            try:
                self._answers.put(EndTime(deadline=self._batch.end_time()))
            except BatchError as error:
                self._answers.put(EndTime(error=str(error)))
            except Exception as error:  # whatever a binding raises: the next question may do better
                self._answers.put(EndTime(error=f"the end time cannot be had: {error!r}"))
            self._tell()

    def _tell(self) -> None:
        text = self.comment
        if text == self._said or time.monotonic() < self._commented_at + self._period_s:
            return
        try:
            self._batch.comment(text)
        except Exception:
            return  # nothing depends on it; the next one may get through
        self._said, self._commented_at = text, time.monotonic()
