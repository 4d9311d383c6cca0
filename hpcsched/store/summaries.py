"""The user's runs, a line each: for `status --all`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hpcsched.errors import HpcschedError
from hpcsched.store import registry
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import age_s, read_brief


class RunSummary(msgspec.Struct, kw_only=True):
    """One of the user's runs: a line of `status --all`. `state` None: it has written no snapshot yet."""

    id: str
    dir: str
    state: str | None
    stale: bool
    allocation: dict[str, str | None]
    age_s: float | None
    done: int
    left: int

    @property
    def alive(self) -> bool:
        """Whether its agent lives."""
        return self.state in ("RUNNING", "DRAINING") and not self.stale


def my_runs(environ: Mapping[str, str] | None = None) -> list[RunSummary]:
    """The user's runs, newest first; one without a readable snapshot has no state."""
    return [_line(entry) for entry in registry.runs(environ=environ)]


def _line(entry: registry.RegisteredRun) -> RunSummary:
    try:
        brief = read_brief(RunDir(Path(entry.dir)))
    except HpcschedError:
        return RunSummary(
            id=entry.id, dir=entry.dir, state=None, stale=True, allocation={}, age_s=None, done=0, left=0
        )
    return RunSummary(
        id=entry.id,
        dir=entry.dir,
        state=brief.run.state,
        stale=brief.run.stale,
        allocation=brief.run.allocation,
        age_s=round(age_s(brief.run), 3),
        done=brief.done,
        left=brief.left,
    )
