"""Burst plans on GPUs: the engine, its clock and its random numbers on one, the exchange over NCCL on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.burst.engine import Engine  # noqa: E402
from hpcsched.worker.burst.sample_rng import uniform_bits  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402

TRAINER = """
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Small(Trainer):
    def build(self, args):
        model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2),
                              nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4)).double()
        x = torch.randn(256, 64, dtype=torch.float64)
        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                     global_batch=32, dataset=(x, torch.randint(0, 4, (256,))),
                     loss=lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1], reduction="none"))
"""

JOB = """
schema = 1
[[job]]
name = "a"
trainer = "small:Small"
steps = 50
strategy = {{ kind = "burst", plan = "{plan}" }}
gpus = {gpus}
"""


def test_random_bits_are_the_same_on_every_device() -> None:
    places = torch.arange(1000, 1020)
    here = uniform_bits(7, places, "layer", 1, count=5000)
    assert torch.equal(uniform_bits(7, places.cuda(), "layer", 1, count=5000).cpu(), here)


def test_an_engine_on_one_gpu_trains_as_usual_and_times_its_layers() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).to(device, torch.float64)
    torch.manual_seed(1)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).to(device, torch.float64)
    x = torch.randn(16, 3, 8, 8, device=device, dtype=torch.float64)
    y = torch.randint(0, 4, (16,), device=device)
    layers = trace(model, (x[:2],))
    planned = tuple(PlannedLayer(id=layer.id, name=layer.name, ranks=(0,)) for layer in layers.layers)
    plan = BurstPlan(model="small", gpus=1, global_batch=16, layers=planned)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    engine = Engine(layers, (x[:2],), plan, batch=16, seed=0, wires=Channels(0, 1, device), optimizer=ours)
    for step in range(6):
        engine.clock.on = step == 4
        ours.zero_grad()
        engine.begin(16 * step)
        result = engine.forward((x,))
        assert result is not None
        (cross_entropy(result, y, reduction="none").sum() / 16).backward()
        engine.backward()
        ours.step()
        theirs.zero_grad()
        cross_entropy(plain(x), y).backward()
        theirs.step()
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert (a.double() - b.double()).abs().max() < 1e-12
    timings = engine.clock.take()
    assert [timing.layer for timing in timings] == [layer.id for layer in layers.layers]
    assert all(timing.samples == 16 and timing.forward_us > 0 for timing in timings)


def run(folder: Path, ranks: list[list[int]], gpus: int) -> torch.Tensor:
    """Run the job by a plan; returns its final weights."""
    folder.mkdir()
    (folder / "small.py").write_text(TRAINER)
    layers = [
        {"id": i, "name": name, "ranks": r} for i, (name, r) in enumerate(zip("046", ranks, strict=True))
    ]
    plan = {"schema": 1, "model": "small", "gpus": gpus, "global_batch": 32, "layers": layers}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "jobs.toml").write_text(JOB.format(plan=folder / "plan.json", gpus=gpus))
    env = {**os.environ, "HPCSCHED_DATABASE": str(folder / "h.db"), "HPCSCHED_DIR": str(folder / "run")}
    command = [sys.executable, "-m", "hpcsched", "run", "jobs.toml", "--devices", f"cuda:{gpus}", "--quiet"]
    done = subprocess.run(command, cwd=folder, env=env, timeout=300, check=False)
    assert done.returncode == 0, (folder / "run" / "jobs" / "1" / "hpcsched-1.out").read_text()[-2000:]
    from hpcsched.worker import load_checkpoint

    final = load_checkpoint(folder / "run" / "jobs" / "1" / "checkpoint")
    return torch.cat([value.flatten().double() for value in final["model"].values()])


def test_a_plan_over_two_gpus_learns_what_one_gpu_does(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = run(tmp_path / "one", [[0], [0], [0]], 1)
    two = run(tmp_path / "two", [[0, 1], [1], [0, 1]], 2)
    assert (one - two).abs().max() < 1e-12
