"""Which server has which part of the parameters, and what moves when there are other servers. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcsched.compat import dataclass, zip


@dataclass(frozen=True, slots=True, order=True)
class ParameterPiece:
    """Some elements of a parameter, as they lie in memory: from `start` on, `stop` not included."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def both(self, other: ParameterPiece) -> ParameterPiece | None:
        """What is in both of them."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if self.parameter != other.parameter or start >= stop:
            return None
        return ParameterPiece(self.parameter, start, stop)


Owners = Mapping[int, tuple[ParameterPiece, ...]]
"""The pieces that each server has, by its rank, in their order; every element is in one of them."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a parameter: its elements, and the bytes of each."""

    elements: int
    width: int

    @property
    def bytes(self) -> int:
        return self.elements * self.width


@dataclass(frozen=True, slots=True, order=True)
class PieceMove:
    """A piece goes from one rank to another."""

    source: int
    target: int
    piece: ParameterPiece


def share_out(sizes: Sequence[Size], servers: Sequence[int], *, cut: bool) -> Owners:
    """Who gets what, so that all servers have about the same number of bytes.

    `cut`: parameters may be cut, and each server gets one stretch of them all. Else the largest goes to
    whoever has least, one after the other.
    """
    return _stretches(sizes, servers) if cut else _wholes(sizes, servers)


def _stretches(sizes: Sequence[Size], servers: Sequence[int]) -> Owners:
    total = sum(size.bytes for size in sizes)
    bounds = [total * number // len(servers) for number in range(len(servers) + 1)]
    found: dict[int, list[ParameterPiece]] = {rank: [] for rank in servers}
    before = 0
    for parameter, size in enumerate(sizes):
        cuts = [min(size.elements, max(0, -(-(bound - before) // size.width))) for bound in bounds]
        for rank, start, stop in zip(servers, cuts[:-1], cuts[1:], strict=True):
            if start < stop:
                found[rank].append(ParameterPiece(parameter, start, stop))
        before += size.bytes
    return {rank: tuple(pieces) for rank, pieces in found.items()}


def _wholes(sizes: Sequence[Size], servers: Sequence[int]) -> Owners:
    loads = dict.fromkeys(servers, 0)
    found: dict[int, list[ParameterPiece]] = {rank: [] for rank in servers}
    for parameter in sorted(range(len(sizes)), key=lambda at: (-sizes[at].bytes, at)):
        rank = min(servers, key=loads.__getitem__)
        loads[rank] += sizes[parameter].bytes
        if sizes[parameter].elements:
            found[rank].append(ParameterPiece(parameter, 0, sizes[parameter].elements))
    return {rank: tuple(sorted(pieces)) for rank, pieces in found.items()}


def moves(old: Owners, new: Owners) -> list[PieceMove]:
    """What has to go where: nothing that is there already."""
    return sorted(
        PieceMove(source, target, piece) for source, target, piece in _overlaps(old, new) if source != target
    )


def before_leaving(old: Owners, new: Owners, keep: Sequence[int]) -> Owners:
    """Who has what in the time between, when those not in `keep` are about to leave, by the old numbers.

    What they have goes to its new owner, or to rank 0 if that has yet to come. `keep` are the old numbers of
    those that stay, in the order of their new ones.
    """
    found: dict[int, list[ParameterPiece]] = {
        rank: list(pieces) for rank, pieces in old.items() if rank in keep
    }
    leaving = {rank: pieces for rank, pieces in old.items() if rank not in keep}
    for _, target, piece in _overlaps(leaving, new):
        found.setdefault(keep[target] if target < len(keep) else 0, []).append(piece)
    return {rank: tuple(sorted(pieces)) for rank, pieces in found.items()}


def renumbered(owners: Owners, keep: Sequence[int]) -> Owners:
    """The same by the new numbers."""
    return {keep.index(rank): pieces for rank, pieces in owners.items()}


def _overlaps(old: Owners, new: Owners) -> Iterator[tuple[int, int, ParameterPiece]]:
    wanted: dict[int, list[tuple[int, ParameterPiece]]] = {}
    for rank, pieces in new.items():
        for piece in pieces:
            wanted.setdefault(piece.parameter, []).append((rank, piece))
    for source, pieces in old.items():
        for piece in pieces:
            for target, other in wanted.get(piece.parameter, ()):
                if (both := piece.both(other)) is not None:
                    yield source, target, both
