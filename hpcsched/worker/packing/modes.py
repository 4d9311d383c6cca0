"""The ways in which members of a pack that walk together make their steps.

`loop` goes from model to model on a shared batch, to the last bit like separate training. `stacked` computes
models of one architecture as one. `turns` is not to pack: each makes some steps alone, then the next one. On
GPUs there are more (`devices`). Which is the fastest is measured, in steps that are made anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hpcsched.compat import zip
from hpcsched.worker.packing.batches import writes_in
from hpcsched.worker.packing.failures import Failed, Failures, SharedBatchChanged, out_of_memory
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.stacking import Forward, Stack
from hpcsched.worker.session.mode_trial import TURN

__all__ = [
    "Failed",
    "LoopMode",
    "Runner",
    "Stacks",
    "TurnsMode",
    "out_of_memory",
    "step_of",
    "widths",
]

Batches = Sequence[Any]
"""By member, its batch on the device: one object for those that are at the same place of the same data."""


class Runner(ABC):
    """Makes steps of all its members at a time.

    `ahead` is how many steps were asked for that are still to be made: `settle` makes them. When a step
    raises, some members may have made it and others not; a member's state is always that between two steps,
    unless it is torn.
    """

    as_one: ClassVar[bool] = False
    """Whether all are computed as one: when a step raises something that is put down to nobody, nobody has
    made it."""

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

    as_one = True

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
