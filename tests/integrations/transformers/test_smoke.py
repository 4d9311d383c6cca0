"""Transformers' Trainer: the one run of `make test`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from hpcsched.integrations.transformers import prepare_trainer
from tests.integrations.transformers.trainings import Job, make, plain, same


def test_suspended_three_times_it_is_the_same_training(job: Job, tmp_path: Path) -> None:
    trainer = job.through(stops=(1, 10, 16))
    one = plain(tmp_path / "plain")
    same(trainer, one)
    assert job.seen == one.model.seen
    assert job.attempts == 4
    assert job.state["step"] == 20 and job.state["samples"] == 160
    assert (tmp_path / "job" / "ready.1").exists()


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
