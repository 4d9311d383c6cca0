"""Stream workers: equality, how many at once gain, what comparing and deciding cost: vsw_gpu.py."""

from __future__ import annotations

from gpu_day.found import Found
from gpu_day.parts.packs import run_benchmark


def run(found: Found) -> None:
    """Two networks get all of the time."""
    run_benchmark(
        found,
        "vsw_gpu.py",
        ["--nets", "mlp-3", "--quick"] if found.cpu else ["--nets", "resnet50,mobilenet-v2"],
    )
