"""The progress of a program that knows no contract, from what it prints and writes."""

from __future__ import annotations

import contextlib
import csv
import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpcsched.contract import files
from hpcsched.core.model import JobSpec
from hpcsched.decoding import opened
from hpcsched.dialects.checkpoint import step_of
from hpcsched.dialects.pattern import MOST_LINE, step_pattern
from hpcsched.errors import BadInput
from hpcsched.patience import patiently

Report = tuple[int, float]
"""A step, and when it was done: seconds of the wall clock, as file times are."""

_MOST_AT_ONCE = 256 * 1024
"""Bytes of output that are looked at in one reading (chosen): of more, the newest."""

_TAIL = 64 * 1024
_MARK = files.ATTEMPT_MARK.encode()
_MOST_FILES = 1000


class Reader(Protocol):
    def read(self, now: float, *, over: bool = False) -> Report | None:
        """The newest step since the last call; None if there is none. Never waits, never raises. `over`: the
        program has ended, and its last line may have no end."""


def progress_of(spec: JobSpec, workdir: Path, output: Path, *, since: float) -> Reader | None:
    """What tells the steps of a program that runs in `workdir` and prints to `output`: its pattern, else what
    its dialect knows; None if it has neither. What was there before `since` (seconds of the wall clock) is of
    an earlier one. A pattern that is not accepted, which is said where it comes from, finds nothing.
    """
    restart, readers = spec.restart, list[Reader]()
    if spec.progress_pattern:
        with contextlib.suppress(BadInput):
            readers.append(Output(output, step_pattern(spec.progress_pattern).find))
    elif restart is not None and restart.speaks:
        if restart.speaks == "transformers":
            readers.append(Output(output, TrainingBar()))
        if restart.speaks == "lightning":
            readers.append(Files(_metrics(restart.checkpoints), workdir, since, _last_row))
        if restart.complete:
            whole = tuple(f"{one}/{restart.complete}" for one in restart.checkpoints)
            readers.append(Files(whole, workdir, since, lambda path: step_of(path.parent)))
        else:
            readers.append(Files(restart.checkpoints, workdir, since, step_of))
    return Newest(readers) if readers else None


class Newest:
    """The largest step that any of its readers tells, once each."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self._last = -1

    def read(self, now: float, *, over: bool = False) -> Report | None:
        reports = (report for one in self._readers if (report := one.read(now, over=over)))
        found = max(reports, default=None)
        if found is None or found[0] <= self._last:
            return None
        self._last = found[0]
        return found


class Output:
    """Reads what is added to a file of output, from its end as it is now on, and finds steps in its lines."""

    def __init__(self, path: Path, find: Callable[[str], int | None]) -> None:
        self._path, self._find = path, find
        self._rest = b""
        try:
            self._at = patiently(path.stat).st_size
        except (OSError, ValueError):
            self._at = 0

    def read(self, now: float, *, over: bool = False) -> Report | None:
        try:
            with opened(self._path) as (file, about):
                if about.st_size < self._at:  # it was begun anew
                    self._at, self._rest = 0, b""
                if about.st_size - self._at > _MOST_AT_ONCE:
                    self._at, self._rest = about.st_size - _MOST_AT_ONCE, b""
                file.seek(self._at)
                data = file.read(_MOST_AT_ONCE)
        except (OSError, ValueError, BadInput):
            return None
        self._at += len(data)
        # Bars end their lines with "\r", and the last of them may be drawn without an end.
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + data)
        if over:
            lines.append(self._rest)
        self._rest = self._rest[-MOST_LINE - 1 :]
        step = None
        for line in lines:
            if (
                len(line) <= 4 * MOST_LINE
                and not line.startswith(_MARK)
                and (found := self._find(line.decode(errors="replace"))) is not None
            ):
                step = found
        return None if step is None else (step, now)


class TrainingBar:
    """Finds the step in the bar of a Trainer, ` 12%|#2   | 12/100 [00:01<00:09, 9.5it/s]`.

    Bars of other things have a word before them, or another total: the first one is the training's. One that
    goes on is at 0 too until its first step is done.
    """

    _BAR = re.compile(r"\s{0,80}[0-9]{1,3}%\|[^|]{0,400}\| ([0-9]{1,15})/([0-9]{1,15}) \[")

    def __init__(self) -> None:
        self._total: str | None = None

    def __call__(self, line: str) -> int | None:
        bar = self._BAR.match(line)
        if bar is None or (self._total or bar[2]) != bar[2]:
            return None
        self._total = bar[2]
        return int(bar[1]) or None


class Files:
    """The newest of the files that match, read where it has changed."""

    def __init__(
        self, patterns: Sequence[str], workdir: Path, since: float, step: Callable[[Path], int | None]
    ) -> None:
        self._patterns, self._workdir, self._step = patterns, workdir, step
        self._newest = since

    def read(self, now: float, *, over: bool = False) -> Report | None:
        found: tuple[float, Path] | None = None
        for path in matching(self._patterns, self._workdir):
            try:
                written = path.stat().st_mtime
            except (OSError, ValueError):
                continue
            if written > self._newest and (found is None or written > found[0]):
                found = written, path
        if found is None or (step := self._step(found[1])) is None:
            return None
        self._newest = found[0]
        return step, min(found[0], now)


def matching(patterns: Sequence[str], workdir: Path) -> list[Path]:
    """What there is of these patterns, relative to `workdir`; at most a thousand. Never raises."""
    found: list[Path] = []
    for pattern in patterns:
        try:
            names = glob.iglob(pattern, root_dir=workdir)  # noqa: PTH207, which refuses absolute ones
            found += [workdir / name for name, _ in zip(names, range(_MOST_FILES), strict=False)]
        except (OSError, ValueError, re.error):
            continue
    return found


def _metrics(checkpoints: Sequence[str]) -> tuple[str, ...]:
    """Where a CSVLogger writes: beside the checkpoints, or where the program runs."""
    folders = dict.fromkeys(["", *(f"{os.path.dirname(one)}/" for one in checkpoints)])  # noqa: PTH120
    names = ("metrics.csv", "version_*/metrics.csv", "lightning_logs/version_*/metrics.csv", "../metrics.csv")
    return tuple(f"{folder}{name}" for folder in folders for name in names)


def _last_row(path: Path) -> int | None:
    """The steps done by the last whole row of a CSVLogger, which counts them from 0."""
    try:
        with opened(path) as (file, about):
            head = file.read(_TAIL)
            file.seek(max(0, about.st_size - _TAIL))
            tail = file.read(_TAIL)
    except (OSError, BadInput):
        return None
    first, _, _ = head.partition(b"\n")
    rows = tail.rpartition(b"\n")[0].split(b"\n")
    try:
        columns = next(csv.reader([first.decode()]))
        at = columns.index("step")
        for row in reversed(rows[1:]):
            cells = next(csv.reader([row.decode()]), [])
            if len(cells) == len(columns) and re.fullmatch(r"[0-9]{1,15}", cells[at]):
                return int(cells[at]) + 1
    except (ValueError, csv.Error, StopIteration):
        return None
    return None
