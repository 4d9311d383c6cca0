"""Threads that may not be had: at the limit of processes it is an error of the system like others."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any


def started(target: Callable[..., object], name: str, *args: Any, daemon: bool = True) -> threading.Thread:
    """A thread that runs. Raises OSError (EAGAIN) where no more is to be had, as a process does."""
    thread = threading.Thread(target=target, name=name, args=args, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread
