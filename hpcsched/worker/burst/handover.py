"""Moves what is trained, parameters, buffers and optimizer state, from ranks that have it to others."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hpcsched.planning.burst.plan import Plan
from hpcsched.worker.burst.owners import Belonging
from hpcsched.worker.burst.wires import Wires

Ways = Mapping[tuple[int, int], Sequence[Belonging]]
"""What goes from one rank to another."""


def to_first(things: Iterable[Belonging], plan: Plan) -> Ways:
    """All that rank 0 does not own, to rank 0."""
    ways: dict[tuple[int, int], list[Belonging]] = defaultdict(list)
    for thing in things:
        owners = thing.owners(plan)
        if 0 not in owners:
            ways[owners[0], 0].append(thing)
    return ways


def to_new_owners(things: Iterable[Belonging], old: Plan, new: Plan) -> Ways:
    """All that a rank owns by the new plan and did not by the old one."""
    ways: dict[tuple[int, int], list[Belonging]] = defaultdict(list)
    for thing in things:
        had = thing.owners(old)
        for number, rank in enumerate(sorted(set(thing.owners(new)) - set(had))):
            ways[had[number % len(had)], rank].append(thing)
    return ways


@torch.no_grad()
def hand_over(ways: Ways, optimizer: torch.optim.Optimizer, wires: Wires) -> None:
    """Carry things along `ways`; all ranks call this with the same ones.

    Each pair of ranks exchanges a description, as a rank may never have had a state for a parameter, and
    one message a dtype.
    """
    mine = wires.rank
    outgoing = {there: things for (here, there), things in sorted(_by_pair(ways)) if here == mine}
    incoming = {here: things for (here, there), things in sorted(_by_pair(ways)) if there == mine}
    packed = {there: _pack(things, optimizer, wires.device) for there, things in outgoing.items()}
    headers = {there: _bytes(header, wires.device) for there, (header, _) in packed.items()}
    sizes = {here: torch.zeros(1, dtype=torch.int64, device=wires.device) for here in incoming}
    wires.post(
        [(there, torch.tensor([len(h)], device=wires.device)) for there, h in headers.items()],
        list(sizes.items()),
    )()
    arrived = {h: torch.empty(int(n), dtype=torch.uint8, device=wires.device) for h, n in sizes.items()}
    wires.post(list(headers.items()), list(arrived.items()))()
    unpacking = {
        here: _Unpacking(incoming[here], pickle.loads(header.cpu().numpy().tobytes()), wires.device)
        for here, header in arrived.items()
    }
    wires.post(
        [(there, flat) for there, (_, flats) in packed.items() for flat in flats],
        [(here, flat) for here, unpack in unpacking.items() for flat in unpack.flats],
    )()
    for unpack in unpacking.values():
        unpack.put(optimizer)


def _by_pair(ways: Ways) -> list[tuple[tuple[int, int], Sequence[Belonging]]]:
    return [(pair, things) for pair, things in ways.items() if things]


def _pack(
    things: Sequence[Belonging], optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Of each thing the forms of its optimizer state, or its value; and all tensors, flat by dtype."""
    header = []
    kinds: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for thing in things:
        kinds[thing.tensor.dtype].append(thing.tensor)
        row: dict[str, Any] = {}
        for key, value in (optimizer.state.get(thing.tensor) or {}).items():
            if isinstance(value, torch.Tensor) and value.device.type == device.type:
                kinds[value.dtype].append(value)
                row[key] = _Shape(tuple(value.shape), value.dtype)
            else:  # a step count on the CPU
                row[key] = value
        header.append(row)
    return header, [torch.cat([t.reshape(-1) for t in kind]) for kind in kinds.values()]


class _Shape(tuple[tuple[int, ...], torch.dtype]):
    """Stands in a description for a tensor that travels by itself."""

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> _Shape:
        return super().__new__(cls, (shape, dtype))

    def __reduce__(self) -> tuple[Callable[..., _Shape], tuple[Any, ...]]:
        return _Shape, tuple(self)


class _Unpacking:
    """Room for what a description announces, in `flats`; then `put` where it belongs."""

    def __init__(
        self, things: Sequence[Belonging], header: list[dict[str, Any]], device: torch.device
    ) -> None:
        self._things, self._header = things, header
        self._order: dict[torch.dtype, list[int]] = defaultdict(list)
        for thing, row in zip(things, header, strict=True):
            self._order[thing.tensor.dtype].append(thing.tensor.numel())
            for form in row.values():
                if isinstance(form, _Shape):
                    self._order[form[1]].append(torch.Size(form[0]).numel())
        self.flats = [torch.empty(sum(sizes), dtype=d, device=device) for d, sizes in self._order.items()]

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        parts = {
            dtype: iter(flat.split(sizes))
            for (dtype, sizes), flat in zip(self._order.items(), self.flats, strict=True)
        }
        for thing, row in zip(self._things, self._header, strict=True):
            thing.tensor.copy_(next(parts[thing.tensor.dtype]).view(thing.tensor.shape))
            state = optimizer.state[thing.tensor] if row else {}
            for key, value in row.items():
                if not isinstance(value, _Shape):
                    state[key] = value
                    continue
                came = next(parts[value[1]]).view(value[0])
                if isinstance(state.get(key), torch.Tensor) and state[key].shape == came.shape:
                    state[key].copy_(came)
                else:
                    state[key] = came.clone()


def _bytes(item: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(device)
