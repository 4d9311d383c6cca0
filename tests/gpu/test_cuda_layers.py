"""Layers on a GPU: captured as CUDA graphs, timed by events, with the same numbers as the model's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

from hpcsched.examples.models import make  # noqa: E402
from hpcsched.planning.burst.graph import LayerProfile  # noqa: E402
from hpcsched.worker.layers import measure as measuring  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402
from hpcsched.worker.layers.measure import MeasuredLayers, measure  # noqa: E402

SMALL: dict[str, dict[str, Any]] = {
    "vgg16": {"width": 0.25, "image": 64},
    "inception-v3": {"width": 0.25, "image": 96},
    "resnet50": {"width": 0.25, "image": 64},
    "transformer": {"width": 0.25, "blocks": 2, "length": 32},
}


def timed(name: str, batches: list[int]) -> tuple[Any, MeasuredLayers]:
    network, example = make(name, {**SMALL[name], "classes": 10})
    network.cuda().train()
    inputs = lambda n: tuple(t.cuda() for t in example(n))  # noqa: E731
    *_, found = measure(trace(network, inputs(2)), inputs, batches, model=name, device="gpu", seconds=0.005)
    return network, found


class Waiting(torch.nn.Linear):  # type: ignore[misc]
    """Waits for the GPU. In a module of torch's, as others are looked into."""

    __module__ = "torch.nn.waiting"

    def forward(self, x: Any) -> Any:
        torch.cuda.synchronize()
        return super().forward(x)


def test_a_layer_that_cannot_be_captured_leaves_those_after_it_as_they_were() -> None:
    """First in this file: what it left behind would be in the way of the others."""
    network = torch.nn.Sequential(
        Waiting(64, 64), torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 8)
    ).cuda()
    inputs = lambda n: (torch.ones(n, 64, device="cuda"),)  # noqa: E731
    state, here = torch.cuda.get_rng_state(), torch.cuda.current_stream()
    expected = torch.rand(8, device="cuda")
    layers = trace(network, inputs(2))
    *_, found = measure(layers, inputs, [2, 8], model="m", device="gpu", seconds=0.0)
    assert (found.eager, found.left_out) == (2, {})
    assert torch.cuda.current_stream() == here
    torch.cuda.empty_cache()
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="cuda"), expected)


def test_inputs_in_turn_come_from_memory_and_not_from_the_cache() -> None:
    properties = torch.cuda.get_device_properties(0)
    given = (torch.ones(properties.L2_cache_size // 12, device="cuda", requires_grad=True),)  # a third
    layer: Any = SimpleNamespace(module=torch.nn.ReLU().cuda())
    took = []
    for copies in (measuring._copies(given)[:1], measuring._copies(given)):
        passes = measuring._captured(layer, copies, torch.cuda.Stream())
        assert passes is not None
        took.append(min(next(passes)[0] for _ in range(20)))
    assert took[1] > took[0]


@pytest.mark.parametrize("name", SMALL)
def test_all_layers_of_the_networks_are_captured_and_take_time(name: str) -> None:
    network, found = timed(name, [2, 8])
    assert found.eager == 0
    assert found.left_out == {}
    assert found.peak_mib is not None
    assert found.peak_mib > 1
    assert found.times is not None
    for layer in found.times.profile().layers:
        assert all(us > 0.5 for us in layer.forward_us.values()), layer.name
        assert all(us > 0.5 for us in layer.backward_us.values()), layer.name
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(bool(torch.isfinite(value).all()) for value in network.state_dict().values())


def test_the_layers_together_are_the_model() -> None:
    network, example = make("resnet50", {**SMALL["resnet50"], "classes": 10})
    network.cuda().double().eval()
    inputs = tuple(t.cuda().double() for t in example(4))
    layers = trace(network, inputs)
    assert torch.allclose(layers.run(*inputs), network(*inputs), rtol=0, atol=1e-12)


def test_a_batch_that_does_not_fit_is_left_out_and_the_others_stay() -> None:
    free, _ = torch.cuda.mem_get_info()
    network = torch.nn.Sequential(torch.nn.Linear(2**16, 8), torch.nn.Linear(8, 2**16)).cuda()
    too_many = 2 * free // 2**18
    inputs = lambda n: (torch.ones(n, 2**16, device="cuda"),)  # noqa: E731
    layers = trace(network, inputs(2))
    *_, found = measure(layers, inputs, [4, too_many], model="m", device="gpu", seconds=0.0)
    assert found.times is not None
    assert found.times.batches == (4,)
    assert found.left_out == {too_many: "out of memory"}


def test_profile_layers_runs_on_a_gpu(tmp_path: Path) -> None:
    env = {**os.environ, "HPCSCHED_DATABASE": str(tmp_path / "h.db")}
    words = ["vgg16", "--args", "width=0.25,image=64", "--batches", "1,8", "--devices", "cuda", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched", "profile", "layers", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    profile = LayerProfile.parse(json.loads(done.stdout), where="stdout")
    assert "as CUDA graphs" in profile.note
    assert len(profile.layers) == 16
    told = profile.conditions
    assert {"torch", "cuda", "gpu", "cudnn_allow_tf32", "matmul_allow_tf32", "cudnn_benchmark"} <= told.keys()
    assert int(told["l2_bytes"]) > 1 << 20
    assert 0 < int(told.get("sm_clock_mhz", 1)) <= 1.1 * int(told["max_sm_clock_mhz"])
