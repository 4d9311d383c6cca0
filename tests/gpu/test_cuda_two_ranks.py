"""Two ranks on one GPU, over gloo: all of the GPU code that several ranks run, but for NCCL itself. And the
same over NCCL, where there are two GPUs.

Each test trains on two ranks, and compares with one rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

from elasticjobs import WATCHED, Elastic, expected_samples  # noqa: E402
from rankjobs import Job, same, wait, woken_by  # noqa: E402

ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0", "HPCSCHED_RANKS_BACKEND": "gloo"}
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(params=[ONE_GPU, TWO_GPUS], ids=["one GPU", "two GPUs"])
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    """The GPUs of the ranks."""
    if request.param == TWO_GPUS and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return dict(request.param)


ON_GPU = '''
import training
import watched

class OnGpu:
    """Trains nowhere else."""
    def loss(self, model, batch):
        assert all(tensor.is_cuda for tensor in (*batch, *model.parameters()))
        return super().loss(model, batch)

class Exact(OnGpu, watched.WatchedExact): pass
class Convolutional(OnGpu, watched.Convolutional): pass
class Noisy(OnGpu, training.Noisy):
    dtype = training.torch.float64
class Tied(OnGpu, training.Exact):
    """Two layers have the same weights."""
    def network(self):
        nn = training.nn
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        second.weight = first.weight
        layers = [nn.Linear(6, 16), nn.Tanh(), first, nn.Tanh(), second, nn.Tanh(), nn.Linear(16, 3)]
        return nn.Sequential(*layers)
'''


def on(place: dict[str, str], job: Job, **strategy: Any) -> Any:
    """The job, its ranks on these GPUs."""
    (job.folder / "ongpu.py").write_text(ON_GPU)
    job.env |= place | {"HPCSCHED_STRATEGY": json.dumps(strategy)}
    (job.folder / "watched.py").write_text(WATCHED)
    return job


def largest_difference(a: Job, b: Job) -> float:
    models = a.final()["model"], b.final()["model"]
    return max(float((models[0][key].double() - models[1][key].double()).abs().max()) for key in models[0])


@pytest.mark.parametrize(
    ("trainer", "strategy", "most"),
    [
        ("Exact", {"kind": "ddp"}, 1e-12),
        ("Convolutional", {"kind": "ddp", "reproducible": True, "shards": 4}, 0.0),
    ],
    ids=["ddp", "reproducible"],
)
def test_a_training_grows_and_shrinks_in_place(
    place: dict[str, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    trainer: str,
    strategy: dict[str, Any],
    most: float,
) -> None:
    plain = on(place, Elastic(tmp_path / "plain", steps=120), **strategy)
    job = on(place, Elastic(tmp_path / "elastic", steps=120), **strategy)
    plain.trainer = job.trainer = f"ongpu:{trainer}"
    assert plain.run() == [0], plain.output
    with woken_by():
        ranks = job.begin(1, pause=0.02, crawl_at=60)
        job.word()
        for old, new in ((1, 2), (2, 1), (1, 2)):
            ranks += job.resize(old, new)
            word = job.word()
            assert word["in_place"]
            record_property(f"stopped_s {old} to {new}", word["stopped_s"])
        job.go()
        assert wait(ranks) == [0] * 3, job.output
    for one in (plain, job):
        os.close(one.control)
        os.close(one.arena)
    assert job.samples_seen() == expected_samples(job)
    assert largest_difference(plain, job) <= most
    if not most:
        assert same(job.final()["model"], plain.final()["model"])
        assert same(job.final()["optimizer"], plain.final()["optimizer"])


def by_plan(place: dict[str, str], folder: Path, model: str, names: str, ranks: list[list[int]]) -> Job:
    """The model trained by a plan: its layers that have weights, each on ranks of its own."""
    folder.mkdir()
    gpus = 1 + max(rank for own in ranks for rank in own)
    layers = [
        {"id": i, "name": name, "ranks": own} for i, (name, own) in enumerate(zip(names, ranks, strict=True))
    ]
    plan = {"schema": 1, "model": model, "gpus": gpus, "global_batch": 8, "layers": layers}
    (folder / "plan.json").write_text(json.dumps(plan))
    job = Job(folder, f"ongpu:{model}", steps=20)
    on(place, job, kind="burst", plan=str(folder / "plan.json"))
    assert job.run(gpus, batch=8) == [0] * gpus, job.output
    return job


@pytest.mark.parametrize(
    ("model", "names", "ranks"),
    [
        ("Noisy", "046", [[0, 1], [1], [0, 1]]),
        ("Noisy", "046", [[1], [0], [1]]),
        ("Tied", "0246", [[1], [0], [1], [0, 1]]),  # over NCCL a sum out of turn would never end
    ],
    ids=["shared batch norm", "in turn", "tied weights"],
)
def test_layers_on_ranks_of_their_own(
    place: dict[str, str], tmp_path: Path, model: str, names: str, ranks: list[list[int]]
) -> None:
    alone = by_plan(place, tmp_path / "alone", model, names, [[0]] * len(names))
    two = by_plan(place, tmp_path / "two", model, names, ranks)
    assert largest_difference(alone, two) < 1e-12


def test_a_plan_is_made_and_run(place: dict[str, str], tmp_path: Path) -> None:
    job = on(place, Job(tmp_path, "ongpu:Noisy", steps=150), kind="burst")
    assert job.run(2, batch=8) == [0, 0], job.output
    assert json.loads((job.dir / "plan.json").read_text())["gpus"] == 2


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 2), (3, 0)])
def test_stream_workers_in_both_ranks(
    place: dict[str, str], tmp_path: Path, workers: int, accumulation: int
) -> None:
    plain = on(place, Job(tmp_path / "plain", "ongpu:Exact", steps=30), kind="ddp")
    assert plain.run(1, batch=12) == [0], plain.output
    strategy = {"kind": "vsw", "workers": workers, "accumulation": accumulation}
    job = on(place, Job(tmp_path / "two", "ongpu:Exact", steps=30), **strategy)
    assert job.run(2, batch=12) == [0, 0], job.output
    assert largest_difference(plain, job) < 1e-6
