"""The batches of a program's DataLoader, shared by all ranks, from any point of an epoch on."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hpcsched.compat import dataclass
from hpcsched.worker.process import rng


@dataclass(slots=True)
class Position:
    """Where a training is in its data: `batches` of the program's batches are done in `epoch`."""

    epoch: int = 0
    batches: int = 0


class SharedBatches:
    """A batch sampler: the batches of another one, of which each rank gets an equal part.

    The order of an epoch depends on the seed (`seed_everything`'s) and the epoch alone, so any number of
    ranks goes through the same samples. Where a batch cannot be divided evenly, the last one of an epoch
    mostly, up to `world_size` - 1 of its samples are seen twice, as with torch's DistributedSampler.

    Args:
        batches: the program's batch sampler, as for one rank.
        sampler: what it draws from, if anything.
        together: how many of its batches are taken at a time.
        position: where to begin; shared with whoever counts the batches that are done.
    """

    def __init__(
        self, batches: Any, sampler: Any, *, rank: int, world_size: int, together: int, position: Position
    ) -> None:
        self._batches = batches
        self._drawn_from = sampler
        self._rank = rank
        self._world_size = world_size
        self._together = together
        self._position = position
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self._epoch = position.epoch
        self._cycle = 0
        self._exhausted = False
        self.began: tuple[int, int] | None = None
        """Epoch and batch at which it has begun last."""

    @property
    def sampler(self) -> SharedBatches:
        """Where Lightning looks for `set_epoch`."""
        return self

    @property
    def batch_size(self) -> Any:
        """The program's, as torch's BatchSampler has it."""
        return getattr(self._batches, "batch_size", None)

    @property
    def drop_last(self) -> Any:
        """The program's, as torch's BatchSampler has it."""
        return getattr(self._batches, "drop_last", False)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless the training is in the middle of it."""
        if epoch != self._position.epoch:
            self._position.epoch, self._position.batches = epoch, 0
        if epoch != self._epoch:
            self._epoch, self._cycle, self._exhausted = epoch, 0, False

    def __len__(self) -> int:
        return -(-len(self._batches) // self._together)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self._epoch = self._position.epoch
        start = 0
        if self._exhausted:  # the shorter one of several loaders, once more in the same epoch
            self._cycle += 1
        else:
            self._cycle, start = divmod(self._position.batches, max(1, len(self._batches)))
        self._exhausted = False
        self.began = epoch, self._position.batches
        drawn = self._draw(epoch)
        for at in range(start, len(drawn), self._together):
            taken = [index for batch in drawn[at : at + self._together] for index in batch]
            yield part(taken, self._rank, self._world_size)
        self._exhausted = True

    def _draw(self, epoch: int) -> list[Sequence[Any]]:
        words = ("lightning", self._seed, epoch, self._cycle)
        for one in (self._batches, self._drawn_from):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        with rng.seeded(*words):
            generator = getattr(self._drawn_from, "generator", None)
            if generator is not None:
                generator.manual_seed(torch.initial_seed())
            return list(self._batches)


def part(batch: list[Any], rank: int, world_size: int) -> list[Any]:
    """The part of a batch that is `rank`'s. All parts are of one size: the first samples may be repeated."""
    missing = -len(batch) % world_size
    while missing:
        batch = batch + batch[:missing]
        missing = -len(batch) % world_size
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]


def unsuited(dataloader: object) -> str | None:
    """Why the batches of a loader cannot be shared, in words; None if they can."""
    if not isinstance(dataloader, DataLoader):
        return f"{type(dataloader).__name__} is no DataLoader"
    if isinstance(dataloader.dataset, IterableDataset):
        return "an IterableDataset has no order"
    if dataloader.batch_sampler is None:
        return "without batch_size there are no batches"
    if isinstance(dataloader.sampler, DistributedSampler):
        return "a DistributedSampler divides the samples already"
    try:
        len(dataloader.batch_sampler)  # type: ignore[arg-type]
    except TypeError:
        return f"{type(dataloader.batch_sampler).__name__} has no length"
    return None


def shared(
    dataloader: DataLoader[Any], *, rank: int, world_size: int, together: int, position: Position
) -> DataLoader[Any]:
    """A copy of a loader with SharedBatches in it: of the same class, with the same workers and all else."""
    batches = SharedBatches(
        dataloader.batch_sampler,
        dataloader.sampler,
        rank=rank,
        world_size=world_size,
        together=together,
        position=position,
    )
    found = copy.copy(dataloader)
    # DataLoader refuses a new batch sampler, as it checks its arguments together: these have been checked.
    object.__setattr__(found, "batch_sampler", batches)
    # By these Lightning sees that it goes on in the middle of an epoch. Where that is, the callback keeps.
    object.__setattr__(found, "state_dict", dict)
    object.__setattr__(found, "load_state_dict", _nothing)
    return found


def _nothing(_state: object) -> None:
    """What a loader has to load: see `shared`."""
