"""A session logs what its user does not log."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.store.metrics import read_points  # noqa: E402
from hpcsched.worker.session.training_log import TrainingLog  # noqa: E402


def a_context(folder: Path, trainer: str | None = None) -> Any:
    training = SimpleNamespace(
        last_loss=lambda: 0.5,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        samples=8,
        step=1,
        total_steps=2,
    )
    env = SimpleNamespace(job_dir=folder, trainer=trainer, attempt=1)
    return SimpleNamespace(env=env, rank=0, training=training)


def test_a_full_disk_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(errno.ENOSPC, "No space left on device")

    tried = list[str]()
    monkeypatch.setattr(sys, "stdout", Full())
    TrainingLog(a_context(tmp_path, "m:T")).step_made(force=True)
    assert len(tried) == 1 and tried[0].startswith("step 1/2  loss 0.5")


def test_a_metric_that_the_program_logs_is_left_to_it(tmp_path: Path) -> None:
    context = a_context(tmp_path)
    log, told = TrainingLog(context), list[tuple[dict[str, float], int]]()
    log.also = [SimpleNamespace(log=lambda values, step: told.append((values, step)))]
    log.write({"loss": 100.0}, step=1)
    log.step_made(force=True)
    expected = [({"loss": 100.0}, 1), ({"lr": 0.1}, 1)]
    assert told == expected
    assert [(point.values, point.step) for point in read_points(tmp_path / "metrics.jsonl")] == expected
