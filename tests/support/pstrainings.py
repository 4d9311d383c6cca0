"""Trainings by parameter servers, and what they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

from elasticjobs import expected_samples  # noqa: E402
from psbench import PsJob  # noqa: E402

CLOSE = {"rtol": 0.0, "atol": 1e-6}


def alike(job: PsJob, plain: PsJob) -> None:
    """The same model and optimizer state, and every sample seen as often."""
    here, there = job.final(), plain.final()
    assert here["step"] == there["step"] == job.steps
    assert here["model"].keys() == there["model"].keys()
    for name, value in there["model"].items():
        torch.testing.assert_close(here["model"][name], value, **CLOSE, msg=name)
    states, others = here["optimizer"]["state"], there["optimizer"]["state"]
    assert states.keys() == others.keys()
    for number, state in others.items():
        assert states[number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(states[number][key], value, **CLOSE, msg=f"{key} of {number}")
    assert here["optimizer"]["param_groups"] == there["optimizer"]["param_groups"]
    assert here["scheduler"] == there["scheduler"]
    assert job.samples_seen() == plain.samples_seen() == expected_samples(job)


def plain_one(folder: Path, trainer: str = "Plain", steps: int = 60, world: int = 1, **args: Any) -> PsJob:
    """Trained by plain data parallelism."""
    job = PsJob(folder, trainer, steps)
    assert job.run(world, **args) == [0] * world, job.output
    return job
