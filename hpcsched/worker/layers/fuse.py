"""Which operations make up a layer: a pure rule on the graph of what reads what.

A layer begins with an operation that has weights, and takes along what follows and depends on it alone:
normalisation, activation, pooling, reshaping. Where values of several layers meet, a joining layer begins.
What a branch does before its first weights belongs to the layer of those.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One operation: the positions of those it reads from, below its own (-1: a model's input).

    `heavy`: it has weights, so that a layer may begin with it. `tied`: those of `reads` whose value must
    not leave their layer.
    """

    reads: tuple[int, ...]
    heavy: bool = False
    tied: frozenset[int] = frozenset()


def fuse(ops: Sequence[Op]) -> list[list[int]]:
    """The operations of each layer in ascending order; layers in topological order.

    The last operation is the model's result, and every other one is read by some.
    """
    groups = _Groups(ops)
    groups.followers()
    while groups.detours():
        pass
    groups.beginnings()
    groups.ties()
    return groups.ordered()


class _Groups:
    """The layers while they are being found; `of[i]` is the group of operation i."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.of = list(range(len(ops)))
        self.members: dict[int, list[int]] = {i: [i] for i in range(len(ops))}
        self.readers: list[list[int]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            for read in set(op.reads) - {-1}:
                self.readers[read].append(i)

    def followers(self) -> None:
        """What needs no weights, and is the only one to read its inputs, joins the layer of those."""
        for i, op in enumerate(self.ops):
            before = self.before(self.of[i])
            if len(before) == 1 and -1 not in before:
                (only,) = before
                alone = all(self.readers[read] == [i] for read in op.reads)
                if op.tied or (alone and not op.heavy):
                    self.merge(only, self.of[i])

    def detours(self) -> bool:
        """A light group that reads from one layer only, and leads nowhere else, joins it.

        It is the only one to read its inputs, together with what alone reads it and reads nothing else, as in
        x * sigmoid(x). True where something was merged.
        """
        merged = False
        for group in sorted(self.members):
            before = self.before(group) if group in self.members else set()
            if len(before) != 1 or -1 in before or self.heavy(group):
                continue
            (only,) = before
            both = {group, *self.after(group)}
            if self.alone({group}):
                self.merge(only, group)
                merged = True
            elif len(both) == 2 and self.alone(both) and not any(map(self.heavy, both)):
                (joint,) = both - {group}
                if self.before(joint) <= {only, group}:
                    self.merge(only, group)
                    self.merge(only, joint)
                    merged = True
        return merged

    def beginnings(self) -> None:
        """A light group that only one layer reads, which reads nothing else, becomes that one's beginning.

        Unless values meet in it: to have them where the weights are costs more than its result.
        """
        for group in sorted(self.members):
            before = self.before(group)
            if self.heavy(group) and len(before) == 1 and -1 not in before:
                (only,) = before
                if not self.heavy(only) and len(self.before(only)) < 2 and self.alone({group}):
                    self.merge(group, only)

    def ties(self) -> None:
        """Merge what must stay together, and all that lies between."""
        for i, op in enumerate(self.ops):
            for read in op.tied:
                if self.of[read] != self.of[i]:
                    for between in self.between(self.of[read], self.of[i]):
                        self.merge(self.of[read], between)

    def ordered(self) -> list[list[int]]:
        """All groups, each after those it reads from, else by where they begin."""
        waiting = {group: len(self.before(group) - {-1}) for group in self.members}
        ready = [(self.members[group][0], group) for group, count in waiting.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, group = heapq.heappop(ready)
            order.append(self.members[group])
            for after in self.after(group):
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, (self.members[after][0], after))
        return order

    def before(self, group: int) -> set[int]:
        """The groups that this one reads from; -1: the model's inputs."""
        reads = (r for i in self.members[group] for r in self.ops[i].reads)
        return {-1 if r < 0 else self.of[r] for r in reads} - {group}

    def after(self, group: int) -> set[int]:
        """The groups that read from this one."""
        return {self.of[r] for i in self.members[group] for r in self.readers[i]} - {group}

    def alone(self, groups: set[int]) -> bool:
        """Whether nobody but these, and where it comes from, reads what these groups read of another one."""
        inside = [i for group in groups for i in self.members[group]]
        reads = {r for i in inside for r in self.ops[i].reads if r >= 0 and self.of[r] not in groups}
        return all(self.of[i] in groups | {self.of[r]} for r in reads for i in self.readers[r])

    def heavy(self, group: int) -> bool:
        return any(self.ops[i].heavy for i in self.members[group])

    def between(self, first: int, last: int) -> set[int]:
        """All groups on the ways from one to the other, with both ends."""
        return _reach(first, self.after) & _reach(last, self.before)

    def merge(self, into: int, group: int) -> None:
        if into != group:
            for i in self.members[group]:
                self.of[i] = into
            self.members[into] = sorted(self.members[into] + self.members.pop(group))


def _reach(start: int, step: Callable[[int], set[int]]) -> set[int]:
    """All groups that steps lead to from one, with that one."""
    seen, todo = {start}, [start]
    while todo:
        new = step(todo.pop()) - seen - {-1}
        seen |= new
        todo.extend(new)
    return seen
