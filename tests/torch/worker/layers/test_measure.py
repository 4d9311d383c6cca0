"""Times of layers: measured without a trace in the model, put together as medians."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer  # noqa: E402
from hpcsched.worker.layers import measure as measuring  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402
from hpcsched.worker.layers.measure import MeasuredLayers, describe, measure  # noqa: E402
from hpcsched.worker.layers.times import LayerTimes  # noqa: E402

pytestmark = pytest.mark.torch


def network() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(first, nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 2))


def images(samples: int) -> tuple[Any, ...]:
    return (torch.rand(samples, 3, 6, 6),)


def last(model: nn.Module, batches: list[int], inputs: Any = images, **how: Any) -> MeasuredLayers:
    *_, found = measure(trace(model, images(2)), inputs, batches, model="m", device="cpu", seconds=0.0, **how)
    return found


def test_every_layer_is_timed_at_every_batch_in_order() -> None:
    seen: list[tuple[int, int]] = []
    found = last(network(), [4, 1, 4, 2], watch=lambda batch, layer: seen.append((batch, layer.id)))
    assert seen == [(batch, layer) for batch in (1, 2, 4) for layer in range(3)]
    assert found.times is not None
    profile = found.times.profile("how")
    assert LayerProfile.parse(profile.to_table(), where="here") == profile
    assert (profile.model, profile.device, profile.note, profile.input_bytes) == (
        "m",
        "cpu",
        "how",
        3 * 36 * 4,
    )
    for layer in profile.layers:
        assert list(layer.forward_us) == list(layer.backward_us) == [1, 2, 4]
        assert all(us > 0 for us in (*layer.forward_us.values(), *layer.backward_us.values()))


def test_what_is_measured_leaves_no_trace_in_the_model() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    last(model, [3])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bytes_are_those_of_one_sample_and_of_trained_parameters_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.middle = nn.Embedding(9, 4), nn.Linear(4, 4)
            self.middle.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.middle(self.words(x)).mean(1) @ self.words.weight.t()

    inputs = (torch.randint(9, (2, 3)),)
    layers, input_bytes = describe(trace(Tied(), inputs), inputs)
    assert input_bytes == 3 * 8
    assert [(one.name, one.parameter_bytes, one.activation_bytes) for one in layers] == [
        ("words", 9 * 4 * 4, 3 * 4 * 4),
        ("middle", 4 * 4 * 4, 4 * 4),
        ("matmul", 0, 9 * 4),
    ]


def test_gradients_go_only_to_inputs_that_have_some_in_the_model() -> None:
    seen: dict[str, bool] = {}

    class Spy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[str(self.in_features)] = x.requires_grad
            return super().forward(x)

    # torch.fx looks into modules that are not torch's own: the spies have to be leaves.
    Spy.__module__ = "torch.nn.spies"
    model = nn.Sequential(Spy(2, 3), Spy(3, 4), Spy(4, 1))
    model[0].requires_grad_(False)
    found = list(
        measure(
            trace(model, (torch.rand(2, 2),)), lambda n: (torch.rand(n, 2),), [2], model="m", device="cpu"
        )
    )
    assert seen == {"2": False, "3": False, "4": True}
    assert found[-1].times is not None
    assert (
        found[-1].times.profile().layers[0].backward_us[2]
        < found[-1].times.profile().layers[2].backward_us[2]
    )


def test_a_batch_that_does_not_fit_is_left_out_with_all_larger_ones() -> None:
    tried: list[int] = []

    def inputs(samples: int) -> tuple[Any, ...]:
        tried.append(samples)
        if samples >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
        return images(samples)

    found = last(network(), [1, 2, 4, 8], inputs)
    assert found.times is not None
    assert found.times.batches == (1, 2)
    assert found.left_out == {4: "out of memory", 8: "a smaller batch did not fit"}
    assert tried == [1, 2, 4]


def test_a_batch_that_cannot_be_trained_is_left_out_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rows = lambda n: (torch.rand(n, 4),)  # noqa: E731
    *_, found = measure(trace(model, rows(2)), rows, [1, 2], model="m", device="cpu", seconds=0.0)
    assert found.times is not None
    assert found.times.batches == (2,)
    assert "Expected more than 1 value per channel" in found.left_out[1]


def test_no_batch_at_all_is_an_error_that_says_why() -> None:
    def inputs(samples: int) -> tuple[Any, ...]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(ConfigError, match="model m: batches: 1: CUDA error: unspecified launch failure; 2: "):
        last(network(), [1, 2], inputs)


# Times alone


def layer(number: int) -> ProfiledLayer:
    sizes = {"parameter_bytes": 1, "activation_bytes": 1}
    return ProfiledLayer(id=number, name=f"l{number}", prev=(), forward_us={}, backward_us={}, **sizes)


def test_a_profile_has_the_medians_of_the_batches_that_all_layers_have() -> None:
    times = LayerTimes([layer(0), layer(1)], model="m", device="d", input_bytes=7)
    for forward, backward in ((1.0, 30.0), (9.0, 10.0), (2.0, 20.0)):
        times.add(0, 4, forward, backward)
        times.add(1, 4, 2 * forward, 2 * backward)
        times.add(0, 8, forward, backward)
        times.add(1, 2, forward, backward)
    assert times.batches == (4,)
    profile = times.profile()
    assert [one.forward_us for one in profile.layers] == [{4: 2.0}, {4: 4.0}]
    assert [one.backward_us for one in profile.layers] == [{4: 20.0}, {4: 40.0}]
    assert profile.input_bytes == 7
    times.drop(4)
    with pytest.raises(ValueError, match="no batch"):
        times.profile()


@pytest.mark.parametrize(("took_s", "times"), [(0.0, 20), (1e-5, 20), (2e-4, 5), (0.0007, 1), (0.5, 1)])
def test_short_passes_are_replayed_so_often_in_a_row_that_starting_them_does_not_count(
    monkeypatch: pytest.MonkeyPatch, took_s: float, times: int
) -> None:
    """On a GPU that is none: captured is nothing, and a replay takes as long as is said here."""
    asked: list[int] = []

    def replay(graph: object, count: int) -> float:
        asked.append(count)
        return took_s

    for name in ("CUDAGraph", "Stream", "current_stream", "stream", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(measuring, "_replay", replay)
    layer, given, _ = next(
        measuring._walk(trace(nn.Sequential(nn.Linear(3, 2)), (torch.ones(2, 3),)), (torch.ones(2, 3),))
    )
    found = measuring._captured(layer, given)
    assert found is not None
    assert [next(found) for _ in range(3)] == [(took_s, took_s)] * 3
    assert asked == [1, 1, *[times] * 4], "forward and backward, first once"
