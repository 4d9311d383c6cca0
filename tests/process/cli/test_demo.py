"""`hpcsched demo` as a user runs it: trainings, Ctrl-C, and what is left of both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def demo(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HPCSCHED_")}
    env |= {f"XDG_{name}_HOME": str(folder / name) for name in ("CONFIG", "DATA", "STATE")}
    env |= {"HPCSCHED_SITE_CONFIG": str(folder / "none.toml"), "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "hpcsched", "demo", *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ctrl_c_ends_it_and_leaves_nothing_running(tmp_path: Path) -> None:
    with demo(tmp_path, "--pretend") as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "starts on GPUs" in line:
                break
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    assert "the demo was stopped; nothing of it runs any more" in said
    page = json.loads((tmp_path / "hpcsched-demo/run/status.json").read_bytes())
    assert page["run"]["state"] != "RUNNING" and all(not job["gpus"] for job in page["jobs"])
    assert not (tmp_path / "DATA").exists(), "the user's database"


@pytest.mark.torch
@pytest.mark.slow
def test_it_trains_and_tells_what_that_was_worth(tmp_path: Path) -> None:
    """A short one. Whether two slots are faster than one is for the machine to say."""
    for module in ("torch", "matplotlib", "jinja2"):
        pytest.importorskip(module)
    process = demo(tmp_path, "--seconds", "12", "--dir", "here")
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert all(len(line) < 110 for line in said.splitlines())
    page = json.loads((tmp_path / "here/run/status.json").read_bytes())
    assert [job["state"] for job in page["jobs"]] == ["COMPLETED"] * 4
    resized = any(job["resizes"] for job in page["jobs"])
    assert ("PROMOTED IN PLACE" in said) is resized
    assert ("No training was promoted" in said) is not resized
    assert re.search(r"4 trainings in \d+:\d\d; one after the other\s+they\s+take \d+:\d\d: ", said)
    assert "CPU slot 0 │small-a" in said and "here/report.html" in said
    assert "<svg" in (tmp_path / "here/report.html").read_text()
    assert not (tmp_path / "DATA").exists(), "the user's database"
