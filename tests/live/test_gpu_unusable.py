"""A run on GPUs that NVML, which is played, sees and torch, which is real, cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from livebench import Bench, job

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_they_are_taken_out_and_the_job_stays_in_the_queue(bench: Bench) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bench.env["PYTHONPATH"] = str(Path(__file__).parent.parent / "data/gpu")
    bench.env.pop("CUDA_VISIBLE_DEVICES", None)
    trainer = "hpcsched.examples.digits:Digits"
    jobs = bench.set_of(job("digits", trainer=trainer, args={"kind": "mlp"}, steps=3, gpus=1, retries=0))
    done = bench("run", jobs, "--devices", "cuda:2")
    assert done.returncode == 75, done.stderr
    page = bench.status()
    lost = page["run"]["lost_gpus"]
    assert lost.keys() == {"0", "1"} and all(f"torch {torch.__version__}" in why for why in lost.values())
    (left,) = page["jobs"]
    assert (left["state"], left["attempt"], left.get("step")) == ("PENDING", 2, None)
    for gpu in (0, 1):
        assert f"GPU {gpu} was lost: torch" in done.stderr
        assert f"hpcsched: GPU {gpu} cannot be used: torch" in Path(left["output"]).read_text()
