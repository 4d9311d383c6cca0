"""Shared memory and a real GPU, whose rules are those of the stand-in in `test_pinning.py`."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from places import ROOT

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

from hpcsched.devices import open_devices  # noqa: E402
from hpcsched.worker.checkpoint import pinning  # noqa: E402
from hpcsched.worker.checkpoint.pinning import Cuda  # noqa: E402
from hpcsched.worker.checkpoint.shared_memory import Arena  # noqa: E402
from hpcsched.worker.session.state import TrainingState  # noqa: E402

_DEADLINE_S = 120.0


class FewPins(Cuda):
    """So many registrations succeed; what comes after is none that CUDA accepts."""

    def __init__(self, succeed: int) -> None:
        self.left = succeed

    def host_register(self, address: int, size: int) -> int:
        self.left -= 1
        return super().host_register(address, size) if self.left >= 0 else super().host_register(0, 0)


@contextlib.contextmanager
def opened(cuda: Cuda | None = None) -> Iterator[Arena]:
    descriptor = os.memfd_create("arena")
    arena = Arena.open(descriptor, cuda)
    assert arena is not None
    yield arena
    arena.close()
    os.close(descriptor)


def in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    assert not thread.is_alive()


def training(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 1000)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"scheduler": None, "also": None, "total_steps": 9, "seed": 0}
    return TrainingState(model=model, optimizer=optimizer, dataset_size=8, global_batch=4, **options)


def train(one: TrainingState, steps: int) -> None:
    x = torch.linspace(-1, 1, 4 * 64, device="cuda").reshape(4, 64)
    for _ in range(steps):
        one.optimizer.zero_grad()
        one.model(x).square().mean().backward()
        one.optimizer.step()


def test_the_runtime_of_torch_is_reached() -> None:
    torch.zeros(1, device="cuda")
    cuda = Cuda()
    assert cuda.can_pin()
    assert cuda.get_last_error() == 0
    former = cuda.exchange_capture_mode(2)
    assert cuda.exchange_capture_mode(former) == 2


def test_an_error_stays_for_the_next_kernel_of_its_thread_until_it_is_taken_away() -> None:
    cuda = Cuda()
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    address = (memory.data_ptr() + 4095) // 4096 * 4096
    assert cuda.host_register(address, 1 << 16) == 0
    try:
        assert cuda.host_register(address, 1 << 16) != 0
        with pytest.raises(RuntimeError):
            torch.zeros(8, device="cuda").fill_(1.0)
        assert cuda.host_register(address, 1 << 16) != 0
        assert cuda.get_last_error() != 0
        torch.zeros(8, device="cuda").fill_(1.0)
        in_a_thread(lambda: cuda.host_register(address, 1 << 16))
        torch.zeros(8, device="cuda").fill_(1.0)
    finally:
        assert cuda.host_unregister(address) == 0


@pytest.mark.parametrize("succeed", [0, 1, 10**9])
def test_a_training_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, succeed: int) -> None:
    """Pinned wholly, in part (then the registrations fail), and not at all."""
    monkeypatch.setattr(pinning, "PINNED_AT_ONCE", 1 << 22)
    trained = training(1)
    train(trained, 3)
    with opened(FewPins(succeed)) as arena:
        saved = {**trained.state_dict([]), "rng": []}
        assert arena.reserve(saved)
        train(trained, 1)  # no error was left
        saved = {**trained.state_dict([]), "rng": []}
        arena.save(saved)
        before = copy.deepcopy(trained.model.state_dict())
        other = training(2)
        other.load_state_dict(arena.load(into=other.tensors()), "shared memory")
        for name, tensor in before.items():
            assert torch.equal(other.model.state_dict()[name], tensor), name
        for values in other.optimizer.state.values():
            assert {name: tensor.device.type for name, tensor in values.items()} == {
                "step": "cpu",
                "exp_avg": "cuda",
                "exp_avg_sq": "cuda",
            }
        train(trained, 3)
        train(other, 3)
        for one, same in zip(trained.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, same)


def test_pinning_does_not_spoil_a_graph_that_is_captured_meanwhile() -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    state = {"step": 1, "samples": 1, "model": torch.ones(1 << 22, device="cuda")}
    with opened() as arena:
        arena.save(state)
        with torch.cuda.graph(graph):
            in_a_thread(lambda: arena._pin(x.device, 1))
            y = x * 2
        assert arena._pins._pinned
        graph.replay()
        assert y.sum() == 16


def test_a_step_on_another_stream_is_saved_too() -> None:
    weight = torch.zeros(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    with opened() as arena:
        state = {"step": 1, "samples": 1, "model": weight}
        assert arena.reserve(state)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(500):
                weight += 1
        arena.save(state)
        with arena.keeping() as found:
            assert found["model"].unique().tolist() == [500.0]


SAVES = """
import os, sys, torch
from hpcsched.worker.checkpoint.shared_memory import Arena
state = {"step": 1, "samples": 1, "model": torch.ones(1 << 28, device="cuda")}
arena = Arena.open(int(sys.argv[1]))
assert arena.reserve(state)
arena.save(state)
sys.stdout.write("saved"); sys.stdout.flush()
os._exit(0)
"""


def test_a_gpus_memory_is_back_when_its_process_has_ended() -> None:
    devices = open_devices("cuda", "here")
    try:

        def used() -> float:
            memory = devices.sample()[0].memory_mib
            assert memory is not None
            return memory

        before, descriptor = used(), os.memfd_create("arena")
        done = subprocess.run(
            [sys.executable, "-c", SAVES, str(descriptor)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        ended = time.monotonic()
        assert done.stdout == "saved", done.stderr
        while used() > before + 1:
            assert time.monotonic() < ended + 10
            time.sleep(0.01)
        arena = Arena.open(descriptor)
        assert arena is not None
        with arena.keeping() as state:  # without a GPU
            assert state["model"].sum(dtype=torch.float64) == 1 << 28
        del state
        arena.close()
        os.close(descriptor)
    finally:
        devices.close()
