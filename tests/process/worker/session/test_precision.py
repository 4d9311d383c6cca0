"""In fp16 all ranks skip the same steps, also those that join, and a suspended training keeps its scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from elasticjobs import Elastic  # noqa: E402
from rankjobs import Job, same, wait, woken_by  # noqa: E402

HALF = """
import os
import torch
from training import Noisy

class Half(Noisy):
    def build(self, args):
        parts = super().build(args)
        parts.precision, parts.clip_norm = "fp16", 0.5
        return parts

    def loss(self, model, batch):
        if self.seen == self.args.get("last"):
            with open("weights." + os.environ["HPCSCHED_RANK"], "w") as file:
                file.write(repr([p.tolist() for p in model.parameters()]))
        # One sample overflows, on whichever rank it is.
        return super().loss(model, batch) * torch.where(batch[0][:, 0] > 1.9, 1e5, 1.0)
"""


def half(folder: Path) -> Job:
    job = Job(folder, trainer="half:Half")
    (folder / "half.py").write_text(HALF)
    return job


def test_ranks_skip_together_and_the_scale_is_kept(tmp_path: Path) -> None:
    plain, job = half(tmp_path / "plain"), half(tmp_path / "suspended")
    assert plain.run(2, last=11) == [0, 0], plain.output
    assert job.run(2, at=6, rank="1") == [75, 75], job.output
    assert job.run(2) == [0, 0], job.output
    assert same(job.final(), plain.final())
    scale = plain.final()["extra"]["grad_scaler"]["scale"]
    assert scale < 65536.0
    weights = [(plain.folder / f"weights.{rank}").read_text() for rank in (0, 1)]
    assert weights[0] == weights[1]
    assert all(tensor.isfinite().all() for tensor in plain.final()["model"].values())
    assert (plain.state["step"], plain.state["samples"]) == (12, 84)


WATCHED = (
    HALF.replace("training import", "watched import")
    .replace("(Noisy)", "(WatchedNoisy)")
    .replace("import Noisy", "import WatchedNoisy")
)


def resizable(folder: Path) -> Elastic:
    job = Elastic(folder, steps=60)
    job.trainer = "half:Half"
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "ddp", "reproducible": True, "shards": 4})
    (folder / "half.py").write_text(WATCHED)
    return job


@pytest.mark.slow
def test_ranks_that_join_have_the_others_scale(tmp_path: Path) -> None:
    plain, job = resizable(tmp_path / "plain"), resizable(tmp_path / "elastic")
    assert plain.run(batch=14) == [0], plain.output
    with woken_by():
        ranks = job.begin(1, batch=14, pause=0.05, crawl_at=40)
        job.word()
        for old, new in ((1, 3), (3, 2)):
            ranks += job.resize(old, new)
            assert job.word()["in_place"]
        job.go()
        assert wait(ranks) == [0] * len(ranks), job.output
    assert job.state["attempt"] == 3
    assert plain.final()["extra"]["grad_scaler"]["scale"] < 65536.0
    for part in ("model", "optimizer", "extra"):
        assert same(job.final()[part], plain.final()[part])
