"""Adds one value a shard over all ranks, in an order that no rank count changes. Standard library only."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


def shards_of(rank: int, world_size: int, count: int) -> range:
    """The shards that are `rank`'s, of `count` in all; how many differs by at most one between ranks."""
    return range(rank * count // world_size, (rank + 1) * count // world_size)


def owner_of(shard: int, world_size: int, count: int) -> int:
    """The rank whose shard this is."""
    return ((shard + 1) * world_size - 1) // count


class TreeOperations(Protocol[T]):
    """What a tree does with values. Each call but `receive` takes over the values it is given."""

    def add(self, left: T, right: T) -> T: ...

    def send(self, value: T, rank: int) -> None: ...

    def receive(self, rank: int) -> T: ...


class TreeSum(Generic[T]):
    """One rank's part in a sum over the shards 0 to `count` - 1, along one binary tree.

    The tree halves [0, count), then each half, down to single shards. A rank adds up the subtrees
    that are wholly its own as their shards come in, so that it holds at most one value a level and
    side of the tree. A node whose halves lie with two ranks is added by the owner of the left one.
    """

    def __init__(self, count: int, hands: TreeOperations[T]) -> None:
        self.count = count
        self._hands = hands
        self._held: dict[tuple[int, int], T] = {}
        self._left_of: dict[tuple[int, int], tuple[int, int]] = {}
        self._grow(0, count)

    def put(self, shard: int, value: T) -> None:
        """Take in the value of one shard."""
        node = (shard, shard + 1)
        while (left := self._left_of.get(node)) in self._held:
            value = self._hands.add(self._held.pop(left), value)
            node = (left[0], node[1])
        self._held[node] = value

    def total(self, rank: int, world_size: int) -> T | None:
        """Add up over the ranks: the sum on rank 0, None on the others; all of them have to call it.

        Messages go from higher to lower ranks only, and each rank meets its own in the order in which
        the tree is walked, which is the same on all: no two ranks can wait for each other.
        """
        return self._collect(0, self.count, rank, world_size)

    def clear(self) -> list[T]:
        """Give up a sum half-way; returns the values held."""
        held = list(self._held.values())
        self._held.clear()
        return held

    def _grow(self, first: int, end: int) -> None:
        if end - first > 1:
            middle = (first + end) // 2
            self._left_of[middle, end] = (first, middle)
            self._grow(first, middle)
            self._grow(middle, end)

    def _collect(self, first: int, end: int, rank: int, world_size: int) -> T | None:
        """The sum of [first, end) where this rank is to have it, which is where `first` is its own."""
        if (first, end) in self._held:
            return self._held.pop((first, end))
        if not owner_of(first, world_size, self.count) <= rank <= owner_of(end - 1, world_size, self.count):
            return None
        middle = (first + end) // 2
        left = self._collect(first, middle, rank, world_size)
        right = self._collect(middle, end, rank, world_size)
        to, sender = (owner_of(shard, world_size, self.count) for shard in (first, middle))
        if rank == to != sender:
            right = self._hands.receive(sender)
        elif rank == sender != to:
            assert right is not None
            self._hands.send(right, to)
        if rank != to:
            return None
        assert left is not None and right is not None
        return self._hands.add(left, right)
