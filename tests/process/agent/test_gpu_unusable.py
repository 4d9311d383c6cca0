"""A run on GPUs that NVML, which is played, sees and torch, which is real, cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from livebench import Bench, job
from places import DATA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "code", "state"), [(1, 75, "PENDING"), (2, 1, "FAILED")])
def test_one_is_taken_out_and_the_job_has_one_more_try(
    bench: Bench, gpus: int, code: int, state: str
) -> None:
    """Without a second one it stays in the queue; that it cannot use that either is its own failure."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bench.env["PYTHONPATH"] = str(DATA / "gpu")
    bench.env.pop("CUDA_VISIBLE_DEVICES", None)
    trainer = "hpcsched.examples.digits:Digits"
    jobs = bench.set_of(job("digits", trainer=trainer, args={"kind": "mlp"}, steps=3, gpus=1, retries=0))
    done = bench("run", jobs, "--devices", "cuda" if gpus == 2 else "cuda:1")
    assert done.returncode == code, done.stderr
    page = bench.status()
    lost = page["run"]["lost_gpus"]
    assert lost.keys() == {"0"} and f"torch {torch.__version__}" in lost["0"]
    assert f"GPU 0 was lost: torch {torch.__version__}" in done.stderr
    (left,) = page["jobs"]
    assert (left["state"], left["attempt"], left.get("step")) == (state, gpus, None)
    for gpu in range(gpus):
        assert f"hpcsched: GPU {gpu} (GPU-{gpu}) cannot be used: torch" in Path(left["output"]).read_text()
    if state == "FAILED":
        assert left["detail"].endswith("the job's own failure, as it could not use GPU 0 either")
