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

from hpcsched.patience import but_for_lasting

MOST_MATCHES = 1000
"""Of all patterns of a job (chosen); a program that keeps more is not followed further."""

MOST_ENTRIES = 20_000
"""Directory entries that are looked at each time (chosen): the patterns may name a home directory."""

NEWEST = 4
"""How many of the newest checkpoints are looked into (chosen): a program writes one after the other."""

DEPTH = 4
"""Folders below a checkpoint that are looked into (chosen)."""

_UNFINISHED = re.compile(
    r"(?<![^._-])(?:tmp|temp|temporary|part|partial|incomplete)(?![^._-])", re.IGNORECASE
)
"""In the names under which programs write what they rename when it is whole."""

SIGNS = re.compile(r"\[!?\]?[^\]]*\]|[*?]")
"""What stands for something else in a pattern."""

_FRACTION = re.compile(r"(?<![0-9.])[0-9]+\.[0-9]+(?![0-9.])")

_END_OF_ZIP, _END_BYTES = b"PK\x05\x06", 22
"""The last record of an archive, which ends with the length of a comment: none."""

_TRUSTED = frozenset({os.getuid(), 0})
"""Users whose symbolic links are followed."""


class Last(Enum):
    """What is known of the file that a program writes last into a checkpoint."""

    UNKNOWN = "nobody knows which it is"
    MISSING = "it is not there, or all has a name that says so"
    OVERTAKEN = "others are newer"
    NEWEST = "nothing is newer"


_Found = tuple[int, Path, os.stat_result, str]
"""When something was changed (ns, Unix), where it is, and the last part of the pattern that names it."""

Mark = tuple[int, int, int]
"""What changes when a checkpoint is written to: its newest time (ns, Unix), bytes, and number of files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it lies there. `step`: what its name says."""

    path: Path
    mark: Mark
    last: Last = Last.UNKNOWN
    folder: bool = False
    step: int | None = None

    @property
    def saved_at(self) -> float:
        """Unix time of its newest part."""
        return self.mark[0] / 1e9


def find_checkpoints(workdir: Path, patterns: Sequence[str], last: str = "") -> list[Checkpoint]:
    """The newest checkpoints that the patterns name, relative to `workdir`, oldest first.

    What has their name with a word such as `tmp` in it is one of them that is not finished: its last file is
    missing. `last`: the file that is written last into one that is a folder. A symbolic link is followed only
    if it is ours or the system's, and none within a checkpoint. Raises OSError for an error that may pass.
    """
    budget = _Budget(MOST_ENTRIES)
    matches = dict[Path, str]()
    for pattern in patterns:
        for path in _matches(workdir, pattern, budget):
            matches.setdefault(path, PurePosixPath(pattern).name)
    found = {True: list[_Found](), False: list[_Found]()}
    for path, pattern in [*matches.items()][:MOST_MATCHES]:
        with but_for_lasting():
            seen = path.stat()
            if stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode):
                found[_unfinished(path.name, pattern)].append((seen.st_mtime_ns, path, seen, pattern))
    newest = [one for some in found.values() for one in sorted(some, key=lambda one: one[:2])[-NEWEST:]]
    measured = (_measured(path, seen, last, budget, pattern) for _, path, seen, pattern in newest)
    return sorted(measured, key=lambda one: one.mark)


def is_wild(pattern: str) -> bool:
    """Whether it may name more than one thing."""
    return any(sign in pattern for sign in "*?[")


def step_in_name(name: str, pattern: str) -> int | None:
    """The step in the name of a checkpoint, but for its suffix: 40 of `checkpoint-40` and `step_40.h5`.

    It is the number after "step" or "iter", else the last one; none that stands in `pattern` itself, and no
    decimal fraction.
    """
    numbers, own = _numbers(name), [number for _, number in _numbers(SIGNS.sub("*", pattern))]
    for number in own:
        left = next((one for one in numbers if one[1] == number), None)
        numbers = [one for one in numbers if one is not left]
    said = [number for word, number in numbers if word] or [number for _, number in numbers]
    return int(said[-1]) if said and len(said[-1]) <= 15 else None


