"""Those members of a pack that make their steps together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcsched.compat import zip
from hpcsched.worker.packing.data_feed import Feed
from hpcsched.worker.packing.failures import Failures
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.modes import Batches, LoopMode, Runner
from hpcsched.worker.session.mode_trial import ModeTrial

FIRST_STEPS = 3
"""So many steps a new group makes one by one: its optimizers get their state, and what it draws is seen."""

CAREFUL_STEPS = 2
"""So many steps every group is careful in when members have come or gone: by then all the memory that they
need has been asked for."""


class Group:
    """Members that make their steps together: models of one architecture, or adapters on one frozen model."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.feeds: list[Feed] = []
        self.runner: Runner = LoopMode(members)
        self.mode = "loop"
        self.wanted: str | None = None
        """The mode to go over to when that can be; None: it has to be found."""
        known = all(member.started and member.draws is not None for member in members)
        self.first = 0 if known else FIRST_STEPS
        self.careful = 0
        self.trial: ModeTrial | None = None
        kinds = tuple(sorted({type(member.parts.optimizer).__name__ for member in members}))
        first = members[0]
        frozen = first.frozen if len(members) > 1 else None
        self.adapters = frozen is not None and all(
            member.frozen is not None and member.frozen.key == frozen.key for member in members
        )
        """Whether they are adapters on one frozen model."""
        like = frozen.key if self.adapters and frozen is not None else first.architecture
        batches = sorted({member.batch for member in members})
        self.key = like, tuple(batches), kinds
        """What decides which mode is the best for it, besides the number of its members."""

    @property
    def clock(self) -> float:
        """How far they are in the pack's time."""
        return self.members[0].clock + self.runner.ahead * self.members[0].pace

    def batches(self) -> list[Any]:
        """What their next step is made on: by member. Raises Failed for those whose data fail, or Full."""
        ahead = self.runner.ahead
        found, failures = [], Failures()
        for member, feed in zip(self.members, self.feeds, strict=True):
            try:
                found.append(feed.batch(member.session.samples + ahead * member.batch, member.batch))
            except (Exception, SystemExit) as error:
                failures.add(member, error)
        failures.check()
        return found

    def make_step(self, batches: Batches) -> None:
        """Make it, in the mode that they are in."""
        careful = self.first > 0 or self.careful > 0
        self.careful = max(0, self.careful - 1)
        self.runner.step(batches, careful=careful)


def alike(one: Member, other: Member, mode: str) -> bool:
    """Whether two members may make their steps together, when they are equally far.

    `mode`: the pack's; in some, batches need not be of one size.
    """
    if one.frozen is not None and other.frozen is not None and mode in ("auto", "adapters"):
        return one.frozen.key == other.frozen.key
    if one.architecture != other.architecture:
        return False
    filled = mode in ("auto", "stacked") and _of_any_size(one) and _of_any_size(other)
    return filled or one.batch == other.batch


def keep_pace(members: Sequence[Member]) -> None:
    """Say how fast those that are alike walk: by samples where their batches are of one size, so that what
    they read is the same; else step by step, as if they were equally far."""
    batches = [member.batch for member in members]
    behind = min(member.clock for member in members)
    for member in members:
        member.pace = sum(batches) / len(batches)
        if len(set(batches)) > 1:
            member.clock = behind


def _of_any_size(member: Member) -> bool:
    """Whether its batches may be filled up to the size of others: nothing but its samples' losses depends on
    them (as batch norm's statistics do), and those that are read at another pace cost nothing to read."""
    return member.parts.tensors is not None and next(member.parts.model.buffers(), None) is None
