"""Running a program with bounds on its time and output, and an end for all that it started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from hpcsched.open_files import as_it_was

MAX_OUTPUT_BYTES = 2**20
"""The part of each output that is kept, from its end (chosen)."""

_PIECE = 2**20
_ENDS_WITHIN_S = 5.0
"""Time that the killed program may take to end (chosen)."""
_STOP_NOTICED_S = 0.05
"""Time in which it is noticed that a run is to be stopped (chosen)."""


class Stopped(Exception):
    """A run was stopped before its program had ended."""


def run_bounded(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    within_s: float,
    cwd: str = "/",
    stop: threading.Event | None = None,
    given: bytes = b"",
    spares_children: bool = False,
) -> tuple[int, bytes, bytes]:
    """Run a program; returns its exit code (negative: a signal) and the last `MAX_OUTPUT_BYTES` of stdout and
    of stderr.

    It runs in `cwd`, with the input `given`, in a session of its own, which is killed when it has ended (not
    if it `spares_children`), and when this raises. Raises TimeoutError; Stopped once `stop` is set; OSError
    or ValueError if it cannot be started.
    """
    until, over = time.monotonic() + within_s, False
    with _input(given) as stdin:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    as_it_was(process.pid)
    assert process.stdout and process.stderr
    with process.stdout, process.stderr:
        try:
            said = _listen(process, (process.stdout.fileno(), process.stderr.fileno()), until, stop)
            over = True
        finally:
            if not (over and spares_children):
                # Not waited for yet, so the number is still its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a filesystem that hangs may hold it
                process.wait(_ENDS_WITHIN_S)
    return process.returncode, *said


@contextlib.contextmanager
def _input(given: bytes) -> Iterator[int]:
    """A descriptor that these bytes can be read from, whenever a program reads them."""
    if not given:
        yield subprocess.DEVNULL
        return
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(given)
        file.seek(0)
        yield descriptor


def _listen(
    process: subprocess.Popen[bytes], outputs: tuple[int, int], until: float, stop: threading.Event | None
) -> tuple[bytes, bytes]:
    """Its outputs until it ends; processes that it has started may hold them open for longer."""
    said = {descriptor: bytearray() for descriptor in outputs}
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(process.pid)) as ended:
        for descriptor in said:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        over = False
        while not over:
            if stop is not None and stop.is_set():
                raise Stopped
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            wait_s = left_s if stop is None else min(left_s, _STOP_NOTICED_S)
            ready = [key.fd for key, _ in selector.select(wait_s)]
            over = ended.fileno() in ready
            for descriptor in said if over else ready:
                if not _read(descriptor, said[descriptor]) and not over:
                    selector.unregister(descriptor)
    out, err = said.values()
    return bytes(out), bytes(err)


def _read(descriptor: int, into: bytearray) -> bool:
    """Append the bytes that are there now, at most a pipe's worth; False at the end of the output."""
    try:
        piece = os.read(descriptor, _PIECE)
    except BlockingIOError:
        return True
    into += piece
    del into[:-MAX_OUTPUT_BYTES]
    return bool(piece)
