"""What only a GPU can show: NVML's view of it, and training on it through the whole agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcsched.devices import open_devices
from hpcsched.errors import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

JOBS = """
schema = 1
[defaults]
trainer = "hpcsched.examples.digits:Digits"
model = "digits"
gpus = 1
[[job]]
name = "a"
steps = 300
[[job]]
name = "b"
args = { kind = "cnn" }
steps = 300
"""


@pytest.fixture(scope="module")
def gpus() -> int:
    try:
        devices = open_devices("cuda", "here")
    except ConfigError as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")
    try:
        return len(devices.inventory())
    finally:
        devices.close()


def test_nvml_sees_the_gpus_and_calls_them_healthy(gpus: int) -> None:
    devices = open_devices("cuda", "here")
    try:
        samples = devices.sample()
    finally:
        devices.close()
    assert [s.gpu for s in samples] == list(range(gpus))
    assert all(s.healthy for s in samples), [s.why for s in samples]
    assert all(s.memory_mib is not None for s in samples)


def test_trainers_run_on_gpus_through_the_agent(gpus: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")  # the digits
    (tmp_path / "jobs.toml").write_text(JOBS)
    env = {**os.environ, "HPCSCHED_DATABASE": str(tmp_path / "h.db")}
    command = [sys.executable, "-m", "hpcsched", "run", "jobs.toml", "--dir", "run", "--json"]
    done = subprocess.run(
        [*command, "--devices", "cuda"], cwd=tmp_path, env=env, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["state"] for job in jobs] == ["COMPLETED", "COMPLETED"]
    assert all(job["step"] == 300 and job["steps_repeated"] == 0 for job in jobs)
    assert all(job["metrics"]["accuracy"] > 0.8 for job in jobs)
