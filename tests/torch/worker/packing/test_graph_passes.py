"""What is left out of a stacked forward pass changes no number, and there is less of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from budget import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packed_trainings import (
    Residual,
    Words,
    cnn,
    go,
    mlp,
    normed,
    one_thread,
    packed,
    tensors,
    torch,
    training,
)
from torch import nn

from hpcsched.worker.packing import stacking
from hpcsched.worker.packing.graph_passes import simplify

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]

aten = torch.ops.aten


class Traced:
    """What a stack of three models gives for a batch, with its forward pass as traced or made lean."""

    def __init__(
        self, net: Callable[[], nn.Module], *, lean: bool, own: bool = False, channels: int = 1
    ) -> None:
        self.graph: Any = None

        def keep(module: Any) -> Any:
            self.graph = simplify(module) if lean else module
            return self.graph

        data = (lambda: tensors()) if channels == 1 else (lambda: images(channels))
        builds = [
            training(seed, net=net, data=data, optimizer="sgd", order=seed if own else 0) for seed in range(3)
        ]
        together, made = packed(*builds, mode="loop")
        go(together, 3)
        batches = together.groups[0].batches()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacking, "simplify", keep)
            patch.setattr(stacking, "check", lambda *_: None)  # some networks enlarge rounding errors
            stack = stacking.Stack(made, batches, {})
        self.totals = stack._compute(batches)
        self.gradients = [gradient.clone() for gradient in stack._gradients]
        self.rest = [tensor.clone() for tensor in stack._rest]

    @property
    def operations(self) -> Counter[Any]:
        return Counter(node.target for node in self.graph.graph.nodes if node.op == "call_function")

    @property
    def copied(self) -> int:
        """Numbers that are copied to lie in another order."""
        clones = self.graph.graph.find_nodes(op="call_function", target=aten.clone.default)
        return sum(node.meta["val"].numel() for node in clones)


def images(channels: int) -> Any:
    y = tensors()[1]
    return torch.randn(len(y), channels, 8, 8, generator=torch.Generator().manual_seed(0)), y


def both(net: Callable[[], nn.Module], **options: Any) -> tuple[Traced, Traced]:
    """As traced, and lean: of equal numbers."""
    plain, lean = Traced(net, lean=False, **options), Traced(net, lean=True, **options)
    torch.testing.assert_close(lean.totals, plain.totals, rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in plain.gradients)
    for one, other in zip(lean.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * largest)
    for one, other in zip(lean.rest, plain.rest, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert sum(lean.operations.values()) <= sum(plain.operations.values())
    return plain, lean


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("net", [mlp, normed, cnn, Residual, Words])
def test_networks_give_the_same_numbers(net: Any, own: bool) -> None:
    both(net, own=own)


def test_a_product_with_a_bias_is_one_operation() -> None:
    plain, lean = both(lambda: nn.Linear(16, 4))
    assert (plain.operations[aten.bmm.default], plain.operations[aten.add.Tensor]) == (1, 1)
    assert (lean.operations[aten.baddbmm.default], lean.operations[aten.add.Tensor]) == (1, 0)


def images_of(*layers: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        body = copy.deepcopy(nn.Sequential(*layers))
        for module in body.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        features = body(torch.zeros(2, 2, 8, 8)).flatten(1).shape[1]
        for module in body.modules():
            if hasattr(module, "reset_running_stats"):
                module.reset_running_stats()
        return nn.Sequential(body, nn.Flatten(), nn.Linear(features, 4))

    return build


def test_a_convolution_adds_its_bias_itself() -> None:
    plain, lean = both(images_of(nn.Conv2d(2, 4, 3)), channels=2)
    assert (
        plain.operations[aten.add.Tensor] - lean.operations[aten.add.Tensor] == 2
    )  # that of the product, too


def test_batch_norm_multiplies_and_adds_by_itself() -> None:
    net = images_of(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    plain, lean = both(net, channels=2)
    assert plain.operations[aten.mul.Tensor] - lean.operations[aten.mul.Tensor] == 1
    assert lean.operations[aten.relu_.default] == 0


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)])
def test_pools_copy_no_images(pool: nn.Module) -> None:
    net = images_of(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), pool, nn.Conv2d(4, 6, 1, bias=False))
    plain, lean = both(net, channels=2)
    assert lean.copied < plain.copied


def test_where_the_largest_were_is_still_told_to_those_who_ask() -> None:
    class Where(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.last = (
                nn.Conv2d(2, 4, 3),
                nn.MaxPool2d(2, return_indices=True),
                nn.Linear(36, 4),
            )

        def forward(self, x: torch.Tensor) -> Any:
            values, where = self.pool(self.conv(x))
            return self.last((values + where / 100).flatten(1))

    both(Where, channels=2)


def test_what_is_written_in_place_is_seen_by_those_who_come_later_only() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            h = self.conv(x)
            before = h.mean((2, 3))
            h += 1
            h[:, 1:3].mul_(2)
            torch.relu_(h)
            self.seen.add_(h.detach().mean((0, 2, 3)))
            return self.last(h.mean((2, 3)) - before + self.seen)

    both(InPlace, channels=2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(2, 2, 3, padding=1),
    "strided": lambda: nn.Conv2d(2, 2, 3, padding=1, stride=2, bias=False),
    "apart": lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2),
    "turned": lambda: nn.ConvTranspose2d(2, 2, 3, padding=1),
    "norm": lambda: nn.BatchNorm2d(2),
    "plain norm": lambda: nn.BatchNorm2d(2, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(2, track_running_stats=False),
    "layer norm": lambda: nn.GroupNorm(1, 2),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": lambda: nn.GELU(),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "tanh": lambda: nn.Tanh(),
    "max": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "average": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(4),
    "reshaped": lambda: nn.Sequential(nn.Flatten(1, 2), nn.Unflatten(1, (2, -1))),
    "transposed": lambda: Turned(),
}


class Turned(nn.Module):
    """Height for width, and what is like that."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.transpose(2, 3).contiguous()


class Beside(nn.Module):
    """Layers beside a shortcut, where the shapes allow for one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layers(x.clone())
        return x + y if x.shape == y.shape else y


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(
    st.lists(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_random_networks_give_the_same_numbers(blocks: list[list[str]], own: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = images_of(*(Beside(*(LAYERS[name]() for name in names)) for names in blocks))
    try:
        net()(torch.randn(3, 2, 8, 8)).sum().backward()
    except RuntimeError:  # what is written in place may be needed for the gradient
        assume(False)
    both(net, own=own, channels=2)
