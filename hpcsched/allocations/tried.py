"""All allocations that are tried for a piece of work, each with its outcome; each shape is simulated once,
whatever the number of partitions that have it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcsched.allocations.candidates import limits_in, saves_s, shapes_in, useful_gpus, whole_limit_s
from hpcsched.allocations.outcomes import (
    LEAVING_S,
    MOST_RESTARTS,
    STARTUP_S,
    Outcome,
    Work,
    as_used,
    outcome_of,
)
from hpcsched.batch.queue import Partition, Shape

MOST_SHAPES = 400
"""Allocations that are looked at in one call, the first ones found, and MOST_COUNTS of GPUs and nodes in each
partition (chosen)."""
MOST_COUNTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An allocation that was tried. `preempted`: more important jobs may end those in its partition."""

    shape: Shape
    outcome: Outcome
    preempted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asks for: GPUs on each node, nodes and time limits to try; nothing: what seems useful."""

    gpus: Sequence[int] = ()
    nodes: Sequence[int] = ()
    limits_s: Sequence[float] = ()


class Trials:
    """The allocations that may be worth asking for, for a piece of work in some partitions.

    `shapes` are those in which it may end; `doubt` is the share by which the running time may be off. Each
    count of GPUs is simulated once without a time limit when this is made; with limits only where `tried`
    cannot tell without.
    """

    def __init__(
        self, work: Work, partitions: Sequence[Partition], asked: Asked, *, doubt: float = 0.0
    ) -> None:
        self._work, self._doubt = work, doubt
        self._whole: dict[tuple[int, int], Outcome] = {}
        self._cut: dict[tuple[int, int, float], Outcome] = {}
        self._preempted = {one.name: one.preempted for one in partitions}
        on_gpus = [job for job in work.jobs if job.cpus is None]
        largest = max((max(one.hosts) for one in partitions), default=1)
        useful = useful_gpus(as_used(work, gpus=largest), work.profiles)
        found: list[Shape] = []
        self._too_many = 0
        for partition in partitions:
            pairs = shapes_in(
                partition,
                useful=useful,
                least=max((job.gpus_min for job in on_gpus), default=0),
                least_nodes=max((job.nodes for job in work.jobs), default=1),
                gpus=asked.gpus if on_gpus else (0,),
                nodes=asked.nodes,
            )
            self._too_many += len(pairs[MOST_COUNTS:])
            for nodes, gpus in pairs[:MOST_COUNTS]:
                for limit_s in limits_in(partition, self._whole_limit_s(nodes, gpus), asked.limits_s):
                    found.append(Shape(partition=partition.name, nodes=nodes, gpus=gpus, limit_s=limit_s))
        able = [shape for shape in found if self._times(shape) <= MOST_RESTARTS + 1]
        self._hopeless = len(found) - len(able)
        self.shapes: Sequence[Shape] = able[:MOST_SHAPES]
        self._too_many += len(able) - len(self.shapes)

    def tried(self, wait_s: Callable[[Shape], float | None], hold_s: float) -> tuple[list[Tried], list[str]]:
        """What comes of the work in each of them, and notes on those that are left out: where it never ends,
        and where a longer limit for as many GPUs is better whatever comes of the shorter one.

        `wait_s`: how long a shape waits, None where nobody knows; `hold_s`: see `Queue`.
        """
        found: list[Tried] = []
        stuck: Counter[str] = Counter()
        beaten = 0
        best_s: dict[tuple[str, int, int, bool], float] = {}
        for shape in sorted(self.shapes, key=lambda one: -one.limit_s):
            wait = wait_s(shape)
            # What waits for nobody knows how long is compared with its like alone.
            place = shape.partition, shape.nodes, shape.gpus, wait is None
            least_s = self._least_s(shape, wait or 0.0, hold_s)
            if least_s is not None and least_s >= best_s.get(place, math.inf):
                beaten += 1
                continue
            outcome = self._outcome(shape)
            if outcome.why_not is not None:
                stuck[outcome.why_not] += 1
                continue
            times = len(outcome.held_s)
            end_s = times * (wait or 0.0) + (times - 1) * hold_s + outcome.running_s
            best_s[place] = min(end_s, best_s.get(place, math.inf))
            found.append(Tried(shape=shape, outcome=outcome, preempted=self._preempted[shape.partition]))
        return found, [*self._notes(stuck, beaten)]

    def in_turn(self) -> tuple[list[Shape], list[Shape]]:
        """The shapes in which it ends in one allocation, and the others."""
        whole = [shape for shape in self.shapes if self._uncut_by(shape)]
        return whole, [shape for shape in self.shapes if not self._uncut_by(shape)]

    def _notes(self, stuck: Counter[str], beaten: int) -> Iterator[str]:
        if beaten:
            yield f"{beaten} more with shorter limits left out: they would come back without waiting less"
        if self._hopeless:
            yield f"{self._hopeless} left out, in which it would come back more than {MOST_RESTARTS} times"
        for why, count in stuck.items():
            yield f"{count} left out, in which the work does not end: {why}"
        if self._too_many:
            yield f"{self._too_many} left out, as there are so many: ask for fewer"

    def _saves_s(self, nodes: int, gpus: int) -> float:
        return saves_s(self._work.jobs, self._work.profiles, nodes * gpus) / self._work.speed

    def _uncut(self, nodes: int, gpus: int) -> Outcome:
        """The outcome without a time limit."""
        if (nodes, gpus) not in self._whole:
            self._whole[nodes, gpus] = outcome_of(self._work, gpus=gpus, nodes=nodes)
        return self._whole[nodes, gpus]

    def _whole_limit_s(self, nodes: int, gpus: int) -> float:
        """The time limit with which it ends in one allocation."""
        held_s = self._uncut(nodes, gpus).running_s
        return whole_limit_s(held_s, self._work.margin_s, self._saves_s(nodes, gpus), self._doubt)

    def _uncut_by(self, shape: Shape) -> bool:
        """Whether its end is never near, and so changes nothing."""
        whole = self._uncut(shape.nodes, shape.gpus)
        kept_s = self._work.margin_s + self._saves_s(shape.nodes, shape.gpus)
        return whole.why_not is not None or shape.limit_s >= whole.running_s + kept_s

    def _times(self, shape: Shape) -> float:
        """Allocations of this shape that it takes at least."""
        if self._uncut_by(shape):
            return 1
        # Each one trains until the margin before its end at the latest.
        left_s = shape.limit_s - self._work.margin_s - STARTUP_S
        work_s = self._uncut(shape.nodes, shape.gpus).running_s - STARTUP_S - LEAVING_S
        return math.ceil(work_s / left_s) if left_s > 0 else math.inf

    def _least_s(self, shape: Shape, wait_s: float, hold_s: float) -> float | None:
        """The earliest end that several allocations of this shape can have; None if one does."""
        if self._uncut_by(shape):
            return None
        times = self._times(shape)
        return times * wait_s + (times - 1) * hold_s + self._uncut(shape.nodes, shape.gpus).running_s

    def _outcome(self, shape: Shape) -> Outcome:
        if self._uncut_by(shape):
            return self._uncut(shape.nodes, shape.gpus)
        key = shape.nodes, shape.gpus, shape.limit_s
        if key not in self._cut:
            nodes, gpus, limit_s = key
            self._cut[key] = outcome_of(self._work, gpus=gpus, nodes=nodes, limit_s=limit_s)
        return self._cut[key]
