"""Times of layers: measured without a trace in the model, put together as medians."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from capturerules import CaptureRules, torch
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer
from hpcsched.worker.layers import measure as measuring
from hpcsched.worker.layers.conditions import conditions, sm_clock_mhz
from hpcsched.worker.layers.graph import trace
from hpcsched.worker.layers.measure import MeasuredLayers, describe, measure
from hpcsched.worker.layers.times import LayerTimes

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


# On a GPU that is none


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CaptureRules:
    return CaptureRules(monkeypatch)


def with_cache(patch: pytest.MonkeyPatch, **properties: int) -> None:
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


def first(model: nn.Module, samples: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """A model's first layer, and what it is given."""
    inputs = (torch.ones(samples, 3, requires_grad=True),)
    layer, given, _ = next(measuring._walk(trace(model, inputs), inputs))
    return layer, given


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize(("took_s", "times"), [(0.0, 20), (1e-5, 20), (2e-4, 5), (0.0007, 1), (0.5, 1)])
def test_short_passes_are_replayed_so_often_in_a_row_that_starting_them_does_not_count(
    cuda: CaptureRules, monkeypatch: pytest.MonkeyPatch, took_s: float, times: int, copies: int
) -> None:
    """Captured is nothing, and a replay takes as long as is said here: that of all copies."""
    asked: list[int] = []

    def replay(graph: object, count: int) -> float:
        asked.append(count)
        return took_s

    monkeypatch.setattr(measuring, "_replay", replay)
    layer, given = first(nn.Sequential(nn.Linear(3, 2)))
    found = measuring._captured(layer, [given] * copies, cuda.stream())
    assert found is not None
    assert [next(found) for _ in range(3)] == [(took_s / copies, took_s / copies)] * 3
    assert asked == [1, 1, *[times] * 4], "forward and backward, first once"


@pytest.mark.parametrize(("cache", "number"), [(0, 1), (23, 1), (24, 2), (25, 2), (100, 5), (10**9, 16)])
def test_a_layer_gets_so_many_inputs_in_turn_that_the_cache_does_not_hold_them(
    monkeypatch: pytest.MonkeyPatch, cache: int, number: int
) -> None:
    with_cache(monkeypatch, L2_cache_size=cache)
    given = (torch.ones(2, 3, requires_grad=True),)  # 24 bytes
    copies = measuring._copies(given)
    assert len(copies) == number
    assert len({copy[0].data_ptr() for copy in copies}) == number
    assert all(torch.equal(copy[0], given[0]) and copy[0].requires_grad for copy in copies)
    assert number == 16 or number * 24 > cache


def test_all_copies_are_in_one_graph_forward_and_one_backward(
    cuda: CaptureRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cache(monkeypatch)  # of a torch that does not know the cache
    seen: list[int] = []
    layer, given = first(nn.Sequential(nn.Linear(3, 2)))
    layer.module.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    found = measuring._in_graphs(layer, given, cuda.stream())
    assert found is not None
    assert len(seen) == measuring.WARMUP + measuring.MOST_COPIES
    assert len(set(seen)) == measuring.MOST_COPIES
    assert list(cuda.pools.values()) == [2], "forward and backward"


def test_a_captured_backward_pass_leaves_what_it_reads() -> None:
    """Memory that it gave back would be written to by later operations, and read by the next replay."""
    layer, given = first(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    run = measuring._backward(layer, given, layer.module(*given), keep=True)
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


class Waiting(nn.Linear):
    """Cannot be captured. In a module of torch's, as others are looked into."""

    __module__ = "torch.nn.waiting"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return super().forward(x)


def test_a_layer_that_cannot_be_captured_leaves_those_after_it_as_they_were(
    cuda: CaptureRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cache(monkeypatch, L2_cache_size=30)
    cuda.draw()
    layer, given = first(nn.Sequential(Waiting(3, 2)))
    assert measuring._in_graphs(layer, given, cuda.stream()) is None
    assert cuda.draw() == 8
    assert (cuda.here, cuda.held) == (cuda.main, 0)
    cuda.empty_cache()
    cuda.allocate()
    layer, given = first(nn.Sequential(nn.Linear(3, 2), nn.Dropout()))
    assert measuring._in_graphs(layer, given, cuda.stream()) is not None


def test_a_layer_for_whose_copies_there_is_no_memory_is_measured_with_one(
    cuda: CaptureRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cache(monkeypatch, L2_cache_size=30)
    layer, given = first(nn.Sequential(nn.Linear(3, 2)))
    captured: list[int] = []

    def pre(module: nn.Module, args: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            captured.append(args[0].data_ptr())
            if captured[0] != captured[-1]:
                raise torch.OutOfMemoryError("CUDA out of memory")

    layer.module.register_forward_pre_hook(pre)
    assert measuring._in_graphs(layer, given, cuda.stream()) is not None
    assert len(captured) == 3
    cuda.empty_cache()


def test_what_gets_no_gradient_takes_no_time_backward(cuda: CaptureRules) -> None:
    layer, given = first(nn.Sequential(nn.Linear(3, 2).requires_grad_(False)))
    given = (given[0].detach(),)
    found = measuring._captured(layer, [given], cuda.stream())
    assert found is not None
    assert list(cuda.pools.values()) == [1]
    assert measuring._replay(None, 5) == 0.0


# What times depend on


def test_the_conditions_of_a_measurement_are_those_of_this_torch_and_this_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert conditions(torch.device("cpu")) == {
        "torch": str(torch.__version__),
        "float32_matmul_precision": "highest",
        "threads": torch.get_num_threads(),
    }
    with_cache(monkeypatch, L2_cache_size=50, clock_rate=1_980_000, name="G")
    found = conditions(torch.device("cuda", 0))
    assert (found["gpu"], found["l2_bytes"], found["max_sm_clock_mhz"]) == ("G", 50, 1980)
    assert (found["matmul_allow_tf32"], found["cudnn_allow_tf32"], found["cudnn_benchmark"]) == (
        False,
        True,
        False,
    )
    with_cache(monkeypatch, name="G")
    assert "max_sm_clock_mhz" not in conditions(torch.device("cuda", 0)), "a torch that does not tell"


def test_a_clock_that_is_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_nvml(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    assert sm_clock_mhz(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "clock_rate", without_nvml)
    assert sm_clock_mhz(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1410)
    assert sm_clock_mhz(torch.device("cuda", 0)) == 1410


def test_a_profile_has_its_conditions() -> None:
    times = LayerTimes([layer(0)], model="m", device="d", input_bytes=7)
    times.add(0, 4, 1.0, 2.0)
    found = times.profile("note", {"torch": "2.11", "cudnn_benchmark": False})
    assert found.to_table()["conditions"] == {"torch": "2.11", "cudnn_benchmark": False}
    assert LayerProfile.parse(found.to_table(), where="here") == found
    assert "conditions" not in times.profile().to_table()
