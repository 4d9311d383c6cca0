"""Who has which part of the parameters, and what moves when servers come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.worker.ps.placement import (
    Owners,
    ParameterPiece,
    PieceMove,
    Size,
    before_leaving,
    moves,
    renumbered,
    share_out,
)

SIZES = st.lists(st.builds(Size, st.integers(0, 200), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=12)
SERVERS = st.sets(st.integers(0, 9), max_size=4).map(lambda ranks: sorted({0, *ranks}))


def elements(owners: Owners) -> dict[tuple[int, int], int]:
    """Who has each element; nobody has one twice."""
    found: dict[tuple[int, int], int] = {}
    for rank, pieces in owners.items():
        for piece in pieces:
            for at in range(piece.start, piece.stop):
                assert (piece.parameter, at) not in found
                found[piece.parameter, at] = rank
    return found


@given(SIZES, SERVERS, st.booleans())
def test_every_element_has_one_owner(sizes: list[Size], servers: list[int], cut: bool) -> None:
    owners = share_out(sizes, servers, cut=cut)
    assert sorted(elements(owners)) == [
        (p, at) for p, size in enumerate(sizes) for at in range(size.elements)
    ]
    assert sorted(owners) == servers
    assert all(piece.size > 0 for pieces in owners.values() for piece in pieces)


@given(SIZES, SERVERS)
def test_stretches_have_the_same_bytes_up_to_an_element(sizes: list[Size], servers: list[int]) -> None:
    owners = share_out(sizes, servers, cut=True)
    loads = [sum(sizes[p.parameter].width * p.size for p in pieces) for pieces in owners.values()]
    assert max(loads) - min(loads) <= 2 * 8


@given(SIZES, SERVERS)
def test_whole_tensors_are_balanced_up_to_the_largest(sizes: list[Size], servers: list[int]) -> None:
    owners = share_out(sizes, servers, cut=False)
    assert all(p.start == 0 and p.stop == sizes[p.parameter].elements for ps in owners.values() for p in ps)
    loads = [sum(sizes[p.parameter].bytes for p in pieces) for pieces in owners.values()]
    assert max(loads) - min(loads) <= max(size.bytes for size in sizes)


def test_the_largest_goes_to_whoever_has_least() -> None:
    owners = share_out([Size(n, 4) for n in (1, 8, 4, 3)], [0, 2], cut=False)
    assert owners == {
        0: (ParameterPiece(1, 0, 8),),
        2: (ParameterPiece(0, 0, 1), ParameterPiece(2, 0, 4), ParameterPiece(3, 0, 3)),
    }


def carried(owners: Owners, ways: list[PieceMove]) -> dict[tuple[int, int], set[int]]:
    """Who has each element after these moves, the senders too."""
    found = {element: {rank} for element, rank in elements(owners).items()}
    for move in ways:
        for at in range(move.piece.start, move.piece.stop):
            assert move.source in found[move.piece.parameter, at], "one sends what it has"
            found[move.piece.parameter, at].add(move.target)
    return found


@given(SIZES, SERVERS, st.data(), st.booleans())
def test_a_change_brings_everything_to_its_new_owner_and_moves_nothing_else(
    sizes: list[Size], servers: list[int], data: st.DataObject, cut: bool
) -> None:
    old = share_out(sizes, servers, cut=cut)
    world = 10
    staying = data.draw(st.sets(st.integers(1, world - 1), max_size=6))
    keep = [0, *data.draw(st.permutations(sorted(staying)))]
    size = len(keep) + data.draw(st.integers(0, 2))
    chosen = sorted({0, *data.draw(st.sets(st.integers(0, size - 1), max_size=3))})
    new = share_out(sizes, chosen, cut=cut)

    between = before_leaving(old, new, keep)
    first = moves(old, between)
    assert all(move.source not in keep and move.target in keep for move in first)
    after = carried(old, first)
    for element, rank in elements(between).items():
        assert rank in after[element] and rank in keep

    second = moves(renumbered(between, keep), new)
    after = carried(renumbered(between, keep), second)
    wanted = elements(new)
    had = elements(renumbered(between, keep))
    for element, rank in wanted.items():
        assert rank in after[element]
    assert sum(m.piece.size for m in second) == sum(had[element] != rank for element, rank in wanted.items())


def test_the_same_servers_move_nothing() -> None:
    owners = share_out([Size(100, 4), Size(7, 8)], [0, 1, 2], cut=True)
    assert moves(owners, owners) == []
    assert before_leaving(owners, owners, [0, 1, 2]) == owners
