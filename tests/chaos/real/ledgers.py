"""Ledgers that programs keep of what they have trained, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from hpcsched.agent.own_checkpoints import SETTLED_FILE_S, SURELY_SETTLED

ALMOST_S = 0.5


@dataclass(frozen=True)
class Line:
    """A line of a ledger."""

    word: str
    attempt: int
    pid: int
    what: str
    step: int
    at: float


def read(path: Path) -> list[Line]:
    """The lines of a ledger; none if there is no such file."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [Line(row[0], int(row[1]), int(row[2]), row[3], int(row[4]), float(row[5])) for row in rows]


def parts_of(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each process, one after the other."""
    return [list(part) for _, part in groupby(lines, lambda line: line.word)]


def begin_of(part: Sequence[Line]) -> int | None:
    """The step at which a process has begun; None if it has not."""
    return next((line.step for line in part if line.what == "begin"), None)


def savings(parts: Sequence[Sequence[Line]]) -> set[int]:
    """The steps from which the next process may go on: the last one saved, and what may be saved after it."""
    found = {0}
    for part in parts:
        for line in part:
            if line.what == "saved":
                found = {line.step}
            elif line.what == "saving":
                found |= {line.step}
    return found


def surely_whole(part: Sequence[Line]) -> bool:
    """Whether the newest checkpoint of a program that saves by itself is known to be whole: it has left by
    itself, or had written it so long before it was killed."""
    saved = [line.at for line in part if line.what in ("saving", "saved")]
    settled = not saved or part[-1].at - saved[-1] > SURELY_SETTLED * SETTLED_FILE_S + ALMOST_S
    return part[-1].what == "left" or settled


def lost(lines: Sequence[Line]) -> tuple[int, int]:
    """How many steps a job has done and could not go on from: at least, and at most.

    A step is told after its line was written, so one that dies may have told one less. What the last process
    has lost is not repeated by any. One that has not begun has neither lost nor gone on from anything.
    """
    parts = [part for part in parts_of(lines) if begin_of(part) is not None]
    least = most = 0
    for number, part in enumerate(parts):
        after = parts[number + 1] if number + 1 < len(parts) else None
        begin = (begin_of(after) or 0) if after else max(savings(parts))
        done = max((line.step for line in part if line.what in ("begin", "step")), default=0)
        if done > begin:
            most += done - begin
            least += done - begin - 1 if after else 0
    return least, most


def widest(parts: Sequence[Sequence[Line]]) -> int:
    """For how many steps one line of a trainer counts at most, as a large batch does for several."""
    return max([1, *(after.step - before.step for part in parts for before, after in pairwise(part))])


def lost_by_trainer(lines: Sequence[Line], *, completed: bool) -> tuple[int, int]:
    """The same of a trainer, whose line says that so many steps are done and the next one has begun.

    What it saves is in no ledger: unless it has `completed`, its last process may have lost all of its steps.
    """
    parts = parts_of(lines)
    least = most = 0
    for part, after in pairwise(parts):
        most += max(0, part[-1].step + widest(parts) - after[0].step)
        least += max(0, part[-1].step - after[0].step)
    if parts and not completed:
        most += parts[-1][-1].step + widest(parts) - parts[-1][0].step
    return least, most


def begun_beside(lines: Sequence[Line], since: float, until: float, *, excused: int) -> Iterator[float]:
    """The seconds after `since` at which processes have begun before `until`, but for so many first ones."""
    begins = [line.at for line in lines if line.what == "begin"]
    yield from [at - since for at in begins if since + 0.5 < at < until][excused:]
