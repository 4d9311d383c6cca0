"""A loop with `fully_shard`: suspended and resumed on other rank counts like any other."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from rankjobs import Job, wait, woken_by  # noqa: E402

LOOP = """
import os, time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from hpcsched.worker import Session, join

ranks = join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).double().to(ranks.device)
if os.environ.get("SPREAD"):
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(5)
x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (50,), generator=generator)
session = Session(model=model, optimizer=optimizer, dataset_size=50, global_batch=7, ranks=ranks,
                  seed=3, in_place=True)
for indices in session.steps():
    if not os.path.exists("go"):
        time.sleep(0.05)
    optimizer.zero_grad()
    session.backward(nn.functional.cross_entropy(model(x[indices]), y[indices], reduction="none"))
    optimizer.step()
session.finish()
"""


def loop(folder: Path, *, spread: bool, **env: str) -> Job:
    job = Job(folder, steps=30, program="loop.py", env={"SPREAD": "1" if spread else "", **env})
    (folder / "loop.py").write_text(LOOP)
    return job


def test_a_model_spread_over_ranks_goes_on_over_any_number_of_them(tmp_path: Path) -> None:
    plain = loop(tmp_path / "plain", spread=False)
    (plain.folder / "go").touch()
    assert plain.run() == [0], plain.output

    job = loop(tmp_path / "spread", spread=True, HPCSCHED_CHECKPOINT_EVERY_S="0.2")
    with woken_by():
        for world in (2, 1):
            ranks = job.start(world)
            ready = job.dir / f"ready.{job.attempt}"
            deadline = time.monotonic() + 120
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert json.loads(ready.read_text()) == {"parallel": True}, "ranks cannot join a spread model"
            before = job.attempt
            while time.monotonic() < deadline and (
                not (job.dir / "STATE.json").exists() or job.state["attempt"] < before
            ):
                time.sleep(0.02)
            for rank in ranks:
                os.kill(rank.pid or 0, signal.SIGTSTP)
            assert wait(ranks) == [75] * world, job.output
            assert 0 < job.state["step"] < 30
        (job.folder / "go").touch()
        assert job.run(3) == [0] * 3, job.output
    assert (job.state["step"], job.state["samples"]) == (30, 210)
    ours, theirs = job.final(), plain.final()
    assert ours["model"].keys() == theirs["model"].keys()
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-9, atol=1e-11)
    assert ours["sampler"] == theirs["sampler"]
