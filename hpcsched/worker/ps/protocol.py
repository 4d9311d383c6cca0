"""What the processes of a parameter-server job say to each other: messages between two of them, over gloo."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcsched.compat import dataclass, zip
from hpcsched.worker.checkpoint.layout import round_up
from hpcsched.worker.ranks.process_group import STEP_TIMEOUT_S

_ALIGNMENT = 64
"""Of each part of a message, in bytes."""


class PeerLost(RuntimeError):
    """A peer is gone, or was silent for STEP_TIMEOUT_S."""


class PeerChannels:
    """One rank's connections to all others: a gloo group of its own, beside that of the collective calls.

    Messages from one rank to another come in the order in which they were sent, and may be shorter than the
    room for them. Everything raises PeerLost. `keys`: a store that all ranks of the group come to with the
    same name.
    """

    def __init__(self, keys: Any, rank: int, world_size: int, within_s: float = STEP_TIMEOUT_S) -> None:
        self.rank = rank
        self.world_size = world_size
        store = dist.PrefixStore("wire", keys)  # type: ignore[attr-defined]
        patience = timedelta(seconds=within_s)
        # Made directly: the groups that torch keeps a list of go all together, and in a resize this one stays
        # until it is sure that nothing has been lost.
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, patience)  # type: ignore[attr-defined]

    def send(self, data: torch.Tensor, to: int) -> Callable[[], None]:
        """Start to send; the result, to be called, waits until `data` is needed no more."""
        with _lost(to):
            return _waiting(self._group.send([data], to, 0), to)

    def receive(self, room: torch.Tensor, source: int) -> Callable[[], None]:
        """Start to receive the next message of `source`; the result, to be called, waits for it."""
        with _lost(source):
            return _waiting(self._group.recv([room], source, 0), source)

    def close(self) -> None:
        """Let go of it; its threads take their time to end behind our back."""
        held = [self._group]
        self._group = None
        threading.Thread(target=held.clear, name="old wires").start()


@contextlib.contextmanager
def _lost(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"rank {peer} was lost: {str(error).splitlines()[0]}") from error


def _waiting(work: Any, peer: int) -> Callable[[], None]:
    def wait() -> None:
        with _lost(peer):
            work.wait(timedelta(seconds=STEP_TIMEOUT_S))

    return wait


@dataclass(frozen=True, slots=True)
class MessageBuffer:
    """A message's memory, and its parts as views of it.

    `flats` are the tensors of one type each, in a row, `tensors` the single ones, flat.
    """

    data: torch.Tensor
    words: torch.Tensor
    flags: torch.Tensor
    flats: dict[torch.dtype, torch.Tensor]
    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor]


class Frame:
    """How a message is laid out: whole numbers, flags, tensors of some types and sizes, and buffers behind.

    Args:
        words: how many int64 it begins with.
        flags: how many uint8.
        tensors: type and elements of each.
        buffers: tensors such as those that come last; `short` is the size of a message without them.
    """

    def __init__(
        self,
        words: int,
        flags: int,
        tensors: Sequence[tuple[torch.dtype, int]],
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        self._words, self._flags, self._tensors, self._buffers = words, flags, tensors, buffers
        self._end = 0
        self._at = self._room(8 * words), self._room(flags)
        sizes: dict[torch.dtype, int] = {}
        for dtype, elements in tensors:
            sizes[dtype] = sizes.get(dtype, 0) + elements
        self._flats = {dtype: (self._room(n * dtype.itemsize), n) for dtype, n in sizes.items()}
        self.short = self._end
        self._behind = [self._room(tensor.numel() * tensor.element_size()) for tensor in buffers]
        self.size = self._end

    def _room(self, size: int) -> int:
        begin, self._end = self._end, round_up(self._end + size, _ALIGNMENT)
        return begin

    def page(self) -> MessageBuffer:
        """A new message, all zero."""
        data = torch.zeros(self.size, dtype=torch.uint8)
        flats = {dtype: _view(data, at, dtype, n) for dtype, (at, n) in self._flats.items()}
        places = dict.fromkeys(flats, 0)
        tensors = []
        for dtype, elements in self._tensors:
            tensors.append(flats[dtype][places[dtype] : places[dtype] + elements])
            places[dtype] += elements
        words, flags = self._at
        return MessageBuffer(
            data=data,
            words=_view(data, words, torch.int64, self._words),
            flags=_view(data, flags, torch.uint8, self._flags),
            flats=flats,
            tensors=tensors,
            buffers=[
                _view(data, at, like.dtype, like.numel()).view(like.shape)
                for at, like in zip(self._behind, self._buffers, strict=True)
            ],
        )


def _view(data: torch.Tensor, at: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
    return data[at : at + elements * dtype.itemsize].view(dtype)
