"""Whatever ranks come and go, every epoch has every sample exactly once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.worker.session.sampler import Sampler, share

segments = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=6)


@settings(max_examples=examples(60))
@given(
    size=st.integers(1, 40), batch=st.integers(6, 50), seed=st.integers(-(2**70), 2**70), segments=segments
)
def test_over_any_resizes_every_epoch_has_each_sample_once(
    size: int, batch: int, seed: int, segments: list[tuple[int, int]]
) -> None:
    stream: list[int] = []
    for world, steps in segments:
        sampler = Sampler(size, seed)  # a new process: nothing is left but the position
        for _ in range(steps):
            indices = sampler.batch(len(stream), batch)
            for rank in range(world):
                stream.extend(share(indices, rank, world).tolist())
    for epoch in range(len(stream) // size):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(count=st.integers(1, 200), world=st.integers(1, 64))
def test_shares_are_contiguous_and_differ_by_at_most_one(count: int, world: int) -> None:
    indices = np.arange(count)
    shares = [share(indices, rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate(shares), indices)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_order_is_fixed_for_ever() -> None:
    """A run resumed with a newer version must go on with the same samples."""
    assert Sampler(8, seed=1).batch(0, 16).tolist() == [6, 2, 3, 7, 1, 4, 5, 0, 2, 0, 3, 4, 1, 6, 7, 5]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(Sampler(20, seed).batch(epoch * 20, 20)) for seed in (0, 1, 2**40) for epoch in (0, 1)}
    assert len(orders) == 6


def test_a_step_of_a_large_dataset_costs_microseconds() -> None:
    sampler = Sampler(1_000_000)
    sampler.batch(0, 64)
    times = []
    for step in range(200):
        start = time.perf_counter()
        sampler.batch(step * 64, 64)
        times.append(time.perf_counter() - start)
    assert sorted(times)[100] < 2e-3


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        Sampler(0)
