"""What ranks call comes in an order in which NCCL can work it off, whatever the plan and the gradients."""

from __future__ import annotations

import pytest
from budget import slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import ncclrules  # noqa: E402
from burstranks import Ranks, cases, step_of  # noqa: E402
from torch import nn  # noqa: E402

from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.burst.engine import Engine  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402


def calls_of_tied(wires: Channels, ranks: list[tuple[int, ...]]) -> tuple[str, list[ncclrules.Call]]:
    """Train a model of which two layers have the same weights; each layer on ranks of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 3))
    model[4].weight = model[2].weight
    example = torch.zeros(2, 2, 4, 4)
    layers = trace(model, (example,))
    planned = [
        PlannedLayer(id=layer.id, name=layer.name, ranks=at)
        for layer, at in zip(layers.layers, ranks, strict=True)
    ]
    plan = BurstPlan(model="tied", gpus=wires.world_size, global_batch=6, layers=tuple(planned))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(layers, (example,), plan, batch=6, seed=0, wires=wires, optimizer=optimizer)
    ncclrules.taken()
    for step in range(3):
        optimizer.zero_grad()
        step_of(engine, torch.randn(6, 2, 4, 4), torch.arange(6) % 3, 6 * step)
        optimizer.step()
    return ncclrules.taken()


def test_a_rank_that_has_no_gradient_yet_sums_in_its_turn() -> None:
    """Of tied weights on different ranks, one has its gradient long before the other."""
    group = Ranks(2, ncclrules.NAME)
    try:
        found = dict(group.ask(calls_of_tied, [(1,), (0,), (1,), (1,), (0, 1)]))
    finally:
        group.close()
    assert any(call.what for call in next(iter(found.values()))), "there are sums"
    assert any(call.sends for call in next(iter(found.values()))), "there are samples"
    for one_queue in (False, True):  # a queue a group, a queue a GPU
        assert ncclrules.deadlock(found, one_queue=one_queue) == "", one_queue


def calls_of_cases(wires: Channels, seed: int) -> tuple[str, list[ncclrules.Call]]:
    ncclrules.taken()
    cases(wires, [seed], 2, torch.float64, False, 3)
    return ncclrules.taken()


@pytest.mark.parametrize(
    ("ranks", "models"), [(2, range(60, 63)), slow(2, range(63, 66)), slow(3, range(66, 80))]
)
def test_any_plan_of_any_model_is_worked_off(ranks: int, models: range) -> None:
    group = Ranks(ranks, ncclrules.NAME)
    try:
        for model in models:
            assert ncclrules.deadlock(dict(group.ask(calls_of_cases, model))) == "", model
    finally:
        group.close()
