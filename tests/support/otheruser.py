"""Another user of this host, who has no rights of ours."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

UID = 65534

T = TypeVar("T")


def as_other(call: Callable[[], T]) -> T:
    """What a function returns that is called by this user, in a process of its own; skips the test where
    nobody may become another user. Raises AssertionError with what it raises."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is needed there
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            os.umask(0)
            said = pickle.dumps((call(), ""))
        except BaseException as error:
            said = pickle.dumps((None, f"{type(error).__name__}: {error}"))
        os.close(ours)
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    found, error = pickle.loads(data)
    assert not error, error
    return found  # type: ignore[no-any-return]


def refused(call: Callable[[], object]) -> bool:
    """Whether another user is not allowed to do it."""

    def tried() -> bool:
        try:
            call()
        except PermissionError:
            return True
        return False

    return as_other(tried)


@contextmanager
def open_place() -> Iterator[Path]:
    """A folder that everybody can enter and nobody else can write; pytest's are their user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="hpcsched-open-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
