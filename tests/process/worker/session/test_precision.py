"""In fp16 all ranks skip the same steps, and what was suspended goes on with the scale that it had."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from rankjobs import Job, same  # noqa: E402

HALF = """
import torch
from training import Noisy

class Half(Noisy):
    def build(self, args):
        parts = super().build(args)
        parts.precision, parts.clip_norm = "fp16", 0.5
        return parts

    def loss(self, model, batch):
        if self.seen == self.args.get("last"):
            print("weights", float(sum(p.double().abs().sum() for p in model.parameters())))
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
    weights = [line for line in plain.output.splitlines() if line.startswith("weights")]
    assert len(weights) == 2 and len(set(weights)) == 1
    assert all(tensor.isfinite().all() for tensor in plain.final()["model"].values())
    assert (plain.state["step"], plain.state["samples"]) == (12, 84)
