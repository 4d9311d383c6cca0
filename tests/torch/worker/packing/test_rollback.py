"""What a step changed is what it was before, once it is put back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpcsched.worker.packing.rollback import Weights  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_step_of_an_optimizer_that_also_keeps_plain_values_is_put_back() -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(3), "steps": 4, "rule": None}
    before = Weights(optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[weight]["steps"] = 5
    assert not torch.equal(weight, torch.arange(3.0))
    before.put_back()
    assert torch.equal(weight, torch.arange(3.0))
    state = optimizer.state[weight]
    assert torch.equal(state["momentum_buffer"], torch.ones(3))
    assert (state["steps"], state["rule"]) == (4, None)
