"""The journal of a run that goes on is compacted: see `store.compaction`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcsched.errors import StoreError
from hpcsched.store.compaction import COMPACTED_BYTES, finish
from hpcsched.store.journal import Journal

PREPARE = (sys.executable, "-P", "-m", "hpcsched.store.compaction")


class Compacting:
    """Has a process prepare it whenever the journal has grown enough, and begins the journal anew then.

    Args:
        anew: whether this agent may: where another one may take the run over, at any time, it must not put
            a file in the place of the other's journal. The next one does when it opens the run.
        start: starts the process for a journal, with these words.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        anew: bool,
        start: Callable[[Path, Sequence[str]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._journal, self._anew, self._start = journal, anew, start or _start
        self._process: subprocess.Popen[bytes] | None = None
        self._next = COMPACTED_BYTES

    def look(self, now: float) -> None:
        """What is due; called often."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            done, self._process = self._process.returncode == 0, None
            if done and self._anew:
                with contextlib.suppress(StoreError):  # a full disk: the next time then
                    finish(self._journal.path, self._journal)
            self._next = self._journal.length + COMPACTED_BYTES
        elif self._journal.length >= self._next:
            try:
                self._process = self._start(self._journal.path, ["archive"] if self._anew else [])
            except OSError:
                self._next = self._journal.length + COMPACTED_BYTES

    def close(self) -> None:
        """End the process, if it goes on: it is only put off."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _start(journal: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen([*PREPARE, str(journal), *words], stdin=null, stdout=null, stderr=null)
