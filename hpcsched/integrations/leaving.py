"""A quick end of a process: of importance where others wait for its GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

_leaving = False


def end_quickly(code: int) -> None:
    """Have this process, when it ends, end with `code` as soon as all exit handlers have run.

    What Python does after them, taking modules apart, is of no use to anybody, and takes seconds with torch
    and a framework on a busy host. Call it last, just before SystemExit is raised.
    """
    atexit.register(_end, code)


def _end(code: int) -> None:
    global _leaving
    if _leaving:  # called by itself
        return
    _leaving = True
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
