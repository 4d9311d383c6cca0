"""Batches that all ranks share: whatever the number of ranks, the same samples in the same order."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from hpcsched.integrations.lightning.batches import Position, part, shared, unsuited
from tests.integrations.lightning.trainings import Samples, Stream, loader

pytestmark = pytest.mark.filterwarnings("ignore")


def taken(
    data: DataLoader[Any], world_size: int, together: int, epoch: int, batches: int = 0
) -> list[list[int]]:
    """The samples of each global batch of an epoch from a batch on, of all ranks."""
    ranks = [
        [batch[0].tolist() for batch in shared(
            data, rank=rank, world_size=world_size, together=together, position=Position(epoch, batches)
        )]
        for rank in range(world_size)
    ]  # fmt: skip
    return [flat(parts) for parts in zip(*ranks, strict=True)]


def flat(lists: Any) -> list[int]:
    return [one for some in lists for one in some]


def test_two_ranks_take_what_one_takes() -> None:
    one = taken(loader(), 1, 1, epoch=3)
    assert sorted(flat(one)) == list(range(38))
    assert taken(loader(), 2, 1, epoch=3) == one
    two_at_a_time = [one[at] + one[at + 1] for at in range(0, 10, 2)]
    assert taken(loader(), 2, 2, epoch=3) == two_at_a_time
    assert taken(loader(), 2, 1, epoch=4) != one


def test_it_goes_on_anywhere_on_any_number() -> None:
    one = taken(loader(40), 1, 1, epoch=2)
    assert taken(loader(40), 4, 1, epoch=2, batches=3) == one[3:]
    assert flat(taken(loader(40), 4, 4, epoch=2, batches=4)) == flat(one[4:])


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"generator": torch.Generator().manual_seed(5)},
        {"drop_last": True},
        {"shuffle": False, "sampler": WeightedRandomSampler(torch.ones(38), 38, replacement=False)},
        {"shuffle": False, "sampler": RandomSampler(range(38), generator=torch.Generator())},
        {
            "shuffle": False,
            "batch_size": 1,
            "batch_sampler": BatchSampler(SequentialSampler(range(38)), 4, True),
        },
    ],
)
def test_whatever_a_program_draws_from(options: dict[str, Any]) -> None:
    one = taken(loader(**options), 1, 1, epoch=1)
    assert taken(loader(**options), 2, 1, epoch=1, batches=4) == one[4:]
    whole = flat(one)
    assert len(set(whole)) == len(whole) >= 36


def test_with_workers_ahead_nothing_is_lost() -> None:
    one = taken(loader(), 1, 1, epoch=0)
    ahead = loader(num_workers=1, prefetch_factor=4)
    assert taken(ahead, 1, 1, epoch=0, batches=3) == one[3:]


def test_a_stateful_loader_is_shared_as_any_other() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    data = stateful.StatefulDataLoader(Samples(38), batch_size=4, shuffle=True)
    one = taken(data, 1, 1, epoch=0)
    assert sorted(flat(one)) == list(range(38))
    assert taken(data, 2, 1, epoch=0, batches=2) == one[2:]


def test_drawing_an_order_leaves_the_program_its_random_numbers() -> None:
    sampler = shared(loader(), rank=0, world_size=1, together=1, position=Position()).batch_sampler
    torch.manual_seed(1)
    list(sampler)
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(()))


def test_a_batch_that_cannot_be_divided_repeats_its_first_samples() -> None:
    assert [part([1, 2, 3, 4, 5], rank, 2) for rank in (0, 1)] == [[1, 2, 3], [4, 5, 1]]
    assert [part([1], rank, 3) for rank in range(3)] == [[1], [1], [1]]


def test_the_shorter_one_of_two_loaders_begins_again() -> None:
    position = Position(0, 6)
    short = shared(loader(16), rank=0, world_size=1, together=1, position=position)
    first, second = [[batch[0].tolist() for batch in short] for _ in range(2)]
    assert len(first) == 2 and len(second) == 4
    assert sorted(flat(second)) == list(range(16))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([1, 2], "list is no DataLoader"),
        (DataLoader(Stream(), batch_size=4), "an IterableDataset has no order"),
        (DataLoader(Samples(8), batch_size=None), "without batch_size"),
        (DataLoader(Samples(8), sampler=DistributedSampler(Samples(8), 2, 0)), "DistributedSampler"),
    ],
)
def test_what_cannot_be_shared(data: Any, why: str) -> None:
    assert why in str(unsuited(data))
