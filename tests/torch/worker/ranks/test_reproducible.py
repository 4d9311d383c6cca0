"""Shards are added in one order whoever has them; what one shard does, no other one sees."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.process import rng  # noqa: E402
from hpcsched.worker.ranks import reproducible  # noqa: E402
from hpcsched.worker.ranks.reproducible import Seeded, VirtualShards, deterministic, pin_threads  # noqa: E402
from hpcsched.worker.ranks.tree_sum import TreeSum, owner_of, shards_of  # noqa: E402


class Written:
    """Writes sums down, and counts the values that one rank holds."""

    def __init__(self, rank: int, mail: dict[tuple[int, int], deque[str]], sent: Counter[int]) -> None:
        self.rank, self.mail, self.sent = rank, mail, sent
        self.held = self.most = 0

    def take(self, value: str) -> str:
        self.held += 1
        self.most = max(self.most, self.held)
        return value

    def add(self, left: str, right: str) -> str:
        self.held -= 1
        return f"({left}+{right})"

    def send(self, value: str, rank: int) -> None:
        self.held -= 1
        self.sent[self.rank] += 1
        self.mail.setdefault((self.rank, rank), deque()).append(value)

    def receive(self, rank: int) -> str:
        return self.take(self.mail[rank, self.rank].popleft())


def written_sum(count: int, world: int) -> tuple[str, Counter[int], int]:
    """The sum as rank 0 has it, who sent how many messages, and the most values a rank held.

    The ranks run one after the other, the last one first: a message from a lower rank would be missing.
    """
    mail: dict[tuple[int, int], deque[str]] = {}
    sent: Counter[int] = Counter()
    most = 0
    for rank in reversed(range(world)):
        hands = Written(rank, mail, sent)
        tree = TreeSum(count, hands)
        for shard in shards_of(rank, world, count):
            tree.put(shard, hands.take(str(shard)))
        total = tree.total(rank, world)
        assert (total is None) == (rank > 0)
        assert hands.held == (rank == 0)
        assert tree.clear() == []
        most = max(most, hands.most)
    assert not any(mail.values())
    assert total is not None
    return total, sent, most


def halved(first: int, end: int) -> str:
    if end - first == 1:
        return str(first)
    middle = (first + end) // 2
    return f"({halved(first, middle)}+{halved(middle, end)})"


@pytest.mark.parametrize("count", range(1, 17))
def test_every_rank_count_writes_down_the_same_sum(count: int) -> None:
    assert {written_sum(count, world)[0] for world in range(1, count + 1)} == {halved(0, count)}


@given(st.data())
def test_of_many_shards_too_a_rank_holds_and_sends_few_sums(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 300))
    world = data.draw(st.integers(1, count))
    total, sent, most = written_sum(count, world)
    levels = (count - 1).bit_length()
    assert total == halved(0, count)
    assert most <= 2 * levels + 1
    assert sent[0] == 0
    assert all(1 <= sent[rank] <= levels for rank in range(1, world))
    if world in (1, 2, 4) or (world & (world - 1) == 0 and count % world == 0):
        assert sum(sent.values()) == world - 1
    if world == 1:
        assert most <= levels + 1


@given(st.integers(1, 60).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_each_shard_has_one_owner(count_and_world: tuple[int, int]) -> None:
    count, world = count_and_world
    owners = [rank for rank in range(world) for _ in shards_of(rank, world, count)]
    assert owners == [owner_of(shard, world, count) for shard in range(count)]
    assert set(owners) == set(range(world))


def test_a_sum_given_up_leaves_nothing_behind() -> None:
    hands = Written(0, {}, Counter())
    tree = TreeSum(4, hands)
    for shard in range(3):
        tree.put(shard, "old")
    assert tree.clear() == ["(old+old)", "old"]
    assert tree.clear() == []
    for shard in range(4):
        tree.put(shard, str(shard))
    assert tree.total(0, 1) == "((0+1)+(2+3))"


# What a shard is, on one rank; over several ranks it is tests/live/test_shards_gloo.py.


def shards_for(
    model: nn.Module, count: int | None = 4, batch: int = 8, world: int = 1, **given: Any
) -> VirtualShards:
    ranks = SimpleNamespace(rank=0, world_size=world)
    return VirtualShards(model, ranks, count=count, global_batch=batch, **{"seed": 0, **given})


def step(shards: VirtualShards, model: nn.Module, x: torch.Tensor, number: int = 0) -> None:
    shards.begin(number)
    for part in shards.parts(x[shards.place]):
        (model(part).sum() / len(x)).backward()


class Forward(nn.Module):
    """A weight, a second one, and whatever forward pass and buffers a test gives it."""

    def __init__(self, forward: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


X = torch.arange(8.0)


def test_the_sum_over_the_shards_is_the_gradient_of_the_batch() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    x = torch.randn(11, 5, dtype=torch.float64)
    (model(x).sum() / 11).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    for count in (1, 2, 3, 11):
        step(shards_for(model, count, 11), model, x)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], plain)


@given(batch=st.integers(1, 60), data=st.data())
def test_shards_are_slices_of_the_batch_over_any_ranks(batch: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, batch))
    world = data.draw(st.integers(1, count))
    ranks = SimpleNamespace(rank=0, world_size=1)
    shards = VirtualShards(nn.Linear(1, 1), ranks, count=count, global_batch=batch, seed=0)
    samples = list(range(batch))
    alone = shards.split(samples[shards.place])
    assert [sample for part in alone for sample in part] == samples
    assert all(alone)
    ranks.world_size = world  # changed under its feet, as by a resize
    together: list[list[int]] = []
    for ranks.rank in range(world):
        assert len(shards.mine) in (count // world, -(-count // world))
        together += shards.split(samples[shards.place])
    assert together == alone


def test_no_gradient_is_none_for_all_shards_and_zero_for_some() -> None:
    model = Forward(lambda self, x: self.weight.sum() * x if x[0] > 3 else x.clone().requires_grad_())
    model.weight.grad = model.other.grad = torch.full((3,), 9.0)  # of before
    shards = shards_for(model)
    step(shards, model, X)
    assert model.weight.grad.tolist() == [(4 + 5 + 6 + 7) / 8] * 3
    assert model.other.grad is None
    step(shards, model, X.clamp(max=3), 1)
    assert model.weight.grad is None


def test_layers_freeze_and_thaw_between_steps() -> None:
    model = Forward(lambda self, x: (self.weight + self.other).sum() * x)
    shards = shards_for(model)
    model.other.requires_grad_(False)
    step(shards, model, X)
    assert model.other.grad is None
    shards.begin(1)
    model.other.requires_grad_(True)  # as a loop does that counts its steps
    for part in shards.parts(X):
        (model(part).sum() / 8).backward()
    assert model.other.grad.tolist() == model.weight.grad.tolist() == [X.mean()] * 3


def average(self: Forward, x: torch.Tensor) -> torch.Tensor:
    """Moves one buffer half-way to the mean of the batch, and counts in another."""
    self.mean.lerp_(x.mean(), 0.5)
    self.calls += 1
    return self.weight.sum() * x


def test_buffers_move_by_the_mean_of_the_shards_and_count_steps() -> None:
    model = Forward(average, mean=torch.tensor(10.0), calls=torch.tensor(0))
    shards = shards_for(model, count=2)
    step(shards, model, X)
    assert (model.mean.item(), model.calls.item()) == (10 + ((1.5 - 10) / 2 + (5.5 - 10) / 2) / 2, 1)
    step(shards, model, X, 1)
    assert model.calls.item() == 2


def test_of_other_buffers_shard_0_decides() -> None:
    def remember(self: Forward, x: torch.Tensor) -> torch.Tensor:
        self.last.fill_(int(x[-1]) + self.last.item())
        return self.weight.sum() * x

    model = Forward(remember, last=torch.tensor(10))
    shards = shards_for(model)
    step(shards, model, X)
    assert model.last.item() == 10 + 1
    step(shards, model, X, 1)
    assert model.last.item() == 10 + 1 + 1


def test_a_buffer_that_stays_does_not_drift() -> None:
    """Adding three thirds up and dividing by three would change its last digit, step by step."""
    values = torch.cat([torch.rand(500), torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0])])
    model = Forward(lambda self, x: self.weight.sum() * x, table=values.clone(), mask=values > 0.5)
    shards = shards_for(model, count=7)
    for number in range(3):
        step(shards, model, X, number)
    assert model.table.numpy().tobytes() == values.numpy().tobytes()
    assert torch.equal(model.mask, values > 0.5)


def test_a_buffer_that_a_forward_pass_replaces_counts_as_changed() -> None:
    def replace(self: Forward, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean() * self.weight.mean() / 2
        return self.weight.sum() * x

    model = Forward(replace, mean=torch.tensor(10.0))
    home = model.mean
    step(shards_for(model, count=2), model, X)
    assert model.mean is home
    assert not home.requires_grad
    assert home.item() == 10 + ((1.5 - 10) / 2 + (5.5 - 10) / 2) / 2


def test_a_shard_draws_its_own_numbers_and_the_loop_everyones() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    def story(world: int, rank: int, seed: int = 0) -> dict[Any, tuple[float, float, float]]:
        model = nn.Linear(1, 1)
        shards = shards_for(model, seed=seed)
        draws: dict[Any, tuple[float, float, float]] = {}
        for number in range(2):
            shards.begin(number)
            draws[number, "before"] = draw()
            for shard, _ in enumerate(shards.parts(X)):
                draws[number, shard] = draw()
                for _ in range(world * 3 + rank):
                    draw()  # as many as it likes
            draws[number, "after"] = draw()
        return draws

    draws = story(1, 0)
    assert len(set(draws.values())) == len(draws) == 12
    assert story(2, 1) == draws
    assert not set(story(1, 0, seed=1).values()) & set(draws.values())


def test_a_step_that_was_left_half_way_is_forgotten() -> None:
    model = Forward(average, mean=torch.tensor(10.0), calls=torch.tensor(0))
    shards = shards_for(model)
    assert shards.complete
    shards.begin(0)
    assert not shards.complete
    for number, part in enumerate(shards.parts(X)):
        (100 * model(part).sum()).backward()
        if number == 2:
            break
    assert not shards.complete
    step(shards, model, X)
    assert shards.complete
    again = Forward(average, mean=torch.tensor(10.0), calls=torch.tensor(0))
    step(shards_for(again), again, X)
    assert model.weight.grad.tolist() == again.weight.grad.tolist()
    assert (model.mean.item(), model.calls.item()) == (again.mean.item(), again.calls.item())


@pytest.mark.parametrize("rank", [0, 1])
def test_later_steps_need_no_new_memory(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(reproducible, "post", lambda sends, receives: lambda: None)
    monkeypatch.setattr(dist, "broadcast", lambda buffer, src: None)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ranks = SimpleNamespace(rank=rank, world_size=2)
    shards = VirtualShards(model, ranks, count=8, global_batch=16, seed=0)
    x = torch.arange(16.0)[:, None]
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **rest: Any) -> torch.Tensor:
        made.append(1)
        return empty(*args, **rest)

    monkeypatch.setattr(torch, "empty", counted)
    step(shards, model, x)
    first = len(made)
    used = {parameter.grad.data_ptr() for parameter in model.parameters()}
    for number in range(1, 4):
        shards.begin(number)
        for shard, part in enumerate(shards.parts(x)):
            model(part).sum().backward()
            if shard == 3:
                break  # a step left half-way keeps nothing
        step(shards, model, x, number)
        used |= {parameter.grad.data_ptr() for parameter in model.parameters()}
    # Of a rank's four shards: two sums that wait, and the shard at hand.
    assert len(made) == first
    assert len(used) <= 3 * len(list(model.parameters()))


@pytest.mark.parametrize(
    ("count", "batch", "world"), [(0, 8, 1), (9, 8, 1), (-1, 8, 1), (2, 8, 3), (None, 8, 9)]
)
def test_shards_without_samples_and_ranks_without_shards_are_refused(
    count: int | None, batch: int, world: int
) -> None:
    with pytest.raises(ConfigError, match=r"training: shards: .* accepted: 1\.\.8, and at least as many"):
        shards_for(nn.Linear(1, 1), count, batch, world)


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (5, 5), (64, 8)])
def test_there_are_eight_shards_where_nobody_says(batch: int, count: int) -> None:
    assert shards_for(nn.Linear(1, 1), None, batch).count == count


def test_a_resumed_run_computes_as_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        pin_threads(3)
        state = shards_for(nn.Linear(1, 1), seed=5).state()
        assert (state["shards"], state["seed"], state["threads"]) == (4, 5, 3)
        pin_threads(1)
        shards = shards_for(nn.Linear(1, 1))
        assert shards.restore(state, "step-7.pt") == []
        assert (shards.seed, torch.get_num_threads()) == (5, 3)
        monkeypatch.setattr(torch, "__version__", "9.9")
        (difference,) = shards.restore(state, "step-7.pt")
        assert difference.startswith(f"step-7.pt: torch was {state['torch']!r} and is '9.9'")
        with pytest.raises(ConfigError, match=r"step-7.pt: shards: 2; accepted: 4, as when"):
            shards_for(nn.Linear(1, 1), 2).restore(state, "step-7.pt")
    finally:
        pin_threads(threads)


def test_operations_that_cannot_repeat_themselves_are_refused() -> None:
    former = torch.are_deterministic_algorithms_enabled()
    try:
        deterministic(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(former)


def test_a_gpu_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    former = torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    try:
        deterministic(torch.device("cuda", 0))
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(former)


class Drawing:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def test_a_sample_is_drawn_by_its_place_in_the_stream_only() -> None:
    seeded = Seeded(Drawing(), 3)
    first, second = seeded.batch([(10, 2), (11, 2)]).tolist()
    assert first[0] == second[0] == 2
    assert not set(first[1:]) & set(second[1:])
    rng.reseed("something else")
    assert seeded.batch([(11, 2), (10, 2)]).tolist() == [second, first]
    assert Seeded(Drawing(), 4).batch([(10, 2)]).tolist() != [first]
    assert len(seeded) == 5


def test_reading_a_sample_takes_nothing_out_of_the_generators() -> None:
    rng.reseed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    rng.reseed(1)
    Seeded(Drawing(), 3).batch([(0, 1)])
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
