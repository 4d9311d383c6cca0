"""What a step by stream workers is made of: workers, halves of a gradient, updates by parts, reading."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any

import pytest
from capturerules import CaptureRules, torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcsched.worker.packing.batches import tensors_within
from hpcsched.worker.ranks.process_group import Peers
from hpcsched.worker.session.trainer import Parts
from hpcsched.worker.vsw import streams as streams_module
from hpcsched.worker.vsw.clock import DeviceClock, RoundsTaken, RoundTime
from hpcsched.worker.vsw.epoch_forecast import CELLS, Trajectory
from hpcsched.worker.vsw.gradient_halves import HalvedBucket, HalvedSum
from hpcsched.worker.vsw.measurements import TRUST, DeviceTimes, Measurements
from hpcsched.worker.vsw.memory import remember, remembered
from hpcsched.worker.vsw.reading import BatchReader
from hpcsched.worker.vsw.streams import StreamWorkers
from hpcsched.worker.vsw.updates import BY_PARAMETER, ShardOptimizer, can_be_split, scaled

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(samples: int = 6, seed: int = 2) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def loss(model: nn.Module, given: Any) -> Any:
    return nn.functional.cross_entropy(model(given[0]), given[1], reduction="none")


# -- workers -------------------------------------------------------------------------------------------


def test_workers_share_their_weights_and_gradients_and_nothing_else() -> None:
    model = network()
    workers = StreamWorkers(model, loss, CPU)
    workers.have(3)
    batches = [batch(seed=seed) for seed in range(3)]
    alone = [copy.deepcopy(model) for _ in batches]
    torch.autograd.backward([each.sum() for each in workers.forward(batches)])
    for other, given in zip(alone, batches, strict=True):
        loss(other, given).sum().backward()
    for parameter, *others in zip(model.parameters(), *(m.parameters() for m in alone), strict=True):
        torch.testing.assert_close(parameter.grad, sum(other.grad for other in others))
    # Each has its own statistics of its own samples, as workers on devices of their own have.
    for found, expected in zip(workers._models, alone, strict=True):
        torch.testing.assert_close(found[1].running_mean, expected[1].running_mean)


def test_a_step_begins_with_the_main_workers_buffers() -> None:
    model = network()
    workers = StreamWorkers(model, loss, CPU)
    workers.have(2)
    workers.forward([batch(seed=1), batch(seed=2)])
    workers.begin()
    assert torch.equal(workers._models[1][1].running_mean, model[1].running_mean)


def test_workers_come_and_go_without_a_new_set_of_weights() -> None:
    model = network()
    workers = StreamWorkers(model, loss, CPU)
    for count in (4, 1, 2):
        assert workers.have(count) == ""
        assert len(workers._models) == count
        assert workers._models[0] is model
        assert {id(p) for m in workers._models for p in m.parameters()} == {id(p) for p in model.parameters()}


def test_a_model_that_cannot_be_copied_has_one_worker() -> None:
    model = network()
    model.lock = (step for step in range(3))  # type: ignore[assignment]
    workers = StreamWorkers(model, loss, CPU)
    assert "generator" in workers.have(3)
    assert workers.count == 1


@dataclass
class Graph:
    """A batch as libraries for graphs have it."""

    x: Any
    more: Any = None


class Slotted:
    __slots__ = ("empty", "y")

    def __init__(self, y: Any) -> None:
        self.y = y


def ones(number: int) -> list[Any]:
    return [torch.ones(1) for _ in range(number)]


def test_the_memory_of_a_batch_is_kept_wherever_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is recorded once, on the stream that reads it: else it is written to while that still reads."""
    recorded: list[tuple[int, object]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((id(tensor), stream))
    )
    a, b, c, d, e, f = ones(6)
    graph = Graph(x=a, more=UserDict(b=b, own=[c, (d, None, 3)]))
    graph.more["back"] = graph
    given = (MappingProxyType({"g": graph, "again": a}), [Slotted(e), {f}], nn.Linear(1, 1), "text")
    stream: Any = object()
    streams_module._keep(given, stream)
    assert sorted(recorded) == sorted((id(tensor), stream) for tensor in (a, b, c, d, e, f))


