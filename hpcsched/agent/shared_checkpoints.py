"""Two jobs that save into the same place: neither could tell its checkpoints from the other's."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath

from hpcsched.core.jobs import Job

_SIGN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
"""One sign of a pattern: a set of characters, or a character."""

MOST_SIGNS = 255
"""In one part of a path (a file name has no more bytes): a longer pattern is taken to name anything."""


def sharing(job: Job, others: Iterable[Job]) -> tuple[Job, str] | None:
    """A job because of which this one cannot be started, and the pattern of this one that names both's.

    Such a job began before this one and may go on, or has run since this one began: what is the newest there
    may be the other's. No file system is asked: a folder that has two names by a symbolic link is not seen.
    """
    own = _places(job)
    for other in others if own else ():
        if other.spec.restart is None or other.id == job.id or not _saves_beside(job, other):
            continue
        for pattern in own:
            if any(may_name_the_same(pattern, theirs) for theirs in _places(other)):
                return other, pattern
    return None


def _saves_beside(job: Job, other: Job) -> bool:
    if not other.attempts or not job.attempts:
        return False
    if not other.state.final and (other.attempts[0].start_s, other.id) < (job.attempts[0].start_s, job.id):
        return True
    began_s = next((one.start_s for one in job.attempts if one.ready_s is not None), None)
    if began_s is None:
        return False
    for one in other.attempts:
        # What was over before it was ready has saved nothing; what starts just now may be refused itself.
        ran = one.ready_s is not None or (one.end_s is None and one.start_s < job.current.start_s)
        if ran and (one.end_s is None or one.end_s > began_s):
            return True
    return False


def _places(job: Job) -> tuple[str, ...]:
    """The patterns of what it saves, from the root."""
    patterns = job.spec.restart.checkpoints if job.spec.restart else ()
    return tuple(os.path.normpath(PurePosixPath(job.spec.workdir) / one) for one in patterns)


@lru_cache(maxsize=4096)
def may_name_the_same(one: str, other: str) -> bool:
    """Whether a path can match both patterns, or match one of them within a folder that matches the other."""
    return all(map(_may_be_one_name, PurePosixPath(one).parts, PurePosixPath(other).parts))


def _may_be_one_name(one: str, other: str) -> bool:
    wild, other_wild = (any(sign in part for sign in "*?[") for part in (one, other))
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
