"""Attempts of a job in this process: what an adapter sees of hpcsched, without an agent."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcsched.contract import files, variables
from hpcsched.contract.metrics import Point
from hpcsched.contract.progress import Line
from hpcsched.contract.state import State
from hpcsched.store.metrics import read_points


class Attempts:
    """Runs a program until it ends, as a job whose folder is `folder`; `stop` is the order to save and leave.

    `states` is what STATE.json said after each attempt that left, `codes` the exit codes of these.
    """

    def __init__(self, folder: Path, **more: str) -> None:
        self.folder = folder
        self.more = more
        self.states: list[State] = []
        self.codes: list[int] = []

    def run(self, program: Callable[[], Any], most: int = 9) -> Any:
        """What it returns in the end; at most `most` attempts."""
        for _ in range(most):
            with self._attempt():
                try:
                    return program()
                except SystemExit as left:
                    self.codes.append(int(str(left.code)))
                    self.states.append(State.decode((self.folder / files.STATE).read_bytes()))
        raise AssertionError(f"not done after {most} attempts")

    @property
    def points(self) -> Sequence[Point]:
        """What it has logged, that holds."""
        return read_points(self.folder / files.METRICS)

    @property
    def totals(self) -> set[int | None]:
        """The steps of the whole work, as they were told."""
        lines = (self.folder / "progress").read_bytes().splitlines(keepends=True)
        return {Line.decode(line).total for line in lines}

    @staticmethod
    def stop() -> None:
        """What the agent sends to a job that is to save and leave."""
        signal.raise_signal(signal.SIGTSTP)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        self.folder.mkdir(exist_ok=True)
        progress = os.open(self.folder / "progress", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        told = {
            variables.PROGRESS_FD: str(progress),
            variables.JOB_ID: "1",
            variables.JOB_DIR: str(self.folder),
            variables.RUN_DIR: str(self.folder),
            variables.CHECKPOINT_DIR: str(self.folder / "checkpoint"),
            variables.CHECKPOINT_EVERY_S: "3600",
            variables.ATTEMPT: str(len(self.states) + 1),
            variables.RESUME: str(int((self.folder / files.STATE).exists())),
            **self.more,
        }
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTSTP, signal.SIGTERM)}
        former = {name: os.environ.get(name) for name in told}
        os.environ.update(told)
        try:
            yield
        finally:
            os.close(progress)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for name, value in former.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
