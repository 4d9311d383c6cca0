"""What a page says of one job: what it runs, why it ended, its story and its last words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcsched.core.model import JobState
from hpcsched.report.pieces import anchor, inline

OPEN = 5
"""Most jobs whose sections are open when the page is: of more one chooses oneself."""

KINDS = {
    JobState.COMPLETED: "good",
    JobState.CANCELLED: "gone",
    **{state: "bad" for state in JobState if state.failed},
}
"""The class of a state in the page's style."""


@dataclass(frozen=True, kw_only=True)
class JobDetail:
    """A job: `facts` on it as (name, words), why it is as it is (""), and its `story` as (when, words).

    `log` is the path of its output ("": not known), `tail` the last lines of it; `curves` a figure (None: it
    has none).
    """

    job_id: int
    name: str
    state: JobState
    why: str
    facts: Sequence[tuple[str, str]]
    story: Sequence[tuple[str, str]]
    log: str = ""
    tail: Sequence[str] = ()
    curves: str | None = None


class Opened(NamedTuple):
    """A job's section: `id` is what links lead to, `kind` the class of its state."""

    detail: JobDetail
    id: str
    kind: str
    opened: bool
    curves: str | None


def sections(details: Sequence[JobDetail], numbers: Iterator[int]) -> list[Opened]:
    """The sections of jobs in this order: those of few are open, of many those of failed ones, if they are
    few. Figures get their numbers from `numbers`."""
    failed = [detail for detail in details if detail.state.failed]
    shown = next((few for few in (details, failed) if len(few) <= OPEN), ())
    return [
        Opened(
            detail=detail,
            id=anchor(detail.job_id),
            kind=KINDS.get(detail.state, "open"),
            opened=detail in shown,
            curves=None if detail.curves is None else inline(detail.curves, next(numbers)),
        )
        for detail in details
    ]
