"""The benchmark of suspends, at a tiny size: it tells its numbers at once, and stays within its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_programs import BENCHMARKS

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_a_save_is_measured_against_its_floor_and_the_rest_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "suspend.json"
    options = ["--gigabytes", "0.002,1e6", "--budget-s", "5", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "suspend.py"), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    page = json.loads(file.read_text())
    results, rows = page["results"], {row["what"]: row for row in page["rows"]}
    parts = ("save", "floor", "floor_copy", "floor_checksum", "load")
    assert all(len(results[f"0.002gb_{part}_s"]) == 5 for part in parts)
    assert all(value > 0 for values in results.values() for value in values)
    assert not any("pin" in name for name in results)  # a CPU's state is not
    assert rows["1e+06 GB"]["measured"].startswith("left out: ")
    assert any(what.startswith("save 0.002 GB into memory: ") for what in rows)
    assert done.stderr.count("left out, as there is no time") == 3  # standby, zygote, nothing
    assert done.stderr.count("0.002gb_save_s ") == 5
