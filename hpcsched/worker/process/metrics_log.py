"""What a training writes of its metrics: a line of metrics.jsonl in its job's folder each time. No torch."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from hpcsched.contract import files
from hpcsched.contract.metrics import Point
from hpcsched.errors import BadInput
from hpcsched.worker.process.contract import say

MOST_A_SECOND = 1.0
"""Seconds between two points of a training's own metrics, at least (chosen)."""

POINTS = 1000
"""Of a long training a point comes each time when it has taken longer by this part (chosen): a week makes
some 7,000."""


class MetricsLog:
    """The metrics.jsonl of a job; lines that cannot be written are told of once, and hold nothing up.

    `folder` None: there is no job, and nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / files.METRICS
        self._descriptor: int | None = None

    def write(self, step: int, values: Mapping[str, SupportsFloat | None], *, attempt: int) -> None:
        """Add the values after `step` steps. Raises ValueError for names that are none."""
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
                self._begin_line(self._descriptor)
            os.write(self._descriptor, line)
        except OSError as error:
            say(f"no metrics any more: {self._path}: {error.strerror}")
            self._path = None

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
