"""A program that measures is started, followed while it tells what it finds, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcsched.errors import HpcschedError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers
from hpcsched.profiling.sweep import ending_signals
from hpcsched.profiling.trial import running

POLL_PERIOD_S = 0.2
"""Seconds between looks at a probe that says nothing (chosen)."""

_OURS = "hpcsched: "
"""What the lines begin with that a probe writes on purpose."""

Say = Callable[[str], None]


class ProbeFailed(HpcschedError):
    """A probe has found nothing; says why, and where the program's output is."""

    exit_code = 2

    def __init__(self, message: str, *, output: bool = False) -> None:
        super().__init__(message)
        self.output = output
        """Whether the program's output is kept for the user to read."""


@contextlib.contextmanager
def started(launcher: Launcher, plan: LaunchPlan) -> Iterator[Workers]:
    """Launch a probe; whatever becomes of it, nothing of it is left afterwards. In the main thread."""
    with ending_signals(), running(launcher, plan) as workers:
        yield workers


@contextlib.contextmanager
def kept_if_it_fails(scratch: Path, folder: Path) -> Iterator[Callable[[], None]]:
    """Remove `scratch` in the end, but for the output in it of a probe that says there why it failed, or for
    which what this gives was called: then only `folder`, in there.
    """
    unwanted = [scratch]

    def keep() -> None:
        unwanted[:] = [folder]

    try:
        yield keep
    except ProbeFailed as error:
        unwanted[:] = [folder if error.output else scratch]
        raise
    finally:
        for path in unwanted:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class ProbeRun(ABC):
    """One run of a probe, which writes to `output`, and may say nothing for `timeout_s`."""

    output: Path
    timeout_s: float

    def follow(self, workers: Workers) -> int:
        """Read what it tells until it has ended; its exit code. Raises ProbeFailed when it says nothing."""
        fd, rest, last_news = workers.progress_fd, b"", time.monotonic()
        poll = select.poll()
        for descriptor in (*workers.pidfds, *([] if fd is None else [fd])):
            poll.register(descriptor, select.POLLIN)
        code: int | None = None
        while code is None:
            code = workers.reap()  # what it has written until then is read below
            for descriptor, _ in poll.poll(0 if code is not None else 1000 * POLL_PERIOD_S):
                data = os.read(descriptor, 1 << 16) if descriptor == fd else b""
                if not data:
                    poll.unregister(descriptor)
                    continue
                last_news = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-4096:]
                for line in lines:
                    self._tell(line)
            if code is None and time.monotonic() - last_news > self.timeout_s:
                why = f"{self._nothing_done} in {self.timeout_s:g} s; a longer --timeout may help"
                raise ProbeFailed(f"{why}{self.ends}", output=True)
        return code

    @abstractmethod
    def _tell(self, line: bytes) -> None:
        """Take in a line that it has told; others may write there too."""

    @property
    @abstractmethod
    def _nothing_done(self) -> str:
        """What to say of one that is silent."""

    @property
    def said(self) -> list[str]:
        """The lines that the probe has written on purpose."""
        return [line.removeprefix(_OURS) for line in self._lines() if line.startswith(_OURS)]

    @property
    def ends(self) -> str:
        """The last line of its output, and where that is, for the end of a message."""
        lines = self._lines()
        return f"; {self.output} ends: {lines[-1][:200]}" if lines else "; it wrote no output"

    def _lines(self) -> list[str]:
        try:
            text = self.output.read_bytes()[-65536:].decode(errors="replace")
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]
