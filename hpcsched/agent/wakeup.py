"""Signals that wake a selector up: their numbers arrive through a descriptor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from selectors import EVENT_READ, BaseSelector, SelectorKey
from types import FrameType


@contextlib.contextmanager
def signals_wake(selector: BaseSelector, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Within this, these signals only make a descriptor of the selector readable, with the data
    `("wake", None)`: read their numbers from it by `signals_of`."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def nothing(number: int, frame: FrameType | None) -> None:
        """The number arrives through the wake-up descriptor."""

    before = {number: signal.signal(number, nothing) for number in numbers}
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    selector.register(reader, EVENT_READ, ("wake", None))
    try:
        yield
    finally:
        selector.unregister(reader)
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def signals_of(ready: Iterable[SelectorKey]) -> bytes:
    """The numbers of the signals that have arrived, one a byte, by what is ready of the selector."""
    return b"".join(arrived(key.fd) for key in ready if key.data[0] == "wake")


def arrived(descriptor: int) -> bytes:
    """The numbers of the signals that have arrived, one a byte."""
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 4096)
    return b""
