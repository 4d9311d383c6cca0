"""Adaptive batches over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rankjobs import Job

pytestmark = pytest.mark.torch

STEPS, BATCH = 50, 12

CLOSE = {"rtol": 0.0, "atol": 1e-6}


def trained(folder: Path, strategy: dict[str, Any], world: int = 1, steps: int = STEPS, **args: Any) -> Any:
    """The final state of the `Exact` training (float64) by this strategy."""
    job = Job(folder, "training:Exact", steps, {"HPCSCHED_STRATEGY": json.dumps(strategy)})
    assert job.run(world, **{"batch": BATCH, **args}) == [0] * world, job.output
    return job.final()


ADAPTIVE = {
    "kind": "vsw",
    "local_batch": 2,
    "global_batch": [12, 48],
    "similarity": 0.99,
    "every": 5,
    "rate": 0.3,
}

"""Two halves are never that alike: the batch grows as fast as it may."""


def courses(job: Job) -> list[dict[str, Any]]:
    """What was decided, a line for each time."""
    path = job.dir / "batches.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
