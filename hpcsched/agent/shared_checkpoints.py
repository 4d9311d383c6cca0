"""Two jobs that save into the same place: neither could tell its checkpoints from the other's."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath

from hpcsched.agent.checkpoint_files import SIGNS, is_wild
from hpcsched.core.jobs import Job

_SIGN = re.compile(f"{SIGNS.pattern}|.", re.DOTALL)
"""One sign of a pattern, or a character."""

MOST_SIGNS = 255
"""In one part of a path (a file name has no more bytes): a longer pattern is taken to name anything."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a job saves: its patterns, relative to where it runs."""

    job_id: int
    name: str
    workdir: str
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> Places:
        """Those of a job; no pattern if it does not save by itself."""
        restart = job.spec.restart
        return cls(job.id, job.spec.name, job.spec.workdir, restart.checkpoints if restart else ())

    def real(self) -> tuple[str, ...]:
        """The patterns from the root, without symbolic links before what varies. Asks the file system."""
        return tuple(_real(PurePosixPath(self.workdir) / pattern) for pattern in self.patterns)


def in_the_way(job: Job, others: Iterable[Job], *, began_s: float) -> list[Places]:
    """Where those jobs save that have begun before this one and may go on, or have run since it began, at
    `began_s` on the run's clock: what is the newest there may be theirs."""
    own = Places.of(job)
    rivals = (one for one in others if one.spec.restart is not None and one.id != job.id)
    return [Places.of(one) for one in rivals if own.patterns and _saves_beside(job, one, began_s)]


def sharing(own: Places, others: Iterable[Places]) -> tuple[Places, str] | None:
    """One that saves where `own` does, and the pattern of `own` that says so. Asks the file system."""
    mine = [*zip(own.patterns, own.real(), strict=True)]
    for other in others:
        theirs = other.real()
        for pattern, real in mine:
            if any(may_name_the_same(real, one) for one in theirs):
                return other, pattern
    return None


def _saves_beside(job: Job, other: Job, began_s: float) -> bool:
    # An attempt that was over before it was ready has saved nothing; its job may have been refused here.
    ran = [one for one in other.attempts if one.ready_s is not None or one.end_s is None]
    if not ran:
        return False
    if not other.state.final and (ran[0].start_s, other.id) < (began_s, job.id):
        return True
    # What starts just now is refused itself.
    known = (one for one in ran if one.ready_s is not None or one.start_s < job.current.start_s)
    return any(one.end_s is None or one.end_s > began_s for one in known)


def _real(pattern: PurePosixPath) -> str:
    parts = pattern.parts
    wild = next((n for n, part in enumerate(parts) if is_wild(part)), len(parts))
    known = min(wild, len(parts) - 1)
    return os.path.join(os.path.realpath(os.path.join(*parts[:known])), *parts[known:])  # noqa: PTH118


@lru_cache(maxsize=4096)
def may_name_the_same(one: str, other: str) -> bool:
    """Whether a path can match both patterns, or match one of them within a folder that matches the other."""
    return all(map(_may_be_one_name, PurePosixPath(one).parts, PurePosixPath(other).parts))


def _may_be_one_name(one: str, other: str) -> bool:
    wild, other_wild = is_wild(one), is_wild(other)
    if not (wild and other_wild):
        return fnmatchcase(one, other) if other_wild else fnmatchcase(other, one) if wild else one == other
    a, b = _SIGN.findall(one), _SIGN.findall(other)
    if max(len(a), len(b)) > MOST_SIGNS:
        return True
    seen, to_come = set[tuple[int, int]](), [(0, 0)]
    while to_come:
        i, j = place = to_come.pop()
        if place in seen:
            continue
        seen.add(place)
        x, y = "".join(a[i : i + 1]), "".join(b[j : j + 1])
        if not x and not y:
            return True
        if x == "*":
            to_come.append((i + 1, j))
        if y == "*":
            to_come.append((i, j + 1))
        if x and y and (x == y or "*" in (x, y) or "?" in (x, y) or "[" in (x[0], y[0])):
            to_come.append((i + (x != "*"), j + (y != "*")))
    return False
