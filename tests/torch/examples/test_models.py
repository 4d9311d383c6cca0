"""The built-in networks are those of their papers, can be made small, and become layers that run apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from budget import slow

torch = pytest.importorskip("torch")

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.examples.models import MODELS, Network, make  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402
from hpcsched.worker.session.trainer import build  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny operations: threads that wait for each other cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL: dict[str, dict[str, Any]] = {
    "vgg16": {"width": 0.0625, "image": 32},
    "wrn101-2": {"width": 0.0625, "image": 32},
    "inception-v3": {"width": 0.0625, "image": 75},
    "resnet50": {"width": 0.0625, "image": 32},
    "mobilenet-v2": {"width": 0.125, "image": 32},
    "densenet121": {"width": 0.125, "image": 32},
    "transformer": {"width": 0.0625, "blocks": 2, "length": 8, "vocabulary": 50, "causal": True},
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg16", 138_357_544),
        ("wrn101-2", 126_886_696),
        ("inception-v3", 23_834_568),
        ("resnet50", 25_557_032),
        ("mobilenet-v2", 3_504_872),
        ("densenet121", 7_978_856),
    ],
)
def test_the_networks_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    with torch.device("meta"):
        network = MODELS[name]()
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_the_transformers_blocks_have_twelve_hidden_sizes_squared_each() -> None:
    with torch.device("meta"):
        network = MODELS["transformer"]()
    weights = [p for p in network.blocks.parameters() if p.dim() > 1]
    assert sum(p.numel() for p in weights) == 12 * 12 * 768**2


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("vgg16", 16, 16),  # 13 convolutions and 3 linear layers
        slow("wrn101-2", 138, 138),  # 104 convolutions, 33 additions, 1 linear layer
        slow("inception-v3", 108, 108),  # 94 convolutions, 11 joins, 2 poolings of their own, 1 linear layer
        ("resnet50", 70, 70),  # 53 convolutions, 16 additions, 1 linear layer
        ("transformer", 14, 14),  # embedding, 2 blocks of 6, head
        slow("mobilenet-v2", 64, 64),  # 52 convolutions, 10 additions, dropout, 1 linear layer
        slow("densenet121", 179, 179),  # 120 convolutions, 58 joins, 1 linear layer
    ],
)
def test_layers_are_as_coarse_as_they_can_be_and_give_the_networks_own_numbers(
    name: str, least: int, most: int
) -> None:
    torch.manual_seed(5)
    network, example = make(name, {**SMALL[name], "classes": 6})
    network.double()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in example(3))
    layers = trace(network, tuple(t[:2] for t in inputs))
    assert least <= len(layers.layers) <= most
    assert len({layer.name for layer in layers.layers}) == len(layers.layers)
    for training in (True, False):
        twin = copy.deepcopy(network).train(training)
        network.train(training)
        network.zero_grad()
        torch.manual_seed(7)
        expected = twin(*inputs)
        torch.manual_seed(7)
        found = layers.run(*inputs)
        assert expected.shape == (3, 6)
        assert torch.equal(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        pairs = list(zip(network.parameters(), twin.parameters(), strict=True))
        assert all(torch.equal(mine.grad, other.grad) for mine, other in pairs)
        assert all(torch.equal(a, b) for a, b in zip(network.buffers(), twin.buffers(), strict=True))


def test_a_causal_transformer_does_not_look_ahead_and_the_other_one_does() -> None:
    for causal in (True, False):
        network, example = make("transformer", {**SMALL["transformer"], "causal": causal})
        (tokens,) = example(1)
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 50
        with torch.no_grad():
            first, second = (network.eval().blocks(network.tokens(t)) for t in (tokens, changed))
        assert torch.equal(first[:, :-1], second[:, :-1]) == causal


def test_a_network_can_be_trained_as_a_job() -> None:
    parts = build(Network(), {"network": "vgg16", "batch": 4, "classes": 3, **SMALL["vgg16"]})
    batch = parts.batch(range(4))
    before = [p.detach().clone() for p in parts.model.parameters()]
    losses = parts.loss(parts.model, batch)
    assert losses.shape == (4,)
    losses.mean().backward()
    parts.optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, parts.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "model: 'None'; accepted: vgg16"),
        ({"network": "alexnet"}, "'alexnet'; accepted: vgg16, wrn101-2"),
        ({"network": "vgg16", "depth": 3}, "vgg16: depth: unknown argument; accepted: width, classes"),
        ({"network": "vgg16", "width": "half"}, "vgg16: width: 'half'; accepted: a number of at least 0"),
        ({"network": "vgg16", "classes": 2.5}, "vgg16: classes: 2.5; accepted: a whole number"),
        ({"network": "vgg16", "image": 100}, "vgg16: images of 100 pixels cannot be halved five times"),
        ({"network": "inception-v3", "image": 60}, "at least 75 are needed"),
        ({"network": "transformer", "heads": 0}, "transformer: 0 heads cannot share"),
        ({"network": "transformer", "causal": 1}, "transformer: causal: 1; accepted: true or false"),
        ({"network": "vgg16", "batch": -1}, "Network: batch: -1; accepted: a whole number"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(Network(), args)
    assert text in str(refused.value)
