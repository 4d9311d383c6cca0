"""Lanes on a real GPU: graphs in chunks, a guest beside a foreground, green contexts, and the benchmark."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

from lanesparty import Party, code_of, models_same  # noqa: E402
from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.background.pacing import Pacer  # noqa: E402
from hpcsched.planning.background.referee import Referee  # noqa: E402
from hpcsched.worker.background.chunks import Chunked  # noqa: E402
from hpcsched.worker.background.lane import StreamLane  # noqa: E402
from hpcsched.worker.background.streams import green_stream  # noqa: E402

ROOT = Path(__file__).parents[2]
GPU = {"CUDA_VISIBLE_DEVICES": "0", "HPCSCHED_LANE_MODE": "auto"}


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    found = Party(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.join()


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip


class Waiting(nn.Linear):  # type: ignore[misc]
    """Waits for the GPU. In a module of torch's, as others are looked into."""

    __module__ = "torch.nn.waiting"

    def forward(self, x: Any) -> Any:
        torch.cuda.synchronize()
        return super().forward(x)


def test_a_guest_that_cannot_be_captured_leaves_the_process_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """First in this file: generators and memory are those of the foreground, too."""
    device = torch.device("cuda", 0)
    guest = nn.Sequential(nn.Linear(8, 8), Waiting(8, 8), nn.Linear(8, 4)).to(device)
    lane = StreamLane(Referee(Pacer(2)), stream=torch.cuda.Stream(device))
    torch.cuda.manual_seed(5)
    expected = torch.rand(16, device=device)
    torch.cuda.manual_seed(5)
    here = torch.cuda.current_stream()
    with lane.work():
        chunked = Chunked(guest, (torch.randn(4, 8).to(device),), lane, most=3, graphs=True)
        assert chunked._graphs is None
        chunked(torch.ones(4, 8, device=device)).sum().backward()
    assert "launched without CUDA graphs" in capsys.readouterr().err
    assert torch.cuda.current_stream() == here
    assert torch.equal(torch.rand(16, device=device), expected)
    torch.cuda.empty_cache()


def test_graphs_in_chunks_train_as_operators_one_by_one_do() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    plain = convolutions().to(device)
    other = copy.deepcopy(plain)
    x, y = torch.randn(8, 3, 8, 8, device=device), torch.arange(8, device=device)
    lane = StreamLane(Referee(Pacer(2)), stream=torch.cuda.Stream(device))

    def train(model: Any, call: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(2):  # gradients add up
                loss: Any = nn.functional.cross_entropy(call(x), y)
                loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    with lane.work():
        chunked = Chunked(other, (x,), lane, most=3, graphs=True)
        assert chunked._graphs is not None
        in_graphs = train(other, chunked)
    assert in_graphs == pytest.approx(train(plain, plain), rel=1e-4)
    torch.testing.assert_close(plain[1].running_mean, other[1].running_mean, rtol=1e-4, atol=1e-5)
    short = chunked(x[:4])  # another batch size: no graph fits, and none is used
    assert short.shape == (4, 10)
    torch.cuda.synchronize()
    with lane.lock:
        lane.look()
    assert lane.referee.pacer.outstanding == 0


def test_a_guest_on_the_gpu_changes_no_bit_of_the_foreground(party: Party) -> None:
    ready = str(party.dir(2) / "ready.1")
    front = party.start(1, "foreground", steps=300, slow_until=ready, env=GPU)
    back = party.start(2, "background", steps=40, env=GPU)
    assert (code_of(front), code_of(back)) == (0, 0), party.output(1) + party.output(2)
    assert "in a process of its own" not in party.output(2)
    together = party.final(1)
    assert models_same(together, party.alone(3, steps=300, env=GPU))


def test_a_guest_in_a_green_context_trains(party: Party) -> None:
    try:
        green_stream(torch.device("cuda", 0), 0.25)
    except ConfigError as error:
        pytest.skip(str(error))
    env = {**GPU, "HPCSCHED_LANE_MODE": "green"}
    party.start(1, "foreground", steps=10**9, env=env)
    assert code_of(party.start(2, "background", steps=40, env=env)) == 0, party.output(2)
    assert "in a process of its own" not in party.output(2)


def test_the_benchmark_measures_the_whole_ladder(tmp_path: Path) -> None:
    output = tmp_path / "lanes.json"
    program = str(ROOT / "benchmarks" / "lanes_gpu.py")
    done = subprocess.run(
        [sys.executable, program, "--quick", "--models", "vgg16", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(output.read_text())["outcomes"]
    needed = [one for one in outcomes if one["stage"] not in ("green context", "two processes", "MPS")]
    assert [one["stage"] for one in needed if one["error"]] == []
    assert outcomes[0]["facts"]["graphs_differ_by"] < 1e-3
    assert outcomes[0]["facts"]["same_bits_beside_a_background"]
