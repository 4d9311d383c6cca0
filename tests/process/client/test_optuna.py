"""Optuna end to end, as docs/from-python.md has it: trials are jobs, and one that goes badly is pruned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import hpcsched

optuna = pytest.importorskip("optuna", reason="the extra dev")


def train(x: float, *, steps: int = 40) -> float:
    """A training that gets nowhere for x below 0."""
    link, loss = hpcsched.Link(), 0.0
    for step in range(1, steps + 1):
        loss = x * x + 1 / step if x >= 0 else 100.0 + step
        link.log({"loss": loss}, step=step)
        time.sleep(0.02 if x >= 0 else 1.0)
    return loss


@pytest.mark.slow
def test_trials_are_jobs_and_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # no `hpcsched` beside the run
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    run = hpcsched.Run.start(devices="cpu:2", idle_timeout="2m")
    executor = hpcsched.Executor(run)

    def objective(trial: Any) -> float:
        future, step = executor.submit(train, trial.suggest_float("x", -1.0, 1.0)), 0
        while not future.done():
            time.sleep(0.2)
            for point in future.job.metrics(after=step):
                step = point["step"]
                trial.report(point["loss"], step)
            if trial.should_prune():
                future.cancel()
                raise optuna.TrialPruned
        return future.result()

    study = optuna.create_study(
        sampler=optuna.samplers.GridSampler({"x": [0.5, -0.5, 0.1, 0.3]}, seed=0),
        pruner=optuna.pruners.ThresholdPruner(upper=50.0),
    )
    try:
        study.optimize(objective, n_trials=4, n_jobs=2)
        assert study.best_params == {"x": 0.1}
        states = {trial.params["x"]: trial.state.name for trial in study.trials}
        assert states == {0.5: "COMPLETE", 0.1: "COMPLETE", 0.3: "COMPLETE", -0.5: "PRUNED"}
        run.wait(timeout=30)
        assert sorted(job.state for job in run.jobs) == ["CANCELLED", *["COMPLETED"] * 3]
    finally:
        run.stop()
