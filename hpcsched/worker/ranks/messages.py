"""What ranks say to each other, as bytes in a tensor: nothing that is read can run code.

Facts of known types travel as JSON, states of a training as a checkpoint holds them.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from hpcsched.compat import zip
from hpcsched.worker.process.storable import storable
from hpcsched.worker.process.typed_json import decoded, encoded

_PIECE_BYTES = 64 << 20


def packed(item: Any) -> torch.Tensor:
    """A fact (dataclasses, containers, numbers, text), shape [bytes], uint8. Raises TypeError for others."""
    return torch.frombuffer(bytearray(encoded(item)), dtype=torch.uint8)


def unpacked(data: torch.Tensor, kind: Any) -> Any:
    """What was `packed`, of this type. Raises RuntimeError for anything else."""
    try:
        return decoded(data.numpy().tobytes(), kind)
    except ValueError as error:
        raise RuntimeError(f"a message of another rank makes no sense: {error}") from error


def packed_state(state: Any) -> torch.Tensor:
    """A state, shape [bytes], uint8. Raises StoreError for what a checkpoint cannot hold."""
    buffer = io.BytesIO()
    torch.save(storable(state), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked_state(data: torch.Tensor) -> Any:
    """The same, its tensors on the CPU."""
    return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)


def from_first(data: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rank 0's bytes, on every rank of a gloo group; the others give None."""
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, src=0, group=group)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    for piece in data.split(_PIECE_BYTES):
        if len(piece):
            dist.broadcast(piece, src=0, group=group)
    return data


def to_first(data: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The bytes of all ranks of a gloo group, by rank, on rank 0; an empty list on the others."""
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    first = dist.get_rank(group) == 0
    rooms = [torch.empty_like(padded) for _ in range(world)] if first else None
    dist.gather(padded, rooms, dst=0, group=group)
    return [room[: int(size)] for room, size in zip(rooms or [], sizes, strict=False)]
