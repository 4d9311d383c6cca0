"""python -m hpcsched.worker.call FILE: run a function submitted from Python, and put down what it returns.

FILE is a pickle of `Call`, as a tuple; the function and its arguments in it are a pickle of their own, as
what they need may only be found once `sys.path` is the caller's. The outcome lies in the job's folder
likewise: a pickle of `Outcome`, as a tuple, of nothing but plain types, with the pickle of the value or of
the exception inside, so that one that cannot be loaded does no harm to the rest.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from hpcsched.contract import exits, files
from hpcsched.worker.link import Link
from hpcsched.worker.process.contract import say, write_atomically

_SAVED = b"hpcsched call\n"
"""Begins a checkpoint that holds what is to be called to go on."""


class Call(NamedTuple):
    """A function with its arguments, pickled (`function`, a callable without any), and the caller's
    `sys.path`."""

    path: list[str]
    function: bytes


class Outcome(NamedTuple):
    """`value` is a pickle of what was returned (`returned`), or of what was raised, its traceback is `text`.

    It is empty where that cannot be pickled; `text` says why.
    """

    attempt: int
    returned: bool
    value: bytes
    text: str


def main(words: list[str]) -> int:
    """Run the call in the file; the exit code, 1 if it has raised."""
    if len(words) != 1:
        say("accepted: one file, of a function that was submitted from Python")
        return exits.REFUSED
    link = Link()
    if link.env is None:
        say("this runs a function of a job, and is started by hpcsched")
        return exits.REFUSED
    outcome = link.env.job_dir / files.OUTCOME if link.rank == 0 else None
    # Of an attempt before this one; and what stands if the function ends the process.
    _write(outcome, link, False, None, "the function has ended its process and returned nothing")
    try:
        function = _load(Path(words[0]), link.checkpoint)
        _listen(link, function)
        value = function()
    except Exception as error:
        link.close()  # a signal no longer finds something to save
        traceback.print_exc()
        _write(outcome, link, False, error, traceback.format_exc())
        return 1
    link.finish(numbers(value))
    if not _write(outcome, link, True, value, ""):
        return 1
    return 0


def _load(file: Path, checkpoint: Path | None) -> Callable[[], Any]:
    """The function without arguments that is to be run: the one that was saved last, or the submitted one."""
    call = Call._make(pickle.loads(file.read_bytes()))  # nosec B301 # in the run directory
    # As in the process that has submitted it: its modules are found there first, in that order.
    sys.path[:] = [*call.path, *(folder for folder in sys.path if folder not in call.path)]
    function: Callable[[], Any] = pickle.loads(_saved(checkpoint) or call.function)  # nosec B301 # as above
    return function


def _saved(checkpoint: Path | None) -> bytes | None:
    """The pickle in a checkpoint of `_listen`; None in another: of a link that the function has itself."""
    if checkpoint is None or not checkpoint.is_file():
        return None
    with checkpoint.open("rb") as file:
        return file.read() if file.read(len(_SAVED)) == _SAVED else None


def _listen(link: Link, function: Callable[[], Any]) -> None:
    """Have the function save when hpcsched asks for it, if it has a method `checkpoint`.

    That method is called with the function's arguments, between two lines of the function, and returns what
    is to be called to go on, without arguments. Python takes signals in the main thread, which is here.
    """
    called, args, kwargs = _parts(function)
    checkpoint = getattr(called, "checkpoint", None)
    if not callable(checkpoint):
        link.close()  # nothing listens: a signal ends it, as any program that does not save
        return

    def save(number: int, frame: FrameType | None) -> NoReturn:
        for signal_ in (signal.SIGTSTP, signal.SIGTERM):
            signal.signal(signal_, signal.SIG_IGN)
        try:
            place = link.place(link.reported)
            write_atomically(place, _SAVED + _pickle(_callable(checkpoint(*args, **kwargs))))
            link.saved(link.reported, place)
        except Exception:
            traceback.print_exc()
            _flush()
            os._exit(exits.CANNOT_SAVE)
        _flush()
        # Not SystemExit, which the function could catch, as it is anywhere in its work.
        assert link.env is not None
        os._exit(link.env.leave())

    for signal_ in (signal.SIGTSTP, signal.SIGTERM):
        signal.signal(signal_, save)
    link.ready(parallel=False)


def _parts(function: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(function, partial):
        return function.func, function.args, function.keywords
    return function, (), {}


def _callable(found: Any) -> Callable[[], Any]:
    """What `checkpoint` has returned, as a function without arguments.

    It is one, or one of submitit's submissions, which has the same in three fields.
    """
    if callable(found):
        return found  # type: ignore[no-any-return]
    if all(hasattr(found, name) for name in ("function", "args", "kwargs")):
        return partial(found.function, *found.args, **found.kwargs)
    accepted = "something to call without arguments, such as functools.partial(self, *args)"
    raise TypeError(f"checkpoint() has returned {type(found).__name__}; accepted: {accepted}")


def _write(file: Path | None, link: Link, returned: bool, value: Any, text: str) -> bool:
    """Put down what has become of the call (of several ranks rank 0 has the file); False if it was more than
    could be pickled."""
    if file is None:
        return True
    assert link.env is not None
    fine = True
    try:
        pickled = b"" if value is None and not returned else _pickle(value)
    except Exception as error:
        pickled, fine = b"", False
        text = text or f"a result that cannot be pickled: {type(value).__name__}: {error}"
        say(text.splitlines()[-1])
        returned = False
    write_atomically(file, pickle.dumps(tuple(Outcome(link.env.attempt, returned, pickled, text))))
    return fine


def _pickle(value: Any) -> bytes:
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def numbers(value: Any) -> Mapping[str, float] | None:
    """A number, or a table of numbers, as a job's metrics."""
    table = value if isinstance(value, Mapping) else {"result": value}
    try:
        fit = {str(name): float(one) for name, one in table.items() if _is_number(one)}
    except OverflowError:  # a whole number that no float holds
        return None
    return fit if fit and len(fit) == len(table) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
