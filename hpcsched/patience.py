"""Patience with file systems that report an error which may pass, as those of a network do."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN, errno.EREMOTEIO}
)
"""What they say while a server starts again, or has shut this client out."""

TRANSIENT = PASSING | {
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ETXTBSY,
    errno.EINTR,
}
"""Those, and errors of a system that is short of something: who tries later may not meet them."""

PATIENCE_S, AGAIN_S = 8.0, 0.1
"""For how long, and how often, it is tried again (chosen): together with the time between two snapshots it is
less than others wait for a sign of life."""

T = TypeVar("T")


@contextlib.contextmanager
def but_for_lasting() -> Iterator[None]:
    """Within this, an error that will not pass is as if there were nothing. Raises OSError for others."""
    try:
        yield
    except OSError as error:
        if passes(error):
            raise


def kind_of(path: Path) -> int | None:
    """What is at a path, as `stat.S_IFMT` says it; None: nothing. Asks patiently, and raises OSError where
    that is not said: `Path.exists` may take any error for nothing."""
    try:
        return stat.S_IFMT(patiently(path.stat).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def is_folder(path: Path) -> bool:
    """Whether there is a folder at a path; as `kind_of`."""
    return kind_of(path) == stat.S_IFDIR


def move(path: Path, to: Path) -> None:
    """Put a file or folder in the place of another one, patiently: an error may be told of what was done.
    Raises OSError."""
    about = patiently(path.lstat)

    def act() -> None:
        try:
            path.replace(to)
        except FileNotFoundError:
            if not os.path.samestat(os.lstat(to), about):
                raise

    patiently(act)


def passes(error: BaseException) -> bool:
    """Whether an error may pass."""
    return isinstance(error, OSError) and error.errno in PASSING


def settle(path: Path) -> None:
    """Wait until its file system says whether there is such a file, or for long enough."""
    with contextlib.suppress(OSError, ValueError):  # a name that no file has
        patiently(path.stat)


def patiently(act: Callable[[], T]) -> T:
    """What `act` gives, once it meets no error that may pass any more. Raises OSError, PATIENCE_S after the
    first one at the earliest: what is done may take its time."""
    until: float | None = None
    while True:
        try:
            return act()
        except OSError as error:
            until = time.monotonic() + PATIENCE_S if until is None else until
            if not passes(error) or time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)
