"""Progress of a long simulation: a line on a terminal's stderr that is gone at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hpcsched.cli.run.results import Watch
from hpcsched.core.actions import Action
from hpcsched.core.events import Event, WorkersExited
from hpcsched.core.machine import Machine

PERIOD_S = 0.5
"""How often the line is written at most."""


class ProgressLine:
    """The line of one policy; nothing at all where stderr is no terminal.

    `watch` is for the simulation: None there, so that it costs nothing.
    """

    def __init__(self, policy: str, jobs: int) -> None:
        self._policy, self._jobs = policy, jobs
        self._done, self._due = 0, 0.0
        self._shown = sys.stderr.isatty()
        self.watch: Watch | None = self._watch if self._shown else None

    def __enter__(self) -> ProgressLine:
        # At once: a first plan can take long, and no event is seen before it is made.
        self._write(self._line())
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def _watch(self, event: Event, _actions: Sequence[Action], machine: Machine) -> None:
        if isinstance(event, WorkersExited):
            self._done += machine.run.jobs[event.job_id].state.final
        now = time.monotonic()
        if now >= self._due:
            self._due = now + PERIOD_S
            self._write(self._line())

    def _line(self) -> str:
        return f"hpcsched: simulating {self._policy}: {self._done} of {self._jobs} jobs done"

    def _write(self, line: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
