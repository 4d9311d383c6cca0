"""Moves what is trained, parameters, buffers and optimizer state, from ranks that have it to others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.ownership import OwnedTensor
from hpcsched.worker.ranks.messages import packed_state, unpacked_state

_Row = tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]
"""Describes a thing's optimizer state: shapes and types of what travels by itself, and the rest as it is."""

Ways = Mapping[tuple[int, int], Sequence[OwnedTensor]]
"""What goes from one rank to another."""


def to_first(things: Iterable[OwnedTensor], plan: BurstPlan) -> Ways:
    """All that rank 0 does not own, to rank 0."""
    ways: dict[tuple[int, int], list[OwnedTensor]] = defaultdict(list)
    for thing in things:
        owners = thing.owners(plan)
        if 0 not in owners:
            ways[owners[0], 0].append(thing)
    return ways


def to_new_owners(things: Iterable[OwnedTensor], old: BurstPlan, new: BurstPlan) -> Ways:
    """All that a rank owns by the new plan and did not by the old one."""
    ways: dict[tuple[int, int], list[OwnedTensor]] = defaultdict(list)
    for thing in things:
        had = thing.owners(old)
        for number, rank in enumerate(sorted(set(thing.owners(new)) - set(had))):
            ways[had[number % len(had)], rank].append(thing)
    return ways


@torch.no_grad()
def hand_over(ways: Ways, optimizer: torch.optim.Optimizer, wires: Channels) -> None:
    """Carry things along `ways`; all ranks call this with the same ones.

    Each pair of ranks exchanges a description, as a rank may never have had a state for a parameter, and
    one message a dtype.
    """
    mine = wires.rank
    outgoing = {there: things for (here, there), things in sorted(_by_pair(ways)) if here == mine}
    incoming = {here: things for (here, there), things in sorted(_by_pair(ways)) if there == mine}
    packed = {there: _pack(things, optimizer, wires.device) for there, things in outgoing.items()}
    headers = {there: packed_state(header).to(wires.device) for there, (header, _) in packed.items()}
    sizes = {here: torch.zeros(1, dtype=torch.int64, device=wires.device) for here in incoming}
    wires.post(
        [(there, torch.tensor([len(h)], device=wires.device)) for there, h in headers.items()],
        list(sizes.items()),
    )()
    arrived = {h: torch.empty(int(n), dtype=torch.uint8, device=wires.device) for h, n in sizes.items()}
    wires.post(list(headers.items()), list(arrived.items()))()
    unpacking = {
        here: _Unpacking(incoming[here], unpacked_state(header.cpu()), wires.device)
        for here, header in arrived.items()
    }
    wires.post(
        [(there, flat) for there, (_, flats) in packed.items() for flat in flats],
        [(here, flat) for here, unpack in unpacking.items() for flat in unpack.flats],
    )()
    for unpack in unpacking.values():
        unpack.put(optimizer)


def _by_pair(ways: Ways) -> list[tuple[tuple[int, int], Sequence[OwnedTensor]]]:
    return [(pair, things) for pair, things in ways.items() if things]


def _pack(
    things: Sequence[OwnedTensor], optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[_Row], list[torch.Tensor]]:
    """Of each thing the forms of its optimizer state, or its value; and all tensors, flat by dtype."""
    header: list[_Row] = []
    kinds: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for thing in things:
        kinds[thing.tensor.dtype].append(thing.tensor)
        row: _Row = ({}, {})
        for key, value in (optimizer.state.get(thing.tensor) or {}).items():
            if isinstance(value, torch.Tensor) and value.device.type == device.type:
                kinds[value.dtype].append(value)
                row[0][key] = (tuple(value.shape), value.dtype)
            else:  # a step count on the CPU
                row[1][key] = value
        header.append(row)
    return header, [torch.cat([t.reshape(-1) for t in kind]) for kind in kinds.values()]


class _Unpacking:
    """Room for what a description announces, in `flats`; then `put` where it belongs."""

    def __init__(self, things: Sequence[OwnedTensor], header: list[_Row], device: torch.device) -> None:
        self._things, self._header = things, header
        self._order: dict[torch.dtype, list[int]] = defaultdict(list)
        for thing, row in zip(things, header, strict=True):
            self._order[thing.tensor.dtype].append(thing.tensor.numel())
            for shape, dtype in row[0].values():
                self._order[dtype].append(torch.Size(shape).numel())
        self.flats = [torch.empty(sum(sizes), dtype=d, device=device) for d, sizes in self._order.items()]

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        parts = {
            dtype: iter(flat.split(sizes))
            for (dtype, sizes), flat in zip(self._order.items(), self.flats, strict=True)
        }
        for thing, row in zip(self._things, self._header, strict=True):
            thing.tensor.copy_(next(parts[thing.tensor.dtype]).view(thing.tensor.shape))
            travels, rest = row
            state = optimizer.state[thing.tensor] if travels or rest else {}
            state.update(rest)
            for key, (shape, dtype) in travels.items():
                came = next(parts[dtype]).view(shape)
                if isinstance(state.get(key), torch.Tensor) and state[key].shape == came.shape:
                    state[key].copy_(came)
                else:
                    state[key] = came.clone()
