"""What a training writes of its metrics: a line of metrics.jsonl in its job's folder each time. No torch."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import SupportsFloat

from hpcsched.contract import codec, files
from hpcsched.contract.metrics import Point
from hpcsched.errors import BadInput
from hpcsched.patience import passes
from hpcsched.watchers import let_read
from hpcsched.worker.process.contract import say, write_atomically

MOST_A_SECOND = 1.0
"""Seconds between two points of a training's own metrics, at least (chosen)."""

POINTS = 1000
"""Of a long training a point comes each time when it has taken longer by this part (chosen): a week makes
some 7,000."""


class _Logged:
    """The names of the metrics that the program of a job logs itself.

    Those that would be logged for it are on record for the attempts to come: their lines go on in the same
    curve, from their first step on.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / files.LOGGED
        self._recorded = _names(self._path)
        self.names = set(self._recorded)

    def left(self, names: Iterable[str]) -> set[str]:
        """Those of the names that the program does not log."""
        asked = set(names)
        if new := (asked & self.names) - self._recorded:
            self._recorded |= new
            # Without the record an attempt to come learns it when the program logs.
            with contextlib.suppress(OSError):
                write_atomically(self._path, codec.line(dict.fromkeys(sorted(self._recorded), True)))
        return asked - self.names


_of_folder: dict[Path, _Logged] = {}
"""What all logs of this process know of a job: a program may have a `Session` and a `Link`."""


def _of(folder: Path) -> _Logged:
    if folder not in _of_folder:
        _of_folder[folder] = _Logged(folder)
    return _of_folder[folder]


def _names(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            return set(codec.document(file.read(codec.SMALL_BYTES + 1)))
    except (OSError, BadInput):
        return set()


class MetricsLog:
    """The metrics.jsonl of a job; lines that cannot be written are told of once, and hold nothing up.

    `folder` None: there is no job, and nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / files.METRICS
        self._logged = None if folder is None else _of(folder)
        self._descriptor: int | None = None

    def left(self, names: Iterable[str]) -> set[str]:
        """Those of the names that the program does not log itself: what may be logged for it."""
        return set(names) if self._logged is None else self._logged.left(names)

    def write(self, step: int, values: Mapping[str, SupportsFloat | None], *, attempt: int) -> None:
        """Add what the program logs after `step` steps. Raises ValueError for names that are none."""
        if self._logged is not None:
            self._logged.names.update(values)
        self.write_for_it(step, values, attempt=attempt)

    def write_for_it(self, step: int, values: Mapping[str, SupportsFloat | None], *, attempt: int) -> None:
        """Add what is logged for a program, of the names that are `left`. Raises ValueError for names that
        are none."""
        if self._path is None or not values:
            return
        numbers = {name: None if value is None else float(value) for name, value in values.items()}
        try:
            line = Point(step, time.time(), attempt, numbers).encode()
        except BadInput as error:
            raise ValueError(str(error)) from None
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
                let_read(self._descriptor, self._path.parent)
                self._begin_line(self._descriptor)
            os.write(self._descriptor, line)
        except OSError as error:
            if passes(error):  # only this point is lost
                self._close()
                return
            say(f"no metrics any more: {self._path}: {error.strerror}")
            self._path = None

    def _close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def _begin_line(descriptor: int) -> None:
        """An attempt that was killed may have left half a line."""
        size = os.fstat(descriptor).st_size
        if size:
            with Path(f"/proc/self/fd/{descriptor}").open("rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(descriptor, b"\n")


class Pace:
    """When the next point of a training's own metrics is due: often at first, then by its length so far."""

    def __init__(self, least_s: float = MOST_A_SECOND) -> None:
        self._least_s = least_s
        self._began = time.monotonic()
        self._next = -math.inf

    def due(self) -> bool:
        """Whether it is time, which is then taken."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + max(self._least_s, (now - self._began) / POINTS)
        return True
