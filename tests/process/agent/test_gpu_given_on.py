"""Runs on GPUs that NVML, which is played, sees: their memory is free before they are given on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from livebench import Bench, job
from places import DATA


@pytest.fixture
def nvml(bench: Bench) -> Path:
    """The folder that says what NVML says."""
    folder = bench.folder / "nvml"
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(DATA / "gpu"), bench.env.get("PYTHONPATH")]))
    bench.env |= {"PYTHONPATH": path, "NVML_PLAYED": str(folder)}
    bench.env.pop("CUDA_VISIBLE_DEVICES", None)
    return folder


def test_the_next_job_finds_the_memory_free_that_a_child_of_the_last_one_still_had(
    bench: Bench, nvml: Path
) -> None:
    used, begun = nvml / "used", nvml / "begun"
    child = f"setsid sh -c 'touch {begun}; sleep 1; rm {used}' < /dev/null > /dev/null 2>&1 &"
    first = f"echo 500 > {used}; {child} while [ ! -e {begun} ]; do sleep 0.02; done"
    jobs = bench.set_of(job("first", first, gpus=1), job("next", f"test ! -e {used}", gpus=1, retries=0))
    done = bench("run", jobs, "--devices", "cuda:1")
    assert done.returncode == 0, done.stderr
    assert "given on" not in done.stderr
