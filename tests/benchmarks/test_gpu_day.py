"""A whole day without a GPU: tiny sizes, each part's figures and checks; it stops and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from gpudays import boxes, day
from places import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu_day"), "--cpu"]
DEADLINE_S = 1700.0
FIGURES = {
    "facts": {
        "matmul_bf16_128_tflops",
        "copy_on_device_tb_per_s",
        "pageable_to_device_gb_per_s",
        "launch_us",
    },
    "forks": {"standby_after_s", "waiting"},
    "gpu-tests": {"plain_tests", "strict_counts"},
    "sticky": {"accidents", "front_step"},
    "run": {"jobs", "suspend_s", "loaders"},
    "lanes": {"vgg16"},
    "layers": {"vgg16_profile", "vgg16_sums_s", "vgg16_steps_s"},
    "mps": {"names", "limit", "rate_by_percent", "foreground_and_background_rates"},
    "packs": {"mlp-3_b2_n2_auto_step_s", "mlp-3_b2_n2_processes_step_s", "mlp-3_unequal_ragged_step_s"},
    "shares": {"one after the other: took_s", "side by side: took_s", "parts: makespan_s"},
    "vsw": {"mlp-3_local_4_samples_per_s", "mlp-3_decision_s"},
    "nccl": {"destroy_init_s", "abort_threads", "peers_used_mib"},
    "soak": {"suspend_s", "resume_s", "host_mib"},
}
"""Of each part some; those that are not here may be refused on a machine without a GPU."""


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """As on a bare machine: no variables, another working directory."""
    command = [*COMMAND, "--state", "state", "--out", "out", *words]
    return subprocess.Popen(command, cwd=tmp_path, env={}, stdout=subprocess.PIPE, text=True)


def page(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / "day.json").read_text())
    return found


def test_a_day_without_a_gpu_shows_that_all_of_it_works(tmp_path: Path) -> None:
    done = start(tmp_path, "--budget-s", str(DEADLINE_S))
    try:
        said, _ = done.communicate(timeout=DEADLINE_S + 60)
    finally:
        done.kill()
    assert done.returncode == 0, said
    parts = page(tmp_path)["parts"]
    assert list(parts) == [part.name for part in day.PARTS]
    for name, names in FIGURES.items():
        assert parts[name]["status"] == "pass", (name, parts[name]["checks"], parts[name]["log_tail"])
        assert names <= parts[name]["numbers"].keys(), name
    assert {parts[name]["status"] for name in parts.keys() - FIGURES.keys()} <= {"pass", "refused"}
    for name, part in parts.items():
        assert f"| {name} | {part['status']} |" in said
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["day.json", "logs.tgz"]
    with tarfile.open(tmp_path / "out" / "logs.tgz") as archive:
        assert len(archive.getnames()) == len(parts)


def test_a_day_that_is_ended_early_goes_on_where_it_stopped(tmp_path: Path) -> None:
    one = start(tmp_path, "--parts", "facts,lanes")
    state = tmp_path / "state"
    try:
        deadline = time.monotonic() + 240
        while not (state / "lanes.log").exists():
            assert time.monotonic() < deadline and one.poll() is None
            time.sleep(0.05)
        time.sleep(2)
        one.send_signal(signal.SIGTERM)
        said, _ = one.communicate(timeout=60)
    finally:
        one.kill()
        one.wait()
    assert one.returncode == 128 + signal.SIGTERM
    assert "| facts | pass |" in said and "| lanes | not begun |" in said
    assert page(tmp_path)["parts"].keys() == {"facts"}
    assert not _started_in(tmp_path), "all of its processes have ended"
    again = start(tmp_path, "--parts", "facts,lanes", "--budget-s", "100")  # too little for any part
    said, _ = again.communicate(timeout=120)
    assert "facts: pass, done before" in said and "lanes: not begun" in said
    assert again.returncode == 0


def _started_in(folder: Path) -> list[int]:
    """Processes that a day there has started: without HOME it gives them one, in its state folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"{boxes.MARK}=".encode() in environment and str(folder).encode() in environment:
                found.append(int(entry.name))
    return found