def test_an_object_that_knows_a_whole_dataset_costs_no_walk_through_it() -> None:
    near = torch.ones(1)
    assert tensors_within(Graph(x=[[number] for number in range(10**5)], more=near)) == [near]


def test_workers_beyond_the_streams_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CaptureRules(monkeypatch)
    monkeypatch.setattr(streams_module, "MOST_STREAMS", 2)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    seen: list[str] = []

    def watched(model: Any, given: Any) -> Any:
        seen.append(cuda.here.name)
        return loss(model, given)

    workers = StreamWorkers(network(), watched, torch.device("cuda", 0))
    workers.have(5)
    losses = workers.forward([batch(seed=seed) for seed in range(5)])
    assert len(losses) == 5
    assert seen == ["s1", "s2", "s1", "s2", "s1"]
    assert len(workers._streams) == 2


# -- halves --------------------------------------------------------------------------------------------


def test_two_halves_are_the_gradient_and_its_similarity() -> None:
    model, given = network(), batch(8)
    model.eval()  # one batch or two, the same losses
    sums = HalvedSum(model.parameters(), Peers(0, 1, CPU), HalvedBucket)
    own: list[Any] = []
    for part in (slice(0, 4), slice(4, 8)):
        model.zero_grad()
        (loss(model, (given[0][part], given[1][part])).mean()).backward()
        own.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    (loss(model, (given[0][:4], given[1][:4])).sum() / 8).backward()
    sums.keep_first()
    (loss(model, (given[0][4:], given[1][4:])).sum() / 8).backward()
    sums.complete()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(whole, (own[0] + own[1]) / 2)
    found = sums.halves(4)
    assert found.aa == pytest.approx(float(own[0] @ own[0]))
    assert found.bb == pytest.approx(float(own[1] @ own[1]))
    assert found.similarity == pytest.approx(float(torch.cosine_similarity(own[0], own[1], dim=0)))


def test_what_no_half_used_has_no_gradient_and_what_one_used_has_its() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]).double()
    sums = HalvedSum(model.parameters(), Peers(0, 1, CPU), HalvedBucket)
    x = torch.ones(1, 2, dtype=torch.float64)
    model[0](x).sum().backward()
    first = model[0].weight.grad.clone()
    sums.keep_first()
    model[1](x).sum().backward()
    sums.complete()
    assert torch.equal(model[0].weight.grad, first)
    assert model[1].weight.grad is not None
    assert model[2].weight.grad is None


# -- updates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BY_PARAMETER, ids=lambda kind: kind.__name__)
def test_steps_of_parts_are_the_step_of_all(kind: Any) -> None:
    models = network(), network()
    optimizers = []
    for model in models:
        groups = [
            {"params": list(model[0].parameters())},
            {"params": list(model[3].parameters()), "lr": 0.02},
        ]
        optimizers.append(kind(groups, lr=0.01))
    parameters = list(models[1][0].parameters()) + list(models[1][3].parameters())
    shards = ShardOptimizer(optimizers[1])
    for seed in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, batch(seed=seed)).mean().backward()
        optimizers[0].step()
        for part in (parameters[2:], parameters[:1], parameters[1:2]):
            shards.step(part)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(optimizers[1].param_groups) == 2


def test_optimizers_that_look_at_all_gradients_are_not_split() -> None:
    model = network()
    clipped = torch.optim.SGD(model.parameters(), lr=0.1)
    assert can_be_split(clipped)
    clipped.register_step_pre_hook(lambda *_: None)
    assert not can_be_split(clipped)
    assert not can_be_split(torch.optim.LBFGS(model.parameters()))
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(wrapped, 3)
    assert can_be_split(wrapped), "a scheduler only counts its steps"
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    mine.step = MethodType(lambda self, closure=None: None, mine)  # type: ignore[method-assign]
    assert not can_be_split(mine)
    torch.optim.lr_scheduler.StepLR(mine, 3)
    assert not can_be_split(mine)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert not can_be_split(wrapped)
    handle.remove()


