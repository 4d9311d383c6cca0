"""What ranks of a plan say to each other: samples between two of them, sums over some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcsched.worker.ranks.point_to_point import Message, post
from hpcsched.worker.ranks.process_group import STEP_TIMEOUT_S

Ranks = tuple[int, ...]
"""Sorted, each once."""


class Channels:
    """One rank's connections to those of torch's default process group; alone in its world it has none.

    All ranks make theirs together. Samples travel in a group of their own, as NCCL works off what a group is
    given in the order of calls: a sum that waits for a late rank would hold them up. Everything here must be
    called in one order on all ranks that take part: then no two wait for each other.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self._samples: dist.ProcessGroup | None = None
        if world_size > 1:
            self._samples = dist.new_group(timeout=timedelta(seconds=STEP_TIMEOUT_S))
            # torch: all ranks take part in the first message of a group over NCCL.
            dist.all_reduce(torch.zeros(1, device=device), group=self._samples)

    def connect(self, sets: Iterable[Ranks]) -> None:
        """Make a process group of each set of several ranks that has none yet.

        All ranks of the world call this, with the same sets. Groups are kept, as plans may come back.
        """
        for ranks in sorted(set(sets)):
            if len(ranks) < 2 or ranks in self._groups:
                continue
            whole = len(ranks) == self.world_size
            patience = timedelta(seconds=STEP_TIMEOUT_S)
            self._groups[ranks] = None if whole else dist.new_group(list(ranks), timeout=patience)

    def sum(self, tensor: torch.Tensor, ranks: Ranks) -> dist.Work | None:
        """Start to add up a tensor over `ranks`, in place; wait() on the result. They are connected."""
        work: dist.Work | None = dist.all_reduce(tensor, group=self._groups[ranks], async_op=True)
        return work

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start to send and receive; the result must be called, to wait until all has come and gone."""
        return post(sends, receives, self._samples)

    def gather(self, row: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The rows of all `ranks`, one each, in their order: shape [ranks, *row.shape].

        Each sends its row to each: one round, where a collective operation of gloo takes several.
        """
        rows = row.new_empty((len(ranks), *row.shape))
        others = [(place, peer) for place, peer in enumerate(ranks) if peer != self.rank]
        rows[ranks.index(self.rank)] = row
        self.post([(peer, row) for _, peer in others], [(peer, rows[place]) for place, peer in others])()
        return rows


def format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Whether its channels come last in memory."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dense tensor in the order of its memory: what a transport accepts."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(0, *range(2, tensor.dim()), 1)
