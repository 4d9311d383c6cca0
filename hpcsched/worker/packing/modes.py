"""The ways in which members of a pack that walk together make their steps.

`loop` goes from model to model on a shared batch, to the last bit like separate training. `stacked` computes
models of one architecture as one. `turns` is not to pack: each makes some steps alone, then the next one. On
GPUs there are more (`devices`). Which is the fastest is measured, in steps that are made anyway.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpcsched.compat import zip
from hpcsched.worker.packing.batches import writes_in
from hpcsched.worker.packing.failures import Failed, Failures, SharedBatchChanged, out_of_memory
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.stacking import Forward, Stack

__all__ = [
    "Failed",
    "LoopMode",
    "Runner",
    "Stacks",
    "ModeTrial",
    "TurnsMode",
    "out_of_memory",
    "step_of",
    "widths",
]

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

Batches = Sequence[Any]
"""By member, its batch on the device: one object for those that are at the same place of the same data."""


class Runner(ABC):
    """Makes steps of all its members at a time.

    `ahead` is how many steps were asked for that are still to be made: `settle` makes them. When a step
    raises, some members may have made it and others not; a member's state is always that between two steps,
    unless it is torn.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)

    @property
    def ahead(self) -> int:
        return 0

    @property
    def padding(self) -> float:
        """The part of the work that was for nothing, as some rows are shorter than others."""
        return 0.0

    @abstractmethod
    def step(self, batches: Batches, *, careful: bool = False) -> None:
        """One step of each on its batch, at once or later.

        Args:
            careful: one whose optimizer fails half-way is put back to what it was; this takes time.

        Raises Failed, Full, Spoiled, or anything else when it is not known who is to blame.
        """

    def settle(self) -> None:  # noqa: B027  most have nothing to do
        """Make all steps that were asked for; raises as `step`."""

    def write_back(self) -> None:  # noqa: B027
        """Make the members' optimizers complete, so that they can be saved."""

    def apart(self) -> None:  # noqa: B027
        """Give each member what is its own: this way is over."""


class LoopMode(Runner):
    """One after another, each to the end of its step."""

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        failures = Failures()
        for member, batch in zip(self.members, batches, strict=True):
            step_of(member, batch, careful, failures)
            if failures.full:
                break
        failures.check()


class TurnsMode(Runner):
    """One after another, each some steps to the end: what one works with stays in the caches."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        self._asked: list[tuple[Batches, bool]] = []

    @property
    def ahead(self) -> int:
        return len(self._asked)

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        self._asked.append((batches, careful))
        if len(self._asked) == TURN:
            self.settle()

    def settle(self) -> None:
        asked, self._asked = self._asked, []
        failures = Failures()
        for index, member in enumerate(self.members):
            for batches, careful in asked:
                if failures.full or not step_of(member, batches[index], careful, failures):
                    break
        failures.check()


def step_of(member: Member, batch: Any, careful: bool, failures: Failures) -> bool:
    """One step of one member; whether it has been made. Raises Spoiled if it has written into its batch."""
    before, made = writes_in(batch), True
    try:
        member.step(batch, careful=careful)
    except (Exception, SystemExit) as error:
        failures.add(member, error)
        made = False
    if writes_in(batch) != before:
        member.writes = True
        raise SharedBatchChanged(batch)
    return made


class Stacks(Runner):
    """Stacks of so many models each, one stack after another; one that is left over goes by itself.

    Raises NotStackable.
    """

    def __init__(
        self, members: Sequence[Member], width: int, batches: Batches, traced: dict[Any, Forward]
    ) -> None:
        super().__init__(members)
        self._runners: list[tuple[list[int], Stack | LoopMode]] = []
        order = sorted(range(len(members)), key=lambda index: members[index].batch)  # alike ones together
        try:
            for start in range(0, len(members), width):
                part = order[start : start + width]
                some = [members[index] for index in part]
                theirs = [batches[index] for index in part]
                runner = Stack(some, theirs, traced) if len(some) > 1 else LoopMode(some)
                self._runners.append((part, runner))
        except BaseException:
            self.apart()
            raise

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        for part, runner in self._runners:
            runner.step([batches[index] for index in part], careful=careful)

    def write_back(self) -> None:
        for _, runner in self._runners:
            runner.write_back()

    def apart(self) -> None:
        for _, runner in self._runners:
            runner.apart()


def widths(members: int) -> list[int]:
    """The widths of stacks that are worth trying for so many models: all, half of them, pairs."""
    return sorted({members, -(-members // 2), 2} & set(range(2, members + 1)), reverse=True)


@dataclass
class ModeTrial:
    """Measures modes one after another, and those that are close to the best some times more, in turns.

    `names` are the modes, the simplest first. Say `took` after each step that was made in `current`.
    """

    names: list[str]
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
        return min(times.values(), default=0.0) < CLEAR * times.get(self.names[0], 0.0)

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
