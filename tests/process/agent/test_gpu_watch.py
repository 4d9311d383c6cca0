"""A run on a simulated node: GPUs are lost and come back, the driver hangs; all of it sooner than usual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from livebench import FOREVER, PATIENCE_S, Agent, Bench, job

from hpcsched import mps_control

SOONER = """
from hpcsched.agent import gpu_watch
from hpcsched.devices import health
gpu_watch.OLD_AFTER_S, gpu_watch.UNKNOWN_AFTER_S, gpu_watch.WELL_FOR_S = 0.3, 0.6, 0.3
health.ASK_AGAIN_S = 0.2
from hpcsched.cli.main import main
main()
"""


@pytest.fixture
def profiles(bench: Bench) -> Path:
    """Of a model that does 10 steps a second on each GPU."""
    path = bench.folder / "profiles.json"
    table = {"model": "m", "device": "replay", "nodes": 1, "throughput": {"1": 10.0, "2": 20.0}}
    path.write_text(json.dumps({"schema": 1, "profiles": [{**table, "source": "measured"}]}))
    return path


def started(bench: Bench, profiles: Path, node: str, *jobs: str) -> Agent:
    (bench.folder / "node.toml").write_text("schema = 1\n" + node)
    words = ["run", bench.set_of(*jobs), "--devices", f"replay:{bench.folder / 'node.toml'}"]
    words += ["--profiles", profiles, "--monitor", "0.1"]
    told = bench.folder / "told"
    with told.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SOONER, *map(str, words)],
            env=bench.env,
            cwd=bench.folder,
            stdout=out,
            stderr=out,
        )
    bench.agents.append(Agent(process, told))
    return bench.agents[-1]


def test_a_gpu_that_is_lost_and_comes_back_is_used_again(bench: Bench, profiles: Path) -> None:
    node = """gpus = 2
happens = [{ at_s = 0.2, gpu = 1, what = "lost" }, { at_s = 0.5, gpu = 1, what = "returns" }]
"""
    one = job("one", replay=True, model="m", steps=FOREVER, gpus=1)
    agent = started(bench, profiles, node, one, job("two", replay=True, model="m", steps=5, gpus=2))
    bench.until(lambda: "GPU 1 is used again: well for 0.3 s" in agent.said)
    assert "GPU 1 was lost: NVML: GPU is lost" in agent.said
    assert bench("cancel", "one").returncode == 0
    assert agent.wait(PATIENCE_S) == 0, agent.said
    assert bench.states() == {"one": "CANCELLED", "two": "COMPLETED"}
    assert bench.status()["run"]["lost_gpus"] == {}
    machine, _ = bench.replayed()
    assert machine.run.jobs[2].current.gpus == (0, 1)


def test_a_driver_that_hangs_is_noticed_and_holds_nobody_up(bench: Bench, profiles: Path) -> None:
    node = """gpus = 1
happens = [{ at_s = 0.3, gpu = 0, what = "hang", for_s = 600 }]
"""
    one = job("one", replay=True, model="m", steps=FOREVER)
    agent = started(bench, profiles, node, one, job("two", replay=True, model="m", steps=5))
    bench.until(lambda: bench.status().get("gpus", [{}])[0].get("health") == "unknown")
    assert bench.status()["gpus"][0]["sample_age_s"] > 0.6
    record = bench.rundir.read_record()
    assert record
    mps = mps_control.home(record.id)
    (mps / "gpus").mkdir(mode=0o700, parents=True)
    mps.chmod(0o700)
    assert bench("cancel", "one").returncode == 0
    assert agent.wait(PATIENCE_S) == 0, agent.said
    assert bench.states() == {"one": "CANCELLED", "two": "COMPLETED"}
    assert agent.said.count("no sample of GPU 0 for ") == 1 and "lost" not in agent.said
    assert not mps.exists(), "daemons end with their run all the same"
