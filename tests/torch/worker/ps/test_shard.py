"""A server's pieces of a training: cut, moved, put together again, and trained in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn, optim  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.ps.placement import share_out  # noqa: E402
from hpcsched.worker.ps.shard import ServerShard, check  # noqa: E402
from hpcsched.worker.vsw.updates import BY_PARAMETER  # noqa: E402

pytestmark = pytest.mark.torch


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)).double()


def made(kind: Any) -> optim.Optimizer:
    parts = model()
    groups = [{"params": parts[0].parameters(), "lr": 0.02}, {"params": [*parts[1:].parameters()]}]
    return kind(groups, lr=0.01)


def gradients(seed: int, like: list[nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in like]


def train(shards: list[ServerShard], steps: range) -> None:
    for number in steps:
        for shard in shards:
            whole = gradients(number, shard.parameters)
            for piece, tensor in zip(shard.pieces, shard.tensors, strict=True):
                part = whole[piece.parameter].view(-1)[piece.start : piece.stop]
                tensor.grad = part.view(tensor.shape).clone()
            shard.step()


def spread(shards: list[ServerShard]) -> None:
    """From all of them to all of them."""
    owners = share_out(shards[0].sizes, range(len(shards)), cut=shards[0].cut)
    everything = [copy.deepcopy(fragment) for shard in shards for fragment in shard.fragments()]
    for rank, shard in enumerate(shards):
        shard.install(owners[rank], everything)


@pytest.mark.parametrize("kind", [*BY_PARAMETER, optim.Adafactor], ids=lambda kind: kind.__name__)
def test_any_number_of_servers_takes_the_steps_of_one(kind: Any) -> None:
    one = made(kind)
    plain = ServerShard(one)
    train([plain], range(9))

    first = ServerShard(made(kind))
    train([first], range(3))
    for count in (3, 2):
        others = [ServerShard(made(kind)) for _ in range(count - 1)]
        for other in others:
            other.forget()
        shards = [first, *others]
        spread(shards)
        train(shards, range(3, 6) if count == 3 else range(6, 9))
        rest = [fragment for other in others for fragment in other.fragments()]
        with first.whole(rest):
            state = copy.deepcopy(first.optimizer.state_dict())
        everything = [*first.fragments(), *rest]
        whole = share_out(first.sizes, [0], cut=first.cut)[0]
        first.install(whole, copy.deepcopy(everything))
    expected = one.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, row in expected["state"].items():
        assert state["state"][number].keys() == row.keys()
        for key, value in row.items():
            torch.testing.assert_close(state["state"][number][key], value, rtol=0, atol=1e-12)
    for here, there in zip(first.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def test_pieces_are_the_models_own_memory() -> None:
    shard = ServerShard(made(optim.SGD))
    owners = share_out(shard.sizes, [0, 1], cut=True)
    shard.install(owners[0], shard.fragments())
    with torch.no_grad():
        for tensor in shard.tensors:
            tensor.fill_(3.0)
    flat = torch.cat([p.detach().view(-1) for p in shard.parameters])
    mine = sum(piece.size for piece in owners[0])
    assert bool((flat[:mine] == 3).all()) and not bool((flat[mine:] == 3).any())


def test_the_users_optimizer_is_as_it_was_again_for_its_state_and_then_not() -> None:
    shard = ServerShard(made(optim.Adam))
    train([shard], range(2))
    everything = copy.deepcopy(shard.fragments())
    owners = share_out(shard.sizes, [0, 1], cut=True)
    shard.install(owners[0], shard.fragments())
    pieces = [list(group["params"]) for group in shard.optimizer.param_groups]
    states = set(map(id, shard.optimizer.state))
    with shard.whole([f for f in everything if f.piece not in shard.pieces]):
        assert [len(group["params"]) for group in shard.optimizer.param_groups] == [2, 4]
    assert [[id(p) for p in g["params"]] for g in shard.optimizer.param_groups] == [
        [id(p) for p in group] for group in pieces
    ]
    assert set(map(id, shard.optimizer.state)) == states


def test_frozen_parameters_keep_their_state_and_are_nobodys() -> None:
    parts = model()
    optimizer = optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    for parameter in parts.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    parts[1].requires_grad_(False)
    shard = ServerShard(optimizer)
    assert len(shard.parameters) == 4
    shard.install(shard.pieces, shard.fragments())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    with shard.whole([]):
        now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()


@pytest.mark.parametrize(
    ("optimizer", "servers", "why"),
    [
        (lambda ps: optim.SparseAdam(ps), 1, "SparseAdam"),
        (lambda ps: optim.LBFGS(ps), 1, "LBFGS"),
        (lambda ps: hooked(optim.SGD(ps)), 2, "hooks"),
        (lambda ps: hooked(optim.SGD(ps)), 1, None),
        (lambda ps: optim.SGD(ps), 3, None),
    ],
)
def test_optimizers_that_need_more_than_a_server_has_are_refused(
    optimizer: Any, servers: int, why: str | None
) -> None:
    made = optimizer(list(model().parameters()))
    if why is None:
        check(made, servers)
    else:
        with pytest.raises(ConfigError, match=f"optimizer: .*{why}.*; accepted: one that treats each"):
            check(made, servers)


def hooked(optimizer: optim.Optimizer) -> optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer
