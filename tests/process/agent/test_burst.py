"""A burst job under the real agent: suspended, resumed, and equal to one that never was."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from livebench import Bench, job, placements  # noqa: E402

from hpcsched.store.database import Database  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402

TRAINER = """
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Small(Trainer):
    def build(self, args):
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3),
                              nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))

        def loss(model, batch):
            if not os.path.exists("go"):
                time.sleep(0.15)
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        return Parts(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), global_batch=7,
                     dataset=(torch.randn(50, 6), torch.randint(0, 3, (50,))), loss=loss,
                     evaluate=lambda model: {"training": float(model.training)})
"""

PLAN = {
    "schema": 1,
    "model": "Small",
    "gpus": 2,
    "global_batch": 7,
    "layers": [
        {"id": 0, "name": "0", "ranks": [0, 1]},
        {"id": 1, "name": "4", "ranks": [1]},
        {"id": 2, "name": "6", "ranks": [0, 1]},
    ],
}


@pytest.mark.slow
def test_a_burst_job_finds_what_was_measured_of_its_layers(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    (bench.folder / "go").touch()
    times = {"1": 5.0, "7": 30.0}
    layers = [
        {"id": i, "name": name, "prev": [i - 1] if i else [], "parameter_bytes": 4, "activation_bytes": 4}
        for i, name in enumerate(("0", "4", "6"))
    ]
    layers = [{**layer, "forward_us": times, "backward_us": times} for layer in layers]
    page = {"schema": 1, "model": "small", "device": "cpu", "note": "as told", "layers": layers}
    with Database(bench.folder / "database.sqlite") as database:
        database.record_layers(page)
    jobs = job("a", trainer="small:Small", model="small", gpus=2, steps=3, strategy={"kind": "burst"})
    agent = bench.start(bench.set_of(jobs), "--devices", "cpu:2")
    assert agent.wait() == 0, bench.output(1)
    kept = json.loads((bench.dir / "jobs" / "1" / "layers.json").read_text())
    assert (kept["note"], kept["layers"][0]["forward_us"]) == ("as told", times)


def test_a_burst_job_is_suspended_and_resumed_as_if_nothing_had_happened(bench: Bench) -> None:
    (bench.folder / "small.py").write_text(TRAINER)
    (bench.folder / "plan.json").write_text(json.dumps(PLAN))
    strategy = {"kind": "burst", "plan": "plan.json"}
    jobs = [job(name, trainer="small:Small", gpus=2, steps=150, strategy=strategy) for name in ("a", "b")]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:2")
    bench.ready("a")
    assert bench.listening() == {"127.0.0.1"}
    bench.until(lambda: (bench.job("a").get("step") or 0) > 3, "some steps")
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states().get("a") == "SUSPENDED", "suspended")
    (bench.folder / "go").touch()
    assert bench("resume", "a").returncode == 0
    assert agent.wait() == 0, bench.output(1) + bench.output(2)
    assert ("suspend", 1, 1) in placements(bench.replayed()[1])
    finals = [load_checkpoint(bench.dir / "jobs" / str(n) / "checkpoint") for n in (1, 2)]
    for name, value in finals[1]["model"].items():
        assert torch.equal(value, finals[0]["model"][name]), name
