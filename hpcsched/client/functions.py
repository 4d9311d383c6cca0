"""Functions as jobs: pickled into the run directory, run by `hpcsched.worker.call`, their results read."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.contract import files
from hpcsched.decoding import read_file
from hpcsched.errors import ConfigError, HpcschedError, StoreError
from hpcsched.printing import printable
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir

MOST_BYTES = 2**31
"""The longest function, with its arguments, and the longest result, pickled (chosen)."""


class Outcome(NamedTuple):
    """What a function has come to: its value, or what it has raised, with the traceback as text."""

    value: Any
    error: BaseException | None
    text: str


def store(rundir: RunDir, function: Callable[[], Any], *, where: str) -> Path:
    """Put a function without arguments into the run directory; its file.

    It is pickled by value where another process could not import it: a function of a notebook, of a script,
    of the inside of another. Raises ConfigError for what cannot be pickled.
    """
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # pickling runs code of whatever is in there
        accepted = "a function, and arguments, that can be pickled"
        raise ConfigError(where=where, got=f"{type(error).__name__}: {error}", accepted=accepted) from error
    if len(pickled) > MOST_BYTES:
        accepted = f"at most {MOST_BYTES} bytes with its arguments: pass the name of a file"
        raise ConfigError(where=where, got=f"{len(pickled)} bytes", accepted=accepted)
    rundir.make()
    folder = rundir.root / files.CALLS
    folder.mkdir(mode=0o700, exist_ok=True)
    path = [os.path.realpath(entry) for entry in sys.path]
    file = folder / f"{secrets.token_hex(8)}.pickle"
    write_atomically(file, pickle.dumps((path, pickled)), durable=True)
    return file


def command(file: Path) -> list[str]:
    """What runs a function of `store`: this Python, as others may lack what it was pickled with."""
    return [sys.executable, "-m", "hpcsched.worker.call", str(file)]


def outcome(rundir: RunDir, job_id: int) -> Outcome | None:
    """What the function of a job has come to; None if it has put down nothing. Raises StoreError.

    The file is a pickle: loading it runs code of the user who owns it, so that of anybody else is refused.
    """
    path = rundir.job(job_id) / files.OUTCOME
    try:
        data = read_file(path, follow=False, owner=os.geteuid(), most_bytes=MOST_BYTES)
        _, returned, value, text = pickle.loads(data)  # nosec B301 # a file of this user's
        if not (isinstance(returned, bool) and isinstance(value, bytes) and isinstance(text, str)):
            raise TypeError("not what a function puts down")
    except FileNotFoundError:
        return None
    except (OSError, HpcschedError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # of unpickling
        raise StoreError(f"{path} cannot be understood: {error}") from error
    text = printable(text, lines=True)
    if not value:
        return Outcome(None, None, text)
    try:
        loaded = pickle.loads(value)  # nosec B301 # out of that file
    except Exception as error:
        if not returned:
            return Outcome(None, None, text)  # an exception that is not made of its arguments alone
        raise StoreError(
            f"{path}: the result cannot be loaded here: {type(error).__name__}: {error}"
        ) from error
    return Outcome(loaded, None, text) if returned else Outcome(None, loaded, text)