def test_a_scaled_learning_rate_is_put_back_whatever_happens() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), scaled(optimizer, 3.0):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1


# -- reading -------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def pieces(begin: int, end: int, size: int) -> Iterator[list[tuple[int, int]]]:
    for start in range(begin, end, size):
        yield [(i, i) for i in range(start, start + size)]


@pytest.mark.parametrize("loaders", [0, 2])
def test_after_a_change_of_plan_the_next_batch_is_the_new_plans(loaders: int) -> None:
    model = network()
    parts = Parts(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=Numbers(),
        global_batch=4,
        loss=loss,
        loaders=loaders,
    )
    reader = BatchReader(parts, CPU, lambda: 0)
    reader.aim(pieces(0, 400, 4))
    assert [reader.next().tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    reader.aim(pieces(8, 20, 6))
    assert [reader.next().tolist() for _ in range(2)] == [list(range(8, 14)), list(range(14, 20))]
    # Those who read ahead have come to the end of that plan before they hear of the next one.
    reader.aim(pieces(20, 28, 4))
    assert [reader.next().tolist() for _ in range(2)] == [[20, 21, 22, 23], [24, 25, 26, 27]]
    with pytest.raises(StopIteration):
        reader.next()


# -- what is measured and remembered -------------------------------------------------------------------


def test_a_clock_gives_means_without_the_worst_and_forgets_what_was_new() -> None:
    """A core that is shared is as fast as ever in most rounds, and stands still in some: that counts."""
    clock = DeviceClock(CPU)
    for seconds in (1.0, 1.0, 4.0, 30.0):
        clock.round((8, 1), 0.0, 0.5, 0.5 + seconds, 0.5 + 3 * seconds)
    clock.round((8, 2), 0.0, 0.0, 9.0, 99.0)
    clock.forget((8, 2))
    clock.update(1.0, 1.25)
    taken = clock.take()
    assert taken.rounds == {(8, 1): RoundTime(read_s=0.5, forward_s=2.0, backward_s=4.0)}
    assert taken.update_s == 0.25
    assert taken.counts == {(8, 1): 4}
    assert clock.take() == RoundsTaken(rounds={}, counts={}, update_s=None)


def test_the_trajectory_has_each_cells_own_mean() -> None:
    trajectory = Trajectory(100 * CELLS)
    for _ in range(10):
        trajectory.add(50)
    trajectory.add(150)  # a cell and a half
    assert trajectory.cells == pytest.approx([50.0] * 5 + [150.0])
    assert trajectory.epoch == pytest.approx(650 / 2000)
    other = Trajectory(100 * CELLS)
    other.load_state_dict(trajectory.state_dict())
    for each in (trajectory, other):
        each.add(100)
        assert each.cells[-1] == pytest.approx(125.0)


def test_what_was_too_large_is_known_to_the_next_attempt(tmp_path: Any) -> None:
    assert remembered(tmp_path) == set()
    remember(tmp_path, (32, 2))
    remember(tmp_path, (16, 4))
    assert remembered(tmp_path) == {(32, 2), (16, 4)}
    (tmp_path / "too-large.json").write_text("{")
    assert remembered(tmp_path) == set()


def table(*, streams: bool = False, slow: float = 1.0, **rounds: float) -> DeviceTimes:
    """Times by `bLOCAL_NUMBER`, all of it backward pass."""
    found = {}
    for name, seconds in rounds.items():
        local, count = name[1:].split("_")
        found[int(local), int(count)] = RoundTime(read_s=0.0, forward_s=0.0, backward_s=slow * seconds)
    return DeviceTimes(host="here", device="a device", streams=streams, rounds=found)


def test_what_is_measured_counts_the_more_the_more_it_is() -> None:
    three = {(8, 1): RoundTime(read_s=0.0, forward_s=0.0, backward_s=3.0)}
    for count, expected in ((TRUST, 2.0), (99 * TRUST, 2.98)):
        known = table(b8_1=1.0)
        known.learn(RoundsTaken(rounds=three, counts={(8, 1): count}, update_s=0.5))
        assert known.rounds[8, 1].backward_s == pytest.approx(expected)
        assert known.update_s == 0.5


def test_a_table_survives_a_checkpoint() -> None:
    known = table(streams=True, b8_1=1.0, b16_2=2.5)
    known.too_large.add((32, 1))
    known.counts = {(8, 1): 5, (16, 2): 7}
    assert DeviceTimes.of_state(known.state_dict()) == known


def test_a_local_batch_that_one_rank_has_not_tried_is_as_slow_there_as_others_are() -> None:
    from hpcsched.planning.vsw.costs import AllReduceCost

    tables = Measurements([table(b8_1=1.0, b16_1=1.5), table(slow=2.0, b8_1=1.0)])
    costs = tables.costs((1,), AllReduceCost(per_byte_s=0.0, latency_s=0.0))
    assert costs.gpus["0"].speeds[16].at(1).total_s == 1.5
    # Of (1, 2) seconds with 8 the usual is 1.5: the second rank takes 4/3 of that, so of 1.5 with 16 too.
    assert costs.gpus["1"].speeds[16].at(1).total_s == pytest.approx(1.5 * 4 / 3)
    assert costs.gpus["usual"].speeds[8].at(1).total_s == 1.5


def test_ranks_that_are_about_as_fast_count_as_alike() -> None:
    tables = Measurements([table(b8_1=1.0), table(b8_1=1.05), table(b8_1=2.0)])
    assert [tables.is_usual(rank) for rank in range(3)] == [True, True, False]


def test_a_local_batch_twice_as_large_as_the_largest_is_tried_next() -> None:
    assert Measurements([table(b8_1=1.0)]).next_local([4, 8, 16]) == 4, "the smallest first"
    known = Measurements([table(b4_1=0.6, b8_1=1.0, b16_1=1.7)])
    assert known.next_local([4, 8, 12, 24, 32, 40]) == 32
    assert known.next_local([4, 8, 40, 48]) == 40
    assert known.next_local([4, 8, 16]) is None


def test_larger_local_batches_are_tried_as_long_as_the_largest_gains() -> None:
    for seconds, gains in ((1.97, False), (1.9, True)):
        known = table(b4_1=0.4, b8_1=1.0, b16_1=seconds)
        for count, believed in ((23, False), (24, True)):
            known.counts = {(16, 1): count}
            assert (Measurements([known]).next_local([4, 32]) is None) is (believed and not gains)


def test_what_has_become_too_large_is_not_planned_with() -> None:
    from hpcsched.planning.vsw.costs import AllReduceCost

    for streams in (False, True):
        full = table(streams=streams, b8_1=1.0, b16_1=1.5)
        full.too_large.add((16, 1))
        both = Measurements([full, table(streams=streams, b8_1=1.0, b16_1=1.5, b32_1=2.0)])
        costs = both.costs((1,), AllReduceCost(per_byte_s=0.0, latency_s=0.0))
        assert set(costs.gpus["0"].speeds) == {8}
        assert both.largest == 8
        assert both.next_local([8, 16, 32]) is None


def test_a_guess_is_made_from_the_nearest_that_is_known() -> None:
    from hpcsched.planning.vsw.costs import AllReduceCost

    known = Measurements([table(b8_1=1.0, b16_1=1.5)])
    guessed = known.costs((1,), AllReduceCost(per_byte_s=0.0, latency_s=0.0), 32).gpus["0"].speeds[32]
    assert guessed.at(1).total_s == pytest.approx(3.0)


def test_more_at_once_is_tried_while_it_gains_and_fits() -> None:
    assert Measurements([table(streams=True, b8_1=1.0)]).next_at_once(0, 8) == 2
    assert Measurements([table(streams=True, b8_1=1.0, b8_2=1.5)]).next_at_once(0, 8) == 3
    assert Measurements([table(streams=True, b8_1=1.0, b8_2=1.99)]).next_at_once(0, 8) is None
    full = table(streams=True, b8_1=1.0, b8_2=1.5)
    full.too_large.add((8, 3))
    assert Measurements([full]).next_at_once(0, 8) is None
    assert Measurements([table(b8_1=1.0)]).next_at_once(0, 8) is None  # a CPU slot takes turns
