"""The run that a sweep's jobs are put into: one that is there, or one of its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcsched import Job, Run
from hpcsched.core.model import JobState
from hpcsched.durations import parse_duration
from hpcsched.errors import ConfigError, HpcschedError, NoSuchRun

log = logging.getLogger(__name__)

LOOKS_EVERY_S = 2.0
"""Time between two looks for jobs that have ended (chosen)."""


class SweepRun(NamedTuple):
    """A run, for how many seconds it may be without an agent, and whether that was started here."""

    run: Run
    patience_s: float
    own: bool = False

    @property
    def over(self) -> bool:
        """Whether its agent was started here and has left, having had nothing to run for so long."""
        return self.own and not self.run.alive

    @classmethod
    def open(cls, dir: str | None, options: Mapping[str, Any], wait_for_agent: str) -> SweepRun:
        """The run in `dir`, or the one that commands mean here. Where no agent lives one is started with
        `options`, unless `dir` alone is given: that run's own agent is waited for.

        Raises HpcschedError.
        """
        try:
            patience_s = parse_duration(wait_for_agent)
        except (ValueError, OverflowError):
            accepted = 'a duration, such as "90m" or "2h"'
            raise ConfigError(
                where="hydra.launcher.wait_for_agent", got=repr(wait_for_agent), accepted=accepted
            ) from None
        given = {name: value for name, value in options.items() if value is not None}
        there = Run(dir)
        if there.alive or (dir and given.keys() <= {"idle_timeout"}):
            return cls(there, patience_s)
        own = Run.start(dir, **given)
        log.info(f"hpcsched: started an agent in {own.dir}")
        atexit.register(_stop, own)
        return cls(own, 0.0, own=True)

    def wait(self, jobs: Sequence[Job], tell: Callable[[str, str, str], None]) -> None:
        """Wait until all of them have ended; `tell` the name, state and output of each that has.

        Raises NoSuchRun where there has been no agent for too long.
        """
        left = {job.name for job in jobs}
        without_since: float | None = None
        while left:
            try:
                self.run.wait(left, timeout=LOOKS_EVERY_S)
                without_since = None
            except TimeoutError:
                without_since = None
            except NoSuchRun as error:
                if without_since is None:
                    without_since = time.monotonic()
                    log.warning(f"hpcsched: {error}")
                if time.monotonic() >= without_since + self.patience_s:
                    raise
                time.sleep(LOOKS_EVERY_S)
            for row in self.run.table():
                if row["name"] in left and JobState(row["state"]).final:
                    left.remove(row["name"])
                    tell(row["name"], row["state"], row.get("output") or "")


def _stop(run: Run) -> None:
    """End a run of one's own; jobs are left where the program was interrupted."""
    with contextlib.suppress(HpcschedError):
        if run.alive:
            run.cancel()
            run.stop()
