"""Several trainings as one on a device (pack, section 2.2): they share its time, and what they read.

Members come and go between two steps, and each is trained exactly as it would be alone. Those with the same
data walk one stream of samples at the same pace, whatever their batch sizes are: whoever is furthest behind
makes the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from hpcsched.errors import ConfigError
from hpcsched.worker.packed.member import Member
from hpcsched.worker.packed.modes import (
    TURN,
    Batches,
    Failed,
    Full,
    Loop,
    Runner,
    Stacks,
    Trial,
    Turns,
    out_of_memory,
    widths,
)
from hpcsched.worker.packed.stacking import Forward, NotStackable
from hpcsched.worker.packed.stream import Feed, same_data

MODES = ("auto", "loop", "stacked")
"""`auto` takes the fastest, as measured."""

FIRST_STEPS = 3
"""So many steps a new group makes one by one: its optimizers get their state, and what it draws is seen."""

Clock = Callable[[], float]


class OutOfMemory(Exception):
    """The device is full; `member`, the last one in, has to leave. It is between two steps, as all are."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"out of memory with {member.name} in the pack")
        self.member = member


class Group:
    """Members that make their steps together: of one architecture, with batches of one size."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.feeds: list[Feed] = []
        self.runner: Runner = Loop(members)
        self.mode = "loop"
        self.wanted: str | None = None
        """The mode to go over to when that can be; None: it has to be found."""
        known = all(member.started and member.draws is not None for member in members)
        self.first = 0 if known else FIRST_STEPS
        self.trial: Trial | None = None

    @property
    def clock(self) -> float:
        """How far they are in the pack's time."""
        return self.members[0].clock + self.runner.ahead * self.members[0].batch

    def batches(self) -> list[Any]:
        """What their next step is made on: by member."""
        ahead = self.runner.ahead
        return [
            feed.batch(member.session.samples + ahead * member.batch, member.batch)
            for member, feed in zip(self.members, self.feeds, strict=True)
        ]

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides which mode is the best for it, besides the number of its members."""
        kinds = tuple(sorted({type(member.parts.optimizer).__name__ for member in self.members}))
        return self.members[0].architecture, self.members[0].batch, kinds


class Pack:
    """Trains its members together; `step` is one step of some of them.

    Args:
        mode: one of `MODES`. `stacked` raises ConfigError, in a step, where that cannot be.
    """

    def __init__(self, device: torch.device, *, mode: str = "auto", clock: Clock = time.perf_counter) -> None:
        if mode not in MODES:
            raise ConfigError(where="pack", key="mode", got=repr(mode), accepted=", ".join(MODES))
        self.device, self.mode = device, mode
        self.members: list[Member] = []
        self.groups: list[Group] = []
        self._clock = clock
        self._traced: dict[Any, Forward] = {}
        self._known: dict[tuple[Any, ...], dict[int, str]] = {}
        """The best mode, as measured: by a group's key and size."""
        self._feeds: list[Feed] = []
        self._ragged = False
        """Some members have made a step more than others that they belong together with."""

    # -- coming and going ------------------------------------------------------------------------------

    def join(self, *members: Member) -> None:
        """Let members in, between two steps."""
        self.settle()
        for member in members:
            others = [other for other in self.members if _alike(other, member)] or self.members
            member.clock = min((other.clock for other in others), default=0.0)
            for other in self.members:
                if member.parts.dataset is not other.parts.dataset and same_data(member.parts, other.parts):
                    member.parts.dataset = other.parts.dataset  # once in memory
                    break
            self.members.append(member)
        self._regroup()

    def leave(self, *members: Member) -> None:
        """Let members go, between two steps: what they are made of is their own again."""
        self.settle()
        self.members = [member for member in self.members if member not in members]
        self._regroup()

    def settle(self) -> None:
        """Make the steps that were begun, so that all members are between two steps. Raises as `step`."""
        for group in self.groups:
            self._guarded(group, group.runner.settle)

    def write_back(self) -> None:
        """Have all members be as if they were alone, so that they can be saved; raises as `step`."""
        self.settle()
        for group in self.groups:
            group.runner.write_back()

    def _regroup(self) -> None:
        """Put those together that walk together; groups that stay what they were go on as they are."""
        sets: list[list[Member]] = []
        for member in self.members:
            for some in sets:
                if _alike(member, some[0]) and member.clock == some[0].clock:
                    some.append(member)
                    break
            else:
                sets.append([member])
        kept = {tuple(group.members): group for group in self.groups}
        self.groups = [
            kept.pop(tuple(members)) if tuple(members) in kept else Group(members) for members in sets
        ]
        for group in kept.values():
            group.runner.settle()
            group.runner.apart()
        feeds: dict[int, Feed] = {}
        for group in self.groups:
            group.feeds = [self._feed(member, feeds) for member in group.members]
        self._feeds = list({id(feed): feed for group in self.groups for feed in group.feeds}.values())
        self._ragged = any(
            _alike(group.members[0], other.members[0]) for group, other in combinations(self.groups, 2)
        )

    def _feed(self, member: Member, feeds: dict[int, Feed]) -> Feed:
        """The feed of all whose data and place in them are the same as this member's."""
        sharing = [other for other in self.members if _read_alike(other, member)]
        first = sharing[0]
        if (feed := feeds.get(id(first))) is not None:
            return feed
        batches = {other.batch for other in sharing}
        size = batches.pop() if len(batches) == 1 else None
        for feed in self._feeds:
            if feed.parts is first.parts and feed.size == size:
                break
        else:
            feed = Feed(first.parts, first.session.sampler, self.device, batch=size)
        feed.oldest = lambda: min(other.session.samples for other in sharing)
        feeds[id(first)] = feed
        return feed

    # -- steps -----------------------------------------------------------------------------------------

    def step(self) -> tuple[Member, ...]:
        """One step of those that are furthest behind; returns them.

        Raises `Failed` when the code of members fails, and `OutOfMemory`: let those leave then. The others go
        on as if nothing had happened.
        """
        if self._ragged:
            self._regroup()
        group = min(self.groups, key=lambda group: group.clock)
        self._guarded(group, lambda: self._advance(group))
        return tuple(group.members)

    def _advance(self, group: Group) -> None:
        try:
            batches = group.batches()
        except Exception as error:
            if out_of_memory(error):
                raise Full(str(error)) from error
            raise Failed([(member, error) for member in group.members]) from error
        if not group.first and group.wanted is None and group.trial is None:
            self._choose(group)
        if group.first:
            group.first -= 1
            group.runner.step(batches)
        elif group.trial is not None:
            self._try(group, batches)
        else:
            if group.wanted not in (None, group.mode):
                self._go_over(group, group.wanted, batches)
            group.runner.step(batches)
        if any(member.ends_after(group.runner.ahead) for member in group.members):
            group.runner.settle()

    def _guarded(self, group: Group, act: Callable[[], None]) -> None:
        """Do something that makes steps; what goes wrong in it is put down to whom it can be."""
        try:
            act()
            return
        except Failed:
            self._ragged = True
            raise
        except Full as error:
            self._ragged = True
            full: Exception = error
        except ConfigError:
            raise
        except Exception as error:
            # As one, nobody has made the step, and nobody can tell who is to blame: each by itself now.
            if group.mode == "loop":
                raise
            self._to_loop(group)
            if not out_of_memory(error):
                return
            full = error
        self._to_loop(group)
        self._give_room()
        if len(self.members) == 1:
            raise Failed([(self.members[0], full)]) from full
        raise OutOfMemory(self.members[-1]) from full

    def _to_loop(self, group: Group) -> None:
        group.runner.apart()
        group.runner, group.mode, group.wanted, group.trial = Loop(group.members), "loop", "loop", None

    def _give_room(self) -> None:
        self._traced.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- the fastest mode ------------------------------------------------------------------------------

    def _choose(self, group: Group) -> None:
        """Say which mode a group is to have, or begin to measure."""
        size = len(group.members)
        if size == 1 or self.mode == "loop":
            group.wanted = "loop"
            return
        stacks = [f"stacked/{width}" for width in widths(size)]
        if self.mode == "stacked":
            group.wanted = stacks[0]
            return
        known = self._known.get(group.key, {})
        for measured in sorted(known, key=lambda measured: abs(measured - size)):
            if measured / 1.5 <= size <= measured * 1.5:
                whole = known[measured] == f"stacked/{measured}"
                group.wanted = stacks[0] if whole else known[measured]
                return
        group.trial = Trial(["loop", *stacks, "turns"])

    def _try(self, group: Group, batches: Batches) -> None:
        """One step in the mode that is being measured."""
        trial = group.trial
        assert trial is not None
        name = trial.current
        while name is not None and name != group.mode:
            try:
                self._go_over(group, name, batches)
            except ConfigError as error:
                trial.refused[name] = str(error)
            name = trial.current
        if name is None:
            group.trial, group.wanted = None, trial.best
            self._known.setdefault(group.key, {})[len(group.members)] = trial.best
            if group.wanted != group.mode:
                self._go_over(group, group.wanted, batches)
            group.runner.step(batches)
            return
        ahead = group.runner.ahead
        began = self._clock()
        group.runner.step(batches)
        self._synchronize()
        took_s = self._clock() - began
        if name != "turns":
            trial.took(name, took_s)
        elif group.runner.ahead < ahead + 1:
            for _ in range(TURN):
                trial.took(name, took_s / TURN)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _go_over(self, group: Group, mode: str, batches: Batches) -> None:
        """Make a group's steps in another way. Raises ConfigError where that cannot be."""
        group.runner.settle()
        group.runner.apart()
        group.runner, group.mode = Loop(group.members), "loop"
        if mode == "turns":
            group.runner = Turns(group.members)
        elif mode.startswith("stacked/"):
            width = int(mode.partition("/")[2])
            try:
                group.runner = Stacks(group.members, width, batches, self._traced)
            except NotStackable as error:
                raise ConfigError(
                    where="pack", key="mode", got=f"'stacked' ({error})", accepted="loop, auto"
                ) from error
        group.mode = mode


def _alike(one: Member, other: Member) -> bool:
    """Whether two members may make their steps together, when they are equally far."""
    return one.batch == other.batch and one.architecture == other.architecture


def _read_alike(one: Member, other: Member) -> bool:
    """Whether two members see the same samples at the same time of the pack."""
    together = one.session.samples - one.clock == other.session.samples - other.clock
    return together and same_data(one.parts, other.parts)
