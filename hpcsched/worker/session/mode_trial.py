"""Which of several ways to make steps is the fastest: measured in steps that are made anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

TURN = 10
"""Steps of a turn."""

WARM_UP = 2
"""Before a mode is measured for a turn's steps, so many are made in it that do not count."""

VISITS = 3
"""Modes that are close to the best are measured so often."""

CLOSE_CALL = 1.1
"""What takes less than this much of the best one's time is close to it."""

WORTH = 0.98
"""Of what is alike the simpler mode is taken: another one has to be this much faster."""

CLEAR = 0.7
"""A mode that takes this much of the simplest one's time is good enough."""


@dataclass
class ModeTrial:
    """Measures modes one after another, and those that are close to the best some times more, in turns.

    `names` are the modes, the simplest first. Say `took` after each step that was made in `current`. With one
    that takes less than `clear` of the simplest one's time the others need not be tried.
    """

    names: list[str]
    clear: float = CLEAR
    refused: dict[str, str] = field(default_factory=dict)
    """Modes that cannot be had, and why."""
    spent_s: float = 0.0
    """On steps that are asked for and not all made."""
    _visits: dict[str, list[list[float]]] = field(default_factory=dict)
    """What steps have taken, by mode and by how often it was its turn."""

    @property
    def current(self) -> str | None:
        """The mode to try now; None when all have been that are worth it."""
        names = [name for name in self.names if name not in self.refused]
        for name in names:
            if self._visits.get(name) and not _complete(self._visits[name][-1]):
                return name
        times = self.times
        for name in names:
            if name not in times and not self._clear(times):
                return name
        best = min(times.values(), default=0.0)
        close = [name for name in names if times.get(name, math.inf) < CLOSE_CALL * best]
        least = min(close, key=lambda name: len(self._visits[name]), default="")
        return least if len(close) > 1 and len(self._visits[least]) < VISITS else None

    def _clear(self, times: Mapping[str, float]) -> bool:
        """Whether a mode is so much faster than the simplest that the others need not be tried."""
        return min(times.values(), default=0.0) < self.clear * times.get(self.names[0], 0.0)

    def took(self, name: str, seconds: float, *, steps: int = 1) -> None:
        """What so many steps have taken in a mode."""
        visits = self._visits.setdefault(name, [])
        if not visits or _complete(visits[-1]):
            visits.append([])
        visits[-1] += [seconds / steps] * steps

    @property
    def times(self) -> dict[str, float]:
        """Seconds of a step by mode, as far as they are known: whatever disturbs them makes them longer."""
        found = {
            name: [median(v[-TURN:]) for v in visits if _complete(v)] for name, visits in self._visits.items()
        }
        return {name: min(times) for name, times in found.items() if times and name not in self.refused}

    @property
    def best(self) -> str:
        """The fastest; of what is alike the first."""
        times = self.times
        names = [name for name in self.names if name in times]
        best = names[0] if names else self.names[0]
        for name in names[1:]:
            if times[name] < WORTH * times[best]:
                best = name
        return best


def _complete(visit: Sequence[float]) -> bool:
    return len(visit) >= WARM_UP + TURN
