"""`make demo`: what it says of promotions is what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SCRIPT = ROOT / "jobscripts/demo/demo.sh"

STAND_IN = """#!/bin/sh
echo "$@" >> calls
case "$*" in
    *--json*) echo '{"jobs":[{"name":"wide-cnn-a","suspensions":SUSPENDED,"resizes":RESIZED}]}' ;;
    status*) echo "small-mlp   0  0"; echo "wide-cnn-a  SUSPENDED  RESIZED" ;;
    explain*) echo "0:06  resized in place from 1 to 2 GPUs; training stood still for 0.01 s" ;;
esac
"""

JOBS = """
schema = 1
[defaults]
trainer = "hpcsched.examples.digits:Digits"
[[job]]
name = "small-mlp"
model = "digits-mlp"
args = { kind = "mlp", width = 64, batch = 128 }
steps = 300
gpus = 1
[[job]]
name = "wide-cnn-a"
model = "digits-cnn"
args = { kind = "cnn", width = 48, batch = 256 }
steps = 100
"""

PROMOTED = "wide-cnn-a went over to other CPU slots while it trained"
NOT_PROMOTED = "No job was promoted"


def demo(folder: Path, commands: Path, **settings: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HPCSCHED_")}
    env |= {"PATH": f"{commands}:{os.environ['PATH']}", "XDG_STATE_HOME": str(folder / "state")}
    env |= {"XDG_CONFIG_HOME": str(folder), "HPCSCHED_SITE_CONFIG": str(folder / "none.toml")}
    env |= {f"DEMO_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        ["sh", str(SCRIPT)], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("suspended", "resized"), [(0, 1), (1, 0), (0, 0)])
def test_a_promotion_is_one_whether_in_place_or_not(tmp_path: Path, suspended: int, resized: int) -> None:
    command = tmp_path / "hpcsched"
    command.write_text(STAND_IN.replace("SUSPENDED", str(suspended)).replace("RESIZED", str(resized)))
    command.chmod(0o755)
    said = demo(tmp_path, tmp_path)
    moved = suspended + resized > 0
    assert (PROMOTED in said, NOT_PROMOTED in said) == (moved, not moved)
    assert ("replay:6@40" in (tmp_path / "calls").read_text()) is not moved
    assert said.count("stood still for 0.01 s") == 1 + moved


@pytest.mark.torch
@pytest.mark.slow
def test_the_demo_runs_and_tells_what_happened(tmp_path: Path) -> None:
    """A small one. Whether two slots are faster than one is for the machine to say."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(JOBS)
    said = demo(
        tmp_path,
        Path(sys.executable).parent,
        JOBS=str(jobs),
        PROFILE="--seconds 0.3 --repeats 1 --warmup 0 --no-costs",
        RUN="--policy-option promote=always",
        SPEED="400",
    )
    run = tmp_path / "demo-run"
    page = json.loads((run / "run/status.json").read_bytes())
    assert [(job["name"], job["state"]) for job in page["jobs"]] == [
        ("small-mlp", "COMPLETED"),
        ("wide-cnn-a", "COMPLETED"),
    ]
    moved = page["jobs"][1]["resizes"] + page["jobs"][1]["suspensions"]
    assert (PROMOTED in said, NOT_PROMOTED in said) == (moved > 0, moved == 0)
    assert "GPUs at step" in said.partition(PROMOTED)[2] or not page["jobs"][1]["resizes"]
    assert (run / "paper").exists() is (moved == 0)
    assert (run / "gantt.svg").exists()
