"""Stream workers in real ranks: whoever computes a step, and how, it is the same step (JABAS, section 4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_worker_ranks import Job  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, BATCH = 50, 12
CLOSE = {"rtol": 0.0, "atol": 1e-6}


def trained(folder: Path, strategy: dict[str, Any], world: int = 1, steps: int = STEPS, **args: Any) -> Any:
    """The final state of the `Exact` training (float64) by this strategy."""
    job = Job(folder, "training:Exact", steps, {"HPCSCHED_STRATEGY": json.dumps(strategy)})
    assert job.run(world, **{"batch": BATCH, **args}) == [0] * world, job.output
    return job.final()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plain data parallelism at the same global batch."""
    return trained(tmp_path_factory.mktemp("plain"), {"kind": "ddp"})


@pytest.mark.parametrize(
    ("world", "workers", "accumulation"),
    [(1, 1, 5), (1, 2, 2), (1, 3, 1), (1, 6, 0), (2, 1, 2), (2, 3, 0), (3, 2, 1), (2, 2, 2)],
)
def test_every_combination_of_ranks_workers_and_accumulation_is_plain_data_parallelism(
    tmp_path: Path, plain: Any, world: int, workers: int, accumulation: int
) -> None:
    strategy = {"kind": "vsw", "workers": workers, "accumulation": accumulation}
    state = trained(tmp_path, strategy, world)
    assert (state["step"], state["samples"]) == (STEPS, STEPS * BATCH)
    for name, value in plain["model"].items():
        torch.testing.assert_close(state["model"][name], value, **CLOSE)
