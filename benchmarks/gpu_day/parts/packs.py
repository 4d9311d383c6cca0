"""Packs of networks against as many processes: pack_gpu.py."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common import ROOT

from gpu_day.found import Found
from gpu_day.parts.suspend import note_page
from gpu_day.timing import run_program

NETWORKS = "mlp-3,mobilenet-v2,resnet50"


def run(found: Found) -> None:
    """Small networks, of which a GPU has room for many; `auto` must not lose, and graphs be really taken."""
    words = ["--nets", "mlp-3", "--quick"] if found.cpu else ["--nets", NETWORKS, "--sizes", "2,4,8"]
    page = run_benchmark(found, "pack_gpu.py", words)
    if not found.cpu:
        graphs = [name for name in page if name.endswith("_graph_step_s")]
        found.check("combinations that ran as one graph", ">= 1", len(graphs), len(graphs) >= 1)


def run_benchmark(found: Found, program: str, words: list[str]) -> list[str]:
    """Run one that keeps what it has in `--output`; the names of its samples."""
    command = [sys.executable, str(ROOT / "benchmarks" / program), *words]
    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        file = Path(folder) / "page.json"
        command += ["--output", str(file), "--budget-s", f"{max(5.0, found.left_s - 20):.0f}"]
        code: int | None = None
        try:
            code, _ = run_program(command, within_s=found.left_s - 2)
        finally:
            names = list(note_page(found, file).get("results", ()))
    found.check(program, "exit code 0", code, code == 0)
    return names
