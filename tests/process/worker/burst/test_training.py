"""A job with `strategy = { kind = "burst" }`: suspended, resumed, planned anew, it trains as on one GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from rankjobs import Job, same, woken_by  # noqa: E402

NOISY, EXACT, EXACT_NORMED = ["0", "4", "6"], ["0", "2"], ["0", "3"]
"""The layers of the trainers, each called after what it begins with."""


@pytest.fixture(autouse=True)
def _taking_signals() -> Iterator[None]:
    with woken_by():
        yield


DYNAMIC = """
from torch import nn
from training import Exact

class Bends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)

class Dynamic(Exact):
    def network(self):
        return Bends()
"""


def table(names: list[str], ranks: list[list[int]], gpus: int) -> dict[str, Any]:
    """A plan's JSON form."""
    layers = [{"id": i, "name": n, "ranks": r} for i, (n, r) in enumerate(zip(names, ranks, strict=True))]
    return {"schema": 1, "model": "M", "gpus": gpus, "global_batch": 7, "layers": layers}


def burst(folder: Path, *, steps: int = 12, trainer: str = "training:Noisy", **options: Any) -> Job:
    """A job of this strategy; a `plan` that is a table is written into a file."""
    job = Job(folder, trainer=trainer, steps=steps)
    if isinstance(options.get("plan"), dict):
        (folder / "plan.json").write_text(json.dumps(options["plan"]))
        options["plan"] = "plan.json"
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "burst", **options})
    return job


def largest_difference(a: Job, b: Job) -> float:
    models = a.final()["model"], b.final()["model"]
    return max((models[0][name].double() - models[1][name].double()).abs().max().item() for name in models[0])


PLAN = table(NOISY, [[0, 2], [1], [1, 2]], 3)
"""The loss is known to ranks 1 and 2 only, batch norm is on 0 and 2, and nobody has the whole model."""


@pytest.mark.slow
def test_a_suspended_burst_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    plain = burst(tmp_path / "plain", plan=PLAN)
    assert plain.run(3) == [0, 0, 0], plain.output
    job = burst(tmp_path / "job", plan=PLAN)
    assert job.run(3, at=7, rank="1") == [75, 75, 75], job.output
    assert 0 < job.state["step"] < 12
    assert job.run(3, at=1, rank="0") == [75, 75, 75], job.output
    assert job.run(3) == [0, 0, 0], job.output
    for key in ("model", "optimizer", "scheduler", "step", "samples"):
        assert same(job.final()[key], plain.final()[key]), key
    assert job.state["metrics"] == {"training": 0.0}
    assert job.state["loss"] == pytest.approx(plain.state["loss"])
    written = json.loads((job.dir / "plan.json").read_text())
    assert [layer["ranks"] for layer in written["layers"]] == [[0, 2], [1], [1, 2]]


def test_the_plan_does_not_change_what_is_learnt(tmp_path: Path) -> None:
    alone = burst(tmp_path / "alone", trainer="training:Mapped", plan=table(EXACT, [[0], [0]], 1))
    assert alone.run(1, loaders=1) == [0], alone.output  # read ahead by another process
    plan = table(EXACT, [[1, 2], [0, 1, 2]], 3)
    spread = burst(tmp_path / "spread", trainer="training:Mapped", plan=plan)
    assert spread.run(3) == [0, 0, 0], spread.output
    assert largest_difference(alone, spread) < 1e-12


def test_batch_norm_of_each_ranks_own_samples_is_what_data_parallelism_has(tmp_path: Path) -> None:
    ddp = Job(tmp_path / "ddp", trainer="training:Normed", steps=12)
    assert ddp.run(2) == [0, 0], ddp.output
    everywhere = table(EXACT_NORMED, [[0, 1], [0, 1]], 2)
    local = burst(tmp_path / "local", trainer="training:Normed", plan=everywhere, batch_norm="local")
    assert local.run(2) == [0, 0], local.output
    assert largest_difference(ddp, local) < 1e-12
    shared = burst(tmp_path / "shared", trainer="training:Normed", plan=everywhere)
    assert shared.run(2) == [0, 0], shared.output
    assert largest_difference(ddp, shared) > 1e-3


