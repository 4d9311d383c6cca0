"""Running a program of which nobody knows how long it takes, how much it says, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

MOST_BYTES = 2**20
"""The end of what a program says is kept, so long at most, of each of its two outputs."""

_PIECE = 2**20
_ENDS_WITHIN_S = 5.0


def last_words(
    argv: Sequence[str], *, environ: Mapping[str, str], within_s: float
) -> tuple[int, bytes, bytes]:
    """Exit code (negative: the signal that ended it) and the last `MOST_BYTES` of stdout and of stderr.

    It runs in `/`, without an input, in a session of its own, which is ended with it: on time, too late, or
    because this raises. Raises TimeoutError, OSError or ValueError (it cannot be started).
    """
    until = time.monotonic() + within_s
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout and process.stderr
    with process.stdout, process.stderr:
        try:
            said = _listen(process, (process.stdout.fileno(), process.stderr.fileno()), until)
        finally:
            # Not waited for yet, so the number is still its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a filesystem that hangs may hold it
                process.wait(_ENDS_WITHIN_S)
    return process.returncode, *said


def _listen(process: subprocess.Popen[bytes], outputs: tuple[int, int], until: float) -> tuple[bytes, bytes]:
    """What it says until it ends; those that it has started may hold its outputs for longer."""
    said = {descriptor: bytearray() for descriptor in outputs}
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(process.pid)) as ended:
        for descriptor in said:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        over = False
        while not over:
            ready = [key.fd for key, _ in selector.select(max(0.0, until - time.monotonic()))]
            if not ready or time.monotonic() > until:
                raise TimeoutError
            over = ended.fileno() in ready
            for descriptor in said if over else ready:
                if not _read(descriptor, said[descriptor]) and not over:
                    selector.unregister(descriptor)
    out, err = said.values()
    return bytes(out), bytes(err)


def _read(descriptor: int, into: bytearray) -> bool:
    """What is there now, as much as a pipe of any size holds; False at the end of it."""
    try:
        piece = os.read(descriptor, _PIECE)
    except BlockingIOError:
        return True
    into += piece
    del into[:-MOST_BYTES]
    return bool(piece)
