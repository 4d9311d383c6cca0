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
from hpcsched.worker.packing import rng_hooks
from hpcsched.worker.packing.adapters.mode import AdaptersMode
from hpcsched.worker.packing.cuda_modes import Graph, Streams
from hpcsched.worker.packing.data_feed import Feed, same_data
from hpcsched.worker.packing.failures import (
    DeviceFull,
    Failed,
    ModeRefused,
    OutOfMemory,
    SharedBatchChanged,
    let_go,
    line_of,
    out_of_memory,
    told_of,
)
from hpcsched.worker.packing.group import CAREFUL_STEPS, Group, alike, keep_pace
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.modes import Batches, LoopMode, Runner, Stacks, TurnsMode, widths
from hpcsched.worker.packing.stacking import Forward
from hpcsched.worker.session.mode_trial import ModeTrial

__all__ = ["MODES", "Failed", "OutOfMemory", "Pack"]

MODES = ("auto", "loop", "stacked", "adapters", "streams", "graph")
"""`auto` takes the fastest, as measured; `streams` and `graph` are for GPUs."""

Clock = Callable[[], float]


class Pack:
    """Trains its members together; `step` is one step of some of them.

    Args:
        mode: one of `MODES`. Any but `auto` and `loop` raises ConfigError, in a step, where it cannot be.
        clock: in seconds, to measure modes with; default: the time of this thread where all is computed in
            it, as other processes do not count in that, else that of the clock on the wall.
    """

    def __init__(self, device: torch.device, *, mode: str = "auto", clock: Clock | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(where="pack", key="mode", got=repr(mode), accepted=", ".join(MODES))
        rng_hooks.prepare()
        self.device, self.mode = device, mode
        self.members: list[Member] = []
        self.groups: list[Group] = []
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = clock or (time.thread_time if alone else time.perf_counter)
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
            others = [other for other in self.members if self._alike(other, member)] or self.members
            member.clock = min((other.clock for other in others), default=0.0)
            member.source = member.parts
            for other in self.members:
                if same_data(member.parts, other.source):
                    member.source = other.source
                    member.parts.dataset = other.source.dataset  # once in memory
                    break
            self._share_frozen(member)
            self.members.append(member)
        self._regroup()

    def _share_frozen(self, member: Member) -> None:
        """What is frozen under the adapters of several lies in memory once."""
        if member.frozen is None:
            return
        for other in self.members:
            if other.frozen is not None and other.frozen.key == member.frozen.key:
                if not member.frozen.share(other.frozen):
                    member.frozen.alone()
                return

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
        for some in self._those_alike():
            keep_pace(some)
            clocks = dict.fromkeys(member.clock for member in some)
            sets += [[member for member in some if member.clock == clock] for clock in clocks]
        kept = {tuple(group.members): group for group in self.groups}
        self.groups = [
            kept.pop(tuple(members)) if tuple(members) in kept else Group(members) for members in sets
        ]
        for group in kept.values():
            group.runner.settle()
            group.runner.apart()
        self._feed()
        for group in self.groups:
            group.careful = CAREFUL_STEPS
        self._ragged = any(
            self._alike(group.members[0], other.members[0]) for group, other in combinations(self.groups, 2)
        )

    def _alike(self, one: Member, other: Member) -> bool:
        return alike(one, other, self.mode)

    def _those_alike(self) -> list[list[Member]]:
        """All members, those that are alike together."""
        sets: list[list[Member]] = []
        for member in self.members:
            for some in sets:
                if self._alike(member, some[0]):
                    some.append(member)
                    break
            else:
                sets.append([member])
        return sets

    def _feed(self) -> None:
        """One feed for all who see the same samples at the same time of the pack."""
        sharing: dict[Any, list[Member]] = {}
        for member in self.members:
            sharing.setdefault(_place(member), []).append(member)
        old = {(feed.place, feed.size): feed for feed in self._feeds}
        feeds: dict[Any, Feed] = {}
        for place, members in sharing.items():
            batches = {member.batch for member in members}
            size = batches.pop() if len(batches) == 1 else None
            feed = old.get((place, size))
            if feed is None:
                feed = Feed(members[0].source, members[0].session.sampler, self.device, batch=size)
                feed.place = place
            feed.readers = members
            for member in members:
                member.shares = len(members) > 1
            feeds[place] = feed
        for feed in self._feeds:
            if feed not in feeds.values():
                feed.close()
        self._feeds = list(feeds.values())
        for group in self.groups:
            group.feeds = [feeds[_place(member)] for member in group.members]

    # -- steps -----------------------------------------------------------------------------------------

    def step(self) -> tuple[Member, ...]:
        """One step of those that are furthest behind; returns them.

        Raises `Failed` when the code of members fails, and `OutOfMemory`: let those leave then. The others go
        on as if nothing had happened; some of them may have made a step more than others until they are even.
        """
        if self._ragged:
            self.settle()
            self._regroup()
        if not self.groups:
            return ()
        group = min(self.groups, key=lambda group: group.clock)
        self._guarded(group, lambda: self._advance(group))
        return tuple(group.members)

    def _advance(self, group: Group) -> None:
        if not group.first and group.wanted is None and group.trial is None:
            self._choose(group)
        if group.trial is not None:
            began = self._clock()
            batches = group.batches()
            self._try(group, batches, self._clock() - began)
        else:
            batches = group.batches()
            if not group.first and group.wanted not in (None, group.mode):
                self._go_over_or_stay(group, group.wanted, batches)
            group.make_step(batches)
            group.first = max(0, group.first - 1)
        if any(member.ends_after(group.runner.ahead) for member in group.members):
            group.runner.settle()

    def _guarded(self, group: Group, act: Callable[[], None]) -> None:
        """Do something that makes steps; what goes wrong in it is put down to whom it can be."""
        try:
            act()
            return
        except ConfigError:
            raise
        except SharedBatchChanged as spoiled:
            self._ragged = True
            for feed in self._feeds:
                feed.drop(spoiled.args[0])
            return
        except Failed:
            self._ragged = True
            raise
        except DeviceFull as error:
            full, why, told = True, str(error), error.told
        except Exception as error:
            if not group.runner.as_one:
                raise
            if isinstance(error, ModeRefused) and self.mode != "auto":
                raise _cannot(self.mode, str(error)) from error
            # As one, nobody has made the step, and nobody can tell who is to blame: each by itself now.
            full, why, told = out_of_memory(error), line_of(error), told_of(error)
            let_go(error)
        self._ragged = True
        lean = isinstance(group.runner, (LoopMode, TurnsMode))
        self._to_loop(group, why)
        self._give_room()
        if not full or (self.mode == "auto" and not lean):  # one by one, they need less
            return
        last = self.members[-1]
        if len(self.members) == 1:
            alone = MemoryError(why)
            alone.__notes__ = [told]  # add_note came with Python 3.11
            raise Failed([(last, alone)])
        raise OutOfMemory(last, why)

    def _to_loop(self, group: Group, why: str) -> None:
        """One by one from now on, or for as long as the mode to take is still looked for."""
        if group.trial is None:
            group.wanted = "loop"
        elif group.mode != "loop":
            group.trial.refused[group.mode] = why
        group.runner.apart()
        group.runner, group.mode = LoopMode(group.members), "loop"

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
        if self.mode != "auto":
            group.wanted = stacks[0] if self.mode == "stacked" else self.mode
            return
        known = self._known.get(group.key, {})
        for measured in sorted(known, key=lambda measured: abs(measured - size)):
            if measured / 1.5 <= size <= measured * 1.5:
                whole = known[measured] == f"stacked/{measured}"
                group.wanted = stacks[0] if whole else known[measured]
                return
        devices = ["streams", "graph"] if self.device.type == "cuda" else []
        together = ["adapters"] if group.adapters else stacks
        group.trial = ModeTrial(["loop", *devices, *together, "turns"])

    def _try(self, group: Group, batches: Batches, read_s: float) -> None:
        """One step in the mode that is being measured; its samples have taken so long to be read."""
        trial = group.trial
        assert trial is not None
        while (name := trial.current) is not None and name != group.mode:
            try:
                self._go_over(group, name, batches)
            except (ModeRefused, DeviceFull) as error:
                trial.refused[name] = str(error)
        if name is None:
            group.trial, group.wanted = None, trial.best
            self._known.setdefault(group.key, {})[len(group.members)] = trial.best
            if trial.best != group.mode:
                self._go_over_or_stay(group, trial.best, batches)
            group.make_step(batches)
            return
        ahead = group.runner.ahead
        began = self._clock()
        group.make_step(batches)
        self._synchronize()
        trial.spent_s = self._clock() - began + read_s + (trial.spent_s if ahead else 0.0)
        if group.runner.ahead <= ahead:  # not only asked for: it and those that were before it are made
            trial.took(name, trial.spent_s, steps=ahead + 1)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _go_over_or_stay(self, group: Group, mode: str | None, batches: Batches) -> None:
        """Make a group's steps in the mode that has been found, or else in a loop.

        Raises ConfigError where the mode was asked for by name and cannot be had, Full if there is no room.
        """
        try:
            self._go_over(group, mode or "loop", batches)
        except (ModeRefused, DeviceFull) as error:
            if self.mode == "auto":
                group.wanted = "loop"
                self._known.setdefault(group.key, {})[len(group.members)] = "loop"
            elif isinstance(error, DeviceFull):
                raise
            else:
                raise _cannot(self.mode, str(error)) from error

    def _go_over(self, group: Group, mode: str, batches: Batches) -> None:
        """Make a group's steps in another way. Raises Refused or Full where that cannot be: it loops then."""
        group.runner.settle()
        group.runner.apart()
        group.runner, group.mode = LoopMode(group.members), "loop"
        try:
            group.runner = self._runner(group, mode, batches)
        except ModeRefused:
            raise
        except (Exception, SystemExit) as error:
            if not out_of_memory(error):  # nothing has been changed, and there are other ways
                raise ModeRefused(f"{type(error).__name__}: {error}") from error
            reason, told = line_of(error), told_of(error)
            let_go(error)
        else:
            group.mode = mode
            return
        self._give_room()
        raise DeviceFull(reason, told)

    def _runner(self, group: Group, mode: str, batches: Batches) -> Runner:
        if mode == "turns":
            return TurnsMode(group.members)
        if mode == "streams":
            return Streams(group.members)
        if mode == "graph":
            return Graph(group.members, batches)
        if mode == "adapters":
            return AdaptersMode(group.members, batches)
        if mode.startswith("stacked/"):
            return Stacks(group.members, int(mode.partition("/")[2]), batches, self._traced)
        return LoopMode(group.members)


def _cannot(mode: str, why: str) -> ConfigError:
    return ConfigError(where="pack", key="mode", got=f"{mode!r} ({why})", accepted="loop, auto")


def _place(member: Member) -> Any:
    """The same for members that see the same samples at the same time of the pack."""
    whose = None if member.pace == member.batch else id(member)  # it walks at another pace than the data
    return id(member.source), member.session.sampler.seed, member.session.samples - member.clock, whose
