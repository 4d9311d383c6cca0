"""The page of `hpcsched report --serve`: drawn anew when its runs have changed and somebody looks."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from hpcsched.cli.common import say
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.printing import printable
from hpcsched.store.rundir import RunDir, agent_works

LEAST_PAUSE_S = 5.0
"""Between two pages, at least (chosen): an agent writes its snapshot that often."""

PAUSE_OF_DRAWING = 4.0
"""The pause after a page, in times of what it took to draw (chosen): at most a fifth of one core is used."""

PAUSE_OF_FAILURE_S = 30.0
"""The least pause after a page that could not be drawn (chosen)."""

LOOK_S = 1.0
"""Runs are looked at so often, at most, whoever asks (chosen)."""

DRAWN_WITHIN_S = 900.0
"""The longest that one page may take (chosen)."""

LONGEST_NOTE = 500
"""Characters of what went wrong."""


class NotDrawn(HpcschedError):
    """A page could not be drawn, and why."""


class Page(NamedTuple):
    """A page as HTML, plain and compressed by gzip; `number` counts from 1."""

    number: int
    html: bytes
    gzipped: bytes
    drawn_at: float
    """By the clock of its LivePage: when its drawing began."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown: the number of the page (0: none yet), and its age in seconds.

    `doing` is `current` (the runs have not changed since), `drawing` (a new page is) or `waiting` (they have
    changed; it is too early for a new page). `note` is what a reader has to know, or empty.
    """

    page: int
    age_s: float
    doing: str
    note: str


Draw = Callable[[Sequence[RunDir]], bytes]
"""Draws the page of these runs, all of which have begun, as HTML. Raises NotDrawn."""


class LivePage:
    """The page of these runs; one is drawn at a time, in a thread, while the last one is shown."""

    def __init__(
        self, rundirs: Sequence[RunDir], draw: Draw, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rundirs, self._draw, self._clock = rundirs, draw, clock
        self._lock = threading.Lock()
        self._drawing: threading.Thread | None = None
        self._looked_at = self._not_before = -float("inf")
        self._seen: object = None
        self._drawn: object = None
        self._trouble = ""
        self.page: Page | None = None

    def state(self) -> State:
        """What is shown now. Has a new page drawn, if it is time for one."""
        with self._lock:
            now = self._clock()
            if now >= self._looked_at + LOOK_S:
                self._looked_at, self._seen = now, [_signs(rundir) for rundir in self._rundirs]
            begun = list(filter(_has_begun, self._rundirs))
            changed = bool(begun) and self._seen != self._drawn
            if changed and self._drawing is None and now >= self._not_before:
                # A daemon: it must not keep the program from its end.
                thread = threading.Thread(target=self._make, args=(begun,), daemon=True)
                thread.start()  # it waits for the lock at its end
                self._drawing, self._drawn, changed = thread, self._seen, False
            page = self.page
            return State(
                page=page.number if page else 0,
                age_s=round(now - page.drawn_at, 1) if page else 0.0,
                doing="drawing" if self._drawing else "waiting" if changed else "current",
                note=" ".join(filter(None, (self._trouble, _absent(self._rundirs, begun)))),
            )

    def _make(self, begun: Sequence[RunDir]) -> None:
        at, html, packed, trouble = self._clock(), b"", b"", ""
        try:
            html = self._draw(begun)
            packed = gzip.compress(html, 6)
        except NotDrawn as error:
            trouble = str(error)
        except Exception as error:  # what is shown stays
            trouble = f"no new page: {type(error).__name__}: {error}"
        with self._lock:
            if packed:
                number = self.page.number + 1 if self.page else 1
                self.page = Page(number, html, packed, at)
            else:
                self._drawn = None
            self._trouble, self._drawing = trouble[:LONGEST_NOTE], None
            now, least_s = self._clock(), LEAST_PAUSE_S if packed else PAUSE_OF_FAILURE_S
            self._not_before = now + max(least_s, PAUSE_OF_DRAWING * (now - at))


def _signs(rundir: RunDir) -> object:
    """What is another when a run has changed, or lost its agent."""
    signs: list[object] = []
    for path in (rundir.journal, rundir.status):
        try:
            about = path.stat()
        except OSError:
            signs.append(None)
        else:
            signs.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return signs, agent_works(rundir)


def _has_begun(rundir: RunDir) -> bool:
    with suppress(StoreError):
        return rundir.begun
    return False


def _absent(rundirs: Sequence[RunDir], begun: Sequence[RunDir]) -> str:
    absent = [str(rundir.root) for rundir in rundirs if rundir not in begun]
    if not absent:
        return ""
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return printable(f"No run has begun in {', '.join(absent[:3])}{more} yet.")


class Drawer:
    """Draws pages by `hpcsched report`, each in a process of its own.

    It can be ended, it gives its memory back, and what a limit on CPU time counts is its own. What it says,
    such as of a file that cannot be read, is said once.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hpcsched-report.")
        self._page, self._kept = (Path(self._folder.name) / name for name in ("report.html", "curves"))
        self._kept.mkdir()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._said = set[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what draws."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __call__(self, rundirs: Sequence[RunDir]) -> bytes:
        """As `Draw`."""
        runs = [str(rundir.root) for rundir in rundirs]
        words = ["report", *runs, "-o", str(self._page), "--kept", str(self._kept)]
        with self._lock:
            if self._closed:
                raise NotDrawn("it has been closed")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcsched", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # What is left of a process that was ended goes with the folder.
                env={**os.environ, "TMPDIR": self._folder.name},
            )
        with suppress(OSError):  # login nodes are for all
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        try:
            said = process.communicate(timeout=DRAWN_WITHIN_S)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise NotDrawn(f"no new page: it was not drawn within {DRAWN_WITHIN_S:g} s") from None
        lines = said.splitlines()
        if process.returncode:
            why = lines[-1].removeprefix("hpcsched: ") if lines else f"exit code {process.returncode}"
            raise NotDrawn(printable(f"no new page: {why}"))
        for line in lines:
            if line not in self._said:
                say(line, err=True)
        self._said.update(lines)
        try:
            return self._page.read_bytes()
        except OSError as error:
            raise NotDrawn(f"no new page: {error}") from error
