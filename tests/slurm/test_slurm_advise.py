"""`hpcsched advise` on a real Slurm: its plan for each shape, the script of a row, and how long that
waited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcsched.store.allocations import allocations
from hpcsched.store.database import Database

pytestmark = pytest.mark.slurm

JOB = '[[job]]\nname = "j{number}"\nmodel = "m"\nsteps = 600\nreplay = true\ngpus = {{ min = 1, max = 6 }}\n'
PROFILE = {
    "model": "m",
    "device": "any",
    "throughput": {"1": 1.0, "6": 4.0},
    "start_s": 1.0,
    "suspend_s": 1.0,
}


def environ(slurm: Any, work: Path) -> dict[str, str]:
    return {
        **slurm.env,
        "HPCSCHED_DEVICES": "replay:6@50",
        "HPCSCHED_PROFILES": f"{work}/p.json",
        "HPCSCHED_DATABASE": f"{work}/db",
        "HPCSCHED_SITE_CONFIG": f"{work}/none.toml",
        "XDG_CONFIG_HOME": f"{work}/config",
        "XDG_STATE_HOME": f"{work}/state",
    }


def test_advice_a_script_of_it_and_the_history_that_it_leaves(slurm: Any, tmp_path: Path) -> None:
    env = environ(slurm, tmp_path)
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "profiles": [PROFILE]}))
    (tmp_path / "jobs.toml").write_text("schema = 1\n" + "".join(JOB.format(number=n) for n in range(4)))
    busy = slurm.sbatch("sleep 600", "--nodelist=node2", "--gres=gpu:6", "--time=40")
    slurm.wait(busy, {"RUNNING"})

    def hpcsched(*words: object, code: int = 0) -> str:
        argv = [sys.executable, "-m", "hpcsched", *map(str, words)]
        ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert ended.returncode == code, ended.stderr
        return ended.stdout if code == 0 else ended.stderr

    before = slurm.run("squeue", "-h", "-o", "%A").split()
    text = hpcsched("advise", "jobs.toml", "--partition", "main,short", "--json")
    advice = json.loads(text)
    assert slurm.run("squeue", "-h", "-o", "%A").split() == before, "nothing is submitted"
    waits = {(row["partition"], row["nodes"] * row["gpus_per_node"]): row["wait_s"] for row in advice["rows"]}
    assert waits["main", 6] < 60
    assert 1500 < waits["main", 12] < 2500, "until the limit of the job on node2"
    assert {row["wait_source"] for row in advice["rows"]} <= {"test-only", "between"}
    assert all(row["time_s"] <= 120 for row in advice["rows"] if row["partition"] == "short")
    assert "accepted: " in hpcsched("advise", "jobs.toml", "--partition", "none", code=2)

    (tmp_path / "advice.json").write_text(text)
    hpcsched("script", "slurm", "jobs.toml", "--advice", "advice.json", "--dir", "run", "-o", "job.sbatch")
    exported = "--export=ALL," + ",".join(f"{key}={env[key]}" for key in env if key not in slurm.env)
    job = slurm.sbatch((tmp_path / "job.sbatch").read_text(), exported, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED"

    best = advice["rows"][advice["recommended"] - 1]
    with Database(tmp_path / "db") as opened:
        (entry,) = allocations(opened, "slurm")
    assert (entry.job_id, entry.partition, entry.limit_s) == (job, best["partition"], best["time_s"])
    assert (entry.nodes, entry.gpus) == (best["nodes"], best["gpus_per_node"])
    assert 0 <= entry.waited_s < 60
