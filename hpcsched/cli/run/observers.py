"""Whoever follows a run: the display, and what tells others of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpcsched.cli.run.notifying import Notify
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.core.actions import Action
from hpcsched.core.events import Event
from hpcsched.core.machine import Machine
from hpcsched.store.rundir import RunDir


class Display(Protocol):
    """An observer of a run that is closed at its end."""

    def event(self, event: Event, actions: Sequence[Action]) -> None: ...

    def tick(self, now: float) -> None: ...

    def message(self, text: str, *, about: str = "") -> None: ...

    def close(self) -> None: ...


class Observers:
    """All observers of a run, as one. The display comes last: nobody may read standard error any more.

    Args:
        display: makes what shows the run.
        notify: who is told of it; None: nobody.
    """

    def __init__(
        self, rundir: RunDir, *, display: Callable[[Machine], Display], notify: Notify | None
    ) -> None:
        self._rundir, self._make_display, self._notify = rundir, display, notify
        self._display: Display | None = None
        self._announcer: Any = None
        self._last_words = ""

    def of(self, machine: Machine) -> Observers:
        """Begin to follow a run; returns itself."""
        self._display = self._make_display(machine)
        if self._notify:
            self._announcer = self._notify.announcer(machine, self._rundir, self._show)
        return self

    def event(self, event: Event, actions: Sequence[Action]) -> None:
        if self._announcer:
            self._announcer.event(event, actions)
        if self._display:
            self._display.event(event, actions)

    def tick(self, now: float) -> None:
        if self._announcer:
            self._announcer.tick()
        if self._display:
            self._display.tick(now)

    def message(self, text: str, *, about: str = "") -> None:
        if self._announcer:
            self._announcer.message(text, about=about)
        if self._display:
            self._display.message(text, about=about)

    def close(self) -> None:
        """End the display."""
        if self._display:
            self._display.close()

    def last_word(self, text: str) -> None:
        """Note what was said of how the run goes on; what is told of its end says that too."""
        self._last_words = text

    def over(self, life: Any) -> None:
        """The agent has left: tell those who want to know, within a bounded time."""
        if self._announcer and not life.moved:  # it goes on
            jobs = len(life.machine.run.jobs)
            over = "the last job has ended" if jobs == 1 else f"all {jobs} jobs have ended"
            left = life.exit_code in (WORK_LEFT, 130)
            how = self._last_words or (f"{life.machine.run.unfinished} jobs are left" if left else over)
            self._announcer.over(how, str(life.outcome))

    def __enter__(self) -> Observers:
        """Have an error within told too: the run's end by it."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._announcer and error is not None:
            said = str(error) or type(error).__name__
            self._announcer.over(f"the agent has ended: {said}", "FAILED")

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._display:
                self._display.message(text)
