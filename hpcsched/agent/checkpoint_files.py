"""The checkpoints of a program that saves by itself, as they lie in its directory: found, not read.

Whoever calls may have to wait for a file system, so nobody calls from the agent's loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MOST_MATCHES = 1000
"""Of all patterns of a job (chosen); a program that keeps more is not followed further."""

MOST_ENTRIES = 20_000
"""Directory entries that are looked at each time (chosen): the patterns may name a home directory."""

NEWEST = 4
"""How many of the newest checkpoints are looked into (chosen): a program writes one after the other."""

DEPTH = 4
"""Folders below a checkpoint that are looked into (chosen)."""

_UNFINISHED = re.compile(r"(^|[._-])(tmp|temp|temporary|part|partial|incomplete)([._-]|$)", re.IGNORECASE)
"""In the names under which programs write what they rename when it is whole."""


_TRUSTED = frozenset({os.getuid(), 0})
"""Users whose symbolic links are followed."""


class Last(Enum):
    """What is known of the file that a program writes last into a checkpoint."""

    UNKNOWN = "nobody knows which it is"
    MISSING = "it is not there, or all has a name that says so"
    OVERTAKEN = "others are newer"
    NEWEST = "nothing is newer"


Mark = tuple[int, int, int]
"""What changes when a checkpoint is written to: its newest time (ns, Unix), bytes, and number of files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it lies there."""

    path: Path
    mark: Mark
    last: Last = Last.UNKNOWN
    folder: bool = False

    @property
    def saved_at(self) -> float:
        """Unix time of its newest part."""
        return self.mark[0] / 1e9


def find_checkpoints(workdir: Path, patterns: Sequence[str], last: str = "") -> list[Checkpoint]:
    """The newest checkpoints that the patterns name, relative to `workdir`, oldest first.

    What has the name of something unfinished beside them is one of them, of which the last file is missing.
    `last`: the file that is written last into one that is a folder. A symbolic link is followed only if it is
    ours or the system's, and none within a checkpoint. Never raises.
    """
    budget = _Budget(MOST_ENTRIES)
    matches = dict.fromkeys(path for pattern in patterns for path in _matches(workdir, pattern, budget))
    found = list[tuple[int, Path, os.stat_result]]()
    for path in [*matches][:MOST_MATCHES]:
        with contextlib.suppress(OSError):
            seen = path.stat()
            if stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode):
                found.append((seen.st_mtime_ns, path, seen))
    newest = sorted(found, key=lambda one: one[:2])[-NEWEST:]
    return sorted((_measured(path, seen, last, budget) for _, path, seen in newest), key=lambda one: one.mark)


def step_in_name(path: Path) -> int | None:
    """The last number in a checkpoint's name, but for its suffix: 40 of `checkpoint-40` and `step_40.h5`."""
    name = path.name if path.suffix[1:].isdecimal() else path.stem
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= 15 else None


class _Budget:
    """How many directory entries may still be looked at."""

    def __init__(self, entries: int) -> None:
        self._left = entries

    def entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                self._left -= 1
                if self._left < 0:
                    return
                yield entry


def _matches(workdir: Path, pattern: str, budget: _Budget) -> Iterator[Path]:
    parts = PurePosixPath(pattern).parts
    bases = [workdir]
    for number, part in enumerate(parts, 1):
        wild, last = any(sign in part for sign in "*?["), number == len(parts)
        found = list[Path]()
        for base in bases:
            names = [] if wild else [part]
            for entry in budget.entries(base) if wild or last else ():
                matches = wild and fnmatchcase(entry.name, part)
                matches = matches and (part[0] == "." or entry.name[0] != ".")
                if matches or (last and entry.name != part and _UNFINISHED.search(entry.name)):
                    names.append(entry.name)
            found += [base / name for name in names if _ours(base / name)]
        bases = found[: 10 * MOST_MATCHES]
    if parts:
        yield from bases


def _ours(path: Path) -> bool:
    """Whether there is something, and no link of another user's that may lead anywhere."""
    try:
        seen = path.lstat()
    except (OSError, ValueError):
        return False
    return not stat.S_ISLNK(seen.st_mode) or seen.st_uid in _TRUSTED


def _measured(path: Path, seen: os.stat_result, last: str, budget: _Budget) -> Checkpoint:
    unfinished = _UNFINISHED.search(path.name) is not None
    if not stat.S_ISDIR(seen.st_mode):
        how = Last.MISSING if unfinished else Last.UNKNOWN
        return Checkpoint(path, (seen.st_mtime_ns, seen.st_size, 1), how)
    newest, size, files, last_ns = seen.st_mtime_ns, 0, 0, None
    newest_file = 0
    for entry, status in _files(path, budget, DEPTH):
        size, files = size + status.st_size, files + 1
        newest = max(newest, status.st_mtime_ns)
        if last and entry == last:
            last_ns = status.st_mtime_ns
        else:
            newest_file = max(newest_file, status.st_mtime_ns)
    if not last and not unfinished:
        how = Last.UNKNOWN
    elif last_ns is None or unfinished:
        how = Last.MISSING
    else:
        how = Last.NEWEST if last_ns >= newest_file else Last.OVERTAKEN
    return Checkpoint(path, (newest, size, files), how, folder=True)


def _files(
    folder: Path, budget: _Budget, depth: int, below: str = ""
) -> Iterator[tuple[str, os.stat_result]]:
    """Files in a folder and those below it, by their path from it."""
    for entry in budget.entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        name = f"{below}{entry.name}"
        if stat.S_ISDIR(status.st_mode) and depth > 0:
            yield from _files(Path(entry.path), budget, depth - 1, f"{name}/")
        else:
            yield name, status
