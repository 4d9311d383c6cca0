"""The end of a process of torch that leaves, saved: quick, and with the code it has said."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from hpcsched.worker.link import Link

_leaving = False


def leave(link: Link) -> NoReturn:
    """`link.leave()`, and have this process end as soon as all exit handlers have run: raises SystemExit.

    What Python does after them, taking modules apart, is of no use to anybody, and takes seconds with torch
    and a framework on a busy host, while others wait for its GPUs. Threads of gloo that are still there
    abort the process then (Python ends a thread that asks for the interpreter, in the middle of C++), which
    is a failure to torchrun.
    """
    with _quickly():
        link.leave()
    raise AssertionError


def cannot_save(link: Link, why: object) -> NoReturn:
    """`link.cannot_save(why)`, and an end as of `leave`."""
    with _quickly():
        link.cannot_save(why)
    raise AssertionError


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        atexit.register(_end, error.code if isinstance(error.code, int) else 1)
        raise


def _end(code: int) -> None:
    global _leaving
    if _leaving:  # called by itself
        return
    _leaving = True
    atexit._run_exitfuncs()
    flush_files()
    os._exit(code)


def flush_files() -> None:
    """Write out what the files hold that are still open, C's too, as the end of the interpreter would."""
    gc.unfreeze()
    left = (found for found in gc.get_objects() if isinstance(found, io.IOBase))
    for file in (*left, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of any class of files
            file.flush()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)
