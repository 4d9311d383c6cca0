"""Moves pieces of a training, values and optimizer state, between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.worker.ps.placement import ParameterPiece, PieceMove
from hpcsched.worker.ps.protocol import Frame, PeerChannels
from hpcsched.worker.ps.shard import Fragment
from hpcsched.worker.ranks.messages import packed_state, unpacked_state

_Form = tuple[torch.dtype, int]
_Row = tuple[tuple[int, int, int], _Form, dict[str, _Form], dict[str, Any]]
"""Describes a fragment: its piece, its values, what there is for each element, and all the rest as it is."""


def carry(wire: PeerChannels, moves: Sequence[PieceMove], held: Iterable[Fragment]) -> list[Fragment]:
    """Do this rank's part of `moves`, out of what is held here; returns what has come.

    All ranks that one of the moves is about call this with the same moves. From one rank to another goes a
    description, as nobody else knows what state an optimizer has for a piece, and the tensors in one message.
    Raises PeerLost.
    """
    outgoing, incoming = defaultdict(list), defaultdict(list)
    for move in moves:
        if move.source == wire.rank:
            outgoing[move.target].append(move.piece)
        if move.target == wire.rank:
            incoming[move.source].append(move.piece)
    found = {fragment.piece: fragment for fragment in held}
    waits = []
    for target, pieces in outgoing.items():
        parts = [_part(found, piece) for piece in pieces]
        rows: list[_Row] = [_describe(part) for part in parts]
        text = packed_state(rows)
        page = _frame(rows).page()
        for room, tensor in zip(page.tensors, _tensors(parts), strict=True):
            room.copy_(tensor)
        for data in (torch.tensor([len(text)]), text, page.data):
            waits.append(wire.send(data, target))
    came = []
    for source in incoming:
        size = torch.zeros(1, dtype=torch.int64)
        wire.receive(size, source)()
        text = torch.empty(int(size), dtype=torch.uint8)
        wire.receive(text, source)()
        rows = unpacked_state(text)
        page = _frame(rows).page()
        wire.receive(page.data, source)()
        came += _fragments(rows, page.tensors)
    for wait in waits:
        wait()
    return came


def _part(found: dict[ParameterPiece, Fragment], piece: ParameterPiece) -> Fragment:
    if piece in found:
        return found[piece]
    return next(f.part(piece) for f in found.values() if f.piece.both(piece) == piece)


def _describe(part: Fragment) -> _Row:
    elements = {key: (value.dtype, value.numel()) for key, value in part.elements.items()}
    return astuple(part.piece), (part.values.dtype, part.values.numel()), elements, part.rest


def _tensors(parts: Iterable[Fragment]) -> list[torch.Tensor]:
    return [tensor for part in parts for tensor in (part.values, *part.elements.values())]


def _frame(rows: Sequence[_Row]) -> Frame:
    return Frame(0, 0, [form for _, values, elements, _ in rows for form in (values, *elements.values())])


def _fragments(rows: Sequence[_Row], tensors: Sequence[torch.Tensor]) -> list[Fragment]:
    left = iter(tensors)
    return [
        Fragment(ParameterPiece(*piece), next(left), {key: next(left) for key in elements}, rest)
        for piece, _, elements, rest in rows
    ]