@pytest.mark.slow
def test_trying_plans_changes_nothing_in_what_is_learnt(tmp_path: Path) -> None:
    """With dropout and shared batch norm: by layers on both ranks, by the whole model on one."""
    alone = burst(tmp_path / "alone", steps=150)
    assert alone.run(1) == [0], alone.output
    job = burst(tmp_path / "job", steps=150)
    assert job.run(2) == [0, 0], job.output
    assert "is kept: a step takes data parallel" in job.output
    page = json.loads((job.dir / "plan.json").read_text())
    assert {each["name"] for each in page["compared"]} >= {"data parallel", "one rank"}
    assert largest_difference(alone, job) < 1e-5  # float32


def test_without_a_plan_the_layers_are_measured_and_a_resume_on_other_ranks_plans_anew(
    tmp_path: Path,
) -> None:
    plain = burst(tmp_path / "plain", trainer="training:Exact", steps=16)
    assert plain.run(1, batch=8) == [0], plain.output
    job = burst(tmp_path / "job", trainer="training:Exact", steps=16, amplification=2.0)
    assert job.run(2, batch=8, at=9) == [75, 75], job.output
    profile = json.loads((job.dir / "layers.json").read_text())
    assert [layer["name"] for layer in profile["layers"]] == EXACT
    assert set(profile["layers"][0]["forward_us"]) == {"4", "8"}
    assert json.loads((job.dir / "plan.json").read_text())["gpus"] == 2
    assert job.run(1, batch=8) == [0], job.output
    assert json.loads((job.dir / "plan.json").read_text())["gpus"] == 1
    assert job.state["step"] == 16
    assert largest_difference(plain, job) < 1e-12


@pytest.mark.slow
def test_a_plan_is_made_anew_when_what_was_measured_says_so(tmp_path: Path) -> None:
    """By the profile the layers take so long that two ranks pay; in truth summing gradients takes longer, as
    is measured at the start, and known of the layers at a checkpoint."""
    plain = burst(tmp_path / "plain", trainer="training:Exact", steps=1000)
    assert plain.run(1, batch=8) == [0], plain.output
    job = burst(tmp_path / "job", trainer="training:Exact", steps=1000, profile="layers.json")
    about = {"parameter_bytes": 100_000_000, "activation_bytes": 100}
    times = {"4": 3.6e6, "8": 4.0e6}  # two ranks pay even at 0.2 GB/s, as measured on a busy machine
    layers = [
        {"id": i, "name": name, "prev": list(range(i)), **about, "forward_us": times, "backward_us": times}
        for i, name in enumerate(EXACT)
    ]
    profile = {"schema": 1, "model": "Exact", "device": "cpu", "input_bytes": 48, "layers": layers}
    (job.folder / "layers.json").write_text(json.dumps(profile))
    job.env["HPCSCHED_CHECKPOINT_EVERY_S"] = "0.05"
    assert job.run(2, batch=8) == [0, 0], job.output
    assert "is kept: a step takes data parallel" in job.output
    learnt = json.loads((job.dir / "layers.json").read_text())
    assert learnt["layers"][0]["forward_us"]["8"] < 4.0e6
    assert [layer["ranks"] for layer in json.loads((job.dir / "plan.json").read_text())["layers"]] != [
        [0, 1]
    ] * 2
    assert largest_difference(plain, job) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": table(EXACT, [[0], [0, 2]], 3)}, "plan for 3, and 2 are here; accepted: a run on exactly"),
        slow({"plan": table(["0", "3"], [[0], [1]], 2)}, "plan.json: layer 1: '3'; accepted: '2', as in the"),
        slow({"plan": table(["0"], [[0]], 2)}, "plan.json: layer 1: missing; accepted: '2', as in the model"),
        slow({"plan": table([*EXACT, "4"], [[0], [1], [0]], 2)}, "plan.json: layer '4': not in the model"),
        slow({"plan": table(EXACT, [[0], [1, 2]], 2)}, "plan.json: layer '2': ranks: [1, 2]"),
        slow({"plan": "none.json"}, "none.json: No such file or directory"),
        ({"profile": "training.py"}, "training.py: not JSON"),
        slow({"amplification": 0.5}, "strategy burst: amplification: 0.5; accepted: a number of at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_on_all_ranks(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    job = burst(tmp_path, trainer="training:Exact", **options)
    assert job.run(2) == [2, 2], job.output
    assert message in job.output
    assert "Traceback" not in job.output


def test_a_model_of_dynamic_course_is_refused(tmp_path: Path) -> None:
    job = burst(tmp_path, trainer="dynamic:Dynamic", plan=table(["0"], [[0]], 1))
    (tmp_path / "dynamic.py").write_text(DYNAMIC)
    assert job.run(1) == [2], job.output
    assert "model Bends" in job.output
    assert "Traceback" not in job.output
