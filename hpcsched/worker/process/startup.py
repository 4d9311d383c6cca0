"""Quicker starts and ends of a training process. Standard library only."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator

from hpcsched.worker.process.memory import keep_freed_memory


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Hold the garbage collector back: importing torch makes 600 000 objects, and no garbage.

    It would walk over them again and again, for a quarter of the time a small job needs to start.
    """
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def exit_quickly() -> None:
    """Spare the interpreter one last walk over all objects at its end: about 1 s of held GPU.

    What `finally`, `atexit` and reference counts promise still happens.
    """
    atexit.register(gc.freeze)


class _End:
    """The last exit handler: ends the process with the code of what it ran."""

    code = 1  # of an exception that nobody catches
    registered = False

    def register(self) -> None:
        if not self.registered:
            self.registered = True
            atexit.register(self.leave)

    def leave(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code)


_end = _End()


def end_quickly() -> None:
    """From now on the process ends without the interpreter being taken apart.

    Call it before anything registers with `atexit`: what is registered later still runs.
    """
    _end.register()


def leave_torch_as_it_is() -> None:
    """Have torch not deregister its operators at the end of a process that ends quickly: 30 ms saved.

    What the user's code brings along later is left alone.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # not public: without it just slower
        alive = finalizer.peek()
        home = getattr(alive[1], "__module__", None) if alive else None  # methods of builtins have none
        if (home or "").partition(".")[0] == "torch":
            finalizer.atexit = False


def run_to_the_end(main: Callable[[], int]) -> None:
    """Run `main`, keeping freed memory, and end the process with its exit code, as `end_quickly` says."""
    end_quickly()
    keep_freed_memory()
    try:
        _end.code = main()
    except SystemExit as end:
        _end.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    sys.exit(_end.code)
