"""Those members of a pack that make their steps together."""

from __future__ import annotations

from typing import Any

from hpcsched.compat import zip
from hpcsched.worker.packing.data_feed import Feed
from hpcsched.worker.packing.failures import Failures
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.modes import Batches, LoopMode, ModeTrial, Runner

FIRST_STEPS = 3
"""So many steps a new group makes one by one: its optimizers get their state, and what it draws is seen."""

CAREFUL_STEPS = 2
"""So many steps every group is careful in when members have come or gone: by then all the memory that they
need has been asked for."""


class Group:
    """Members that make their steps together: of one architecture, with batches of one size."""

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
        self.key = members[0].architecture, members[0].batch, kinds
        """What decides which mode is the best for it, besides the number of its members."""

    @property
    def clock(self) -> float:
        """How far they are in the pack's time."""
        return self.members[0].clock + self.runner.ahead * self.members[0].batch

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


def alike(one: Member, other: Member) -> bool:
    """Whether two members may make their steps together, when they are equally far."""
    return one.batch == other.batch and one.architecture == other.architecture