def _numbers(name: str) -> list[tuple[str, str]]:
    """Whole numbers in a name, each with the word before it that says that it is a step, or ""."""
    suffix = PurePosixPath(name).suffix
    stem = name if suffix[1:].isdecimal() or not suffix else name.removesuffix(suffix)
    found = re.findall(r"(step|iter|iteration)?s?[-_=]?(?<![0-9])([0-9]+)(?![0-9])", _FRACTION.sub("", stem))
    return [(word, number) for word, number in found]


def ends_as_an_archive(path: Path) -> bool:
    """Whether a file ends with the end of a zip archive, as PyTorch, NumPy and Keras write it at last. Raises
    OSError."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < _END_BYTES:
            return False
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
    return end.startswith(_END_OF_ZIP) and end.endswith(b"\0\0")


class _Budget:
    """How many directory entries may still be looked at."""

    def __init__(self, entries: int) -> None:
        self._left = entries

    def entries(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        with but_for_lasting(), os.scandir(folder) as entries:
            for entry in entries:
                self._left -= 1
                if self._left < 0:
                    return
                yield entry


def _matches(workdir: Path, pattern: str, budget: _Budget) -> Iterator[Path]:
    parts = PurePosixPath(pattern).parts
    bases = [workdir]
    for number, part in enumerate(parts, 1):
        wild, last = is_wild(part), number == len(parts)
        found = list[Path]()
        for base in bases:
            names = [] if wild else [part]
            for entry in budget.entries(base) if wild or last else ():
                matches = wild and fnmatchcase(entry.name, part)
                matches = matches and (part[0] == "." or entry.name[0] != ".")
                if matches or (last and entry.name != part and _begun_as(entry.name, part)):
                    names.append(entry.name)
            found += [base / name for name in names if _ours(base / name)]
        bases = found[: 10 * MOST_MATCHES]
    if parts:
        yield from bases


def _ours(path: Path) -> bool:
    """Whether there is something, and no link of another user's that may lead anywhere."""
    with but_for_lasting(), contextlib.suppress(ValueError):
        seen = path.lstat()
        return not stat.S_ISLNK(seen.st_mode) or seen.st_uid in _TRUSTED
    return False


def _unfinished(name: str, pattern: str) -> bool:
    """Whether a name says so by a word that is not in its pattern."""
    words, own = ({word.lower() for word in _UNFINISHED.findall(text)} for text in (name, pattern))
    return not words <= own


def _begun_as(name: str, pattern: str) -> bool:
    """Whether what the pattern names may be written under this name at first."""
    if not _unfinished(name, pattern):
        return False
    literal = max(SIGNS.split(pattern), key=len)
    return (len(literal) > 1 and literal in name) or fnmatchcase(
        re.sub(rf"[._-]?{_UNFINISHED.pattern}", "", name, flags=re.IGNORECASE).lstrip("._-"), pattern
    )


def _measured(path: Path, seen: os.stat_result, last: str, budget: _Budget, pattern: str) -> Checkpoint:
    unfinished, step = _unfinished(path.name, pattern), step_in_name(path.name, pattern)
    if not stat.S_ISDIR(seen.st_mode):
        how = Last.MISSING if unfinished else Last.UNKNOWN
        return Checkpoint(path, (seen.st_mtime_ns, seen.st_size, 1), how, step=step)
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
    return Checkpoint(path, (newest, size, files), how, folder=True, step=step)


def _files(
    folder: Path, budget: _Budget, depth: int, below: str = ""
) -> Iterator[tuple[str, os.stat_result]]:
    """Files in a folder and those below it, by their path from it."""
    for entry in budget.entries(folder):
        status = None
        with but_for_lasting():
            status = entry.stat(follow_symlinks=False)
        if status is None:
            continue
        name = f"{below}{entry.name}"
        if stat.S_ISDIR(status.st_mode) and depth > 0:
            yield from _files(Path(entry.path), budget, depth - 1, f"{name}/")
        else:
            yield name, status
