"""Transformers' Trainer: the one run of `make test`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from hpcsched.integrations.transformers import prepare_trainer
from hpcsched.store.metrics import read_points
from tests.integrations.transformers.trainings import Job, make, plain, same


def test_suspended_three_times_it_is_the_same_training(job: Job, tmp_path: Path) -> None:
    trainer = job.through(stops=(1, 10, 16))
    one = plain(tmp_path / "plain")
    same(trainer, one)
    assert job.seen == one.model.seen
    assert job.attempts == 4
    assert job.state["step"] == 20 and job.state["samples"] == 160
    assert (tmp_path / "job" / "ready.1").exists()
    points = [{"step": point.step, **point.values} for point in read_points(tmp_path / "job/metrics.jsonl")]
    for line in trainer.state.log_history:
        line.pop("total_flos", None)  # as the Trainer's own callback that prints has done by then
    assert points == trainer.state.log_history
    assert json.loads((tmp_path / "progress").read_bytes().splitlines()[0])["total"] == 20


def test_without_hpcsched_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSCHED_JOB_ID", raising=False)
    trainer = make(tmp_path / "out")
    handlers = [signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)]
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    assert prepare_trainer(trainer) is trainer
    assert vars(trainer) == before and trainer.callback_handler.callbacks == callbacks
    assert [signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)] == handlers
    trainer.train()
    trainer.train()
    assert not (tmp_path / "out" / "checkpoint-20" / "hpcsched.json").exists()
