"""One job's lane on a device: a stream of its own, and a gate at which each piece of work waits its turn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpcsched.planning.background.referee import Referee

LOOK_S = 50e-6
"""How often a piece that has to wait looks whether it may go on; a thread that sleeps holds no lock."""


def now_us() -> float:
    """The clock of all lanes."""
    return time.perf_counter() * 1e6


class StreamLane:
    """Runs pieces of work one after another, each once the referee allows it.

    On a GPU a piece is all that is launched between two calls of `piece`; events tell when it has completed.
    On the CPU it has completed when the next one begins.

    Args:
        stream: where the work goes; None on the CPU.
        between: called again and again while a piece waits, without the lock; raises to give up waiting.
    """

    def __init__(
        self,
        referee: Referee,
        *,
        stream: Any = None,
        lock: threading.RLock | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.referee, self.stream, self.between = referee, stream, between
        self.lock = lock or threading.RLock()
        self.open_gates = False
        """Let everything pass, unpaced: the job is to come to its next step boundary soon."""
        self.waited_us = 0.0
        self._current: object | None = None
        self._began: Any = None
        self._running: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """What is launched in here goes into the lane's stream; the last piece ends with it."""
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            try:
                yield
            finally:
                self.end()

    def piece(self, key: object) -> None:
        """The current piece ends, and the piece `key` begins, once it may."""
        self.end()
        self.between()
        if self.open_gates:
            return
        asked_us = now_us()
        while True:
            with self.lock:
                self.look()
                if self.referee.may_launch(key, now_us()):
                    self.referee.launched(key, now_us())
                    break
            self.between()
            if self.open_gates:
                return
            time.sleep(LOOK_S)
        self.waited_us += now_us() - asked_us
        self._current = key
        self._began = self._event()

    def end(self) -> None:
        """The current piece has been launched to its end."""
        if self._current is None:
            return
        self._current = None
        if self.stream is None:
            with self.lock:
                self.referee.completed(now_us())
        else:
            self._running.append((self._began, self._event()))

    def look(self) -> None:
        """Take note of what has completed on the device; to be called with the lock held."""
        while self._running and self._running[0][1].query():
            began, ended = self._running.popleft()
            self.referee.completed(now_us(), began.elapsed_time(ended) * 1e3)

    def _event(self) -> Any:
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event
