"""What all loggers have in common, and what each asks its package for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.worker import loggers


class Fails(loggers.Logger):
    closed = 0

    def _log(self, metrics: dict[str, float], step: int) -> None:
        raise OSError("its server\nis away")

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    def tell(**told: str) -> None:
        for name in ("RANK", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in told.items():
            monkeypatch.setenv(f"HPCSCHED_{name}", value)

    return tell


JOB = {"RUN_ID": "ab12", "RUN_DIR": "/run", "JOB_ID": "7", "JOB_NAME": "train", "ATTEMPT": "2"}


def test_an_id_is_of_the_run_and_the_job(told: Any) -> None:
    told()
    assert loggers.run_id() is None
    told(**JOB)
    assert loggers.run_id() == "ab12-7"


def test_a_logger_that_fails_says_so_once_and_ends_nothing(
    told: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    told(**JOB)
    logger = Fails()
    for step in (1, 2):
        logger.log({"loss": 1.0}, step)
    logger.close()
    assert capfd.readouterr().err == "hpcsched: Fails logs no more: OSError: its server is away\n"
    assert logger.closed == 0


@pytest.mark.parametrize("kind", [loggers.TensorBoard, loggers.WandB, lambda: loggers.MLflow("x")])
def test_other_ranks_import_nothing(told: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told(**JOB, RANK="1", WORLD_SIZE="2")
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # would be an ImportError
    logger = kind()
    assert getattr(logger, "run", None) is None
    logger.log({"loss": 1.0}, 1)
    logger.close()
    assert loggers.mlflow_run("x") is None


@pytest.mark.parametrize(
    ("more", "environ", "asked"),
    [
        ({}, {}, {"id": "ab12-7", "resume": "allow", "name": "train"}),
        ({"id": "mine"}, {}, {"id": "mine", "resume": "allow", "name": "train"}),
        ({}, {"WANDB_RUN_ID": "x", "WANDB_RESUME": "must", "WANDB_NAME": "y"}, {}),
    ],
)
def test_wandb_goes_on_in_the_run_of_this_job(
    told: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    more: dict[str, str],
    environ: dict[str, str],
    asked: dict[str, str],
) -> None:
    """One that has 4 steps already."""
    heard: list[Any] = []

    def init(**given: Any) -> Any:
        heard.append(given)
        return SimpleNamespace(step=5, log=logged, finish=lambda exit_code: heard.append(exit_code))

    def logged(metrics: Mapping[str, float], step: int) -> None:
        heard.append((step, metrics))

    told(**JOB)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    logger = loggers.WandB("cifar", **more)
    assert heard == [], "what only builds the training begins no run"
    for step in (3, 4, 5):
        logger.log({"loss": 1.0, "lr": None}, step)
    logger.close()
    logger.close()
    assert heard == [{"project": "cifar", **asked}, (5, {"loss": 1.0}), 0]
    assert capfd.readouterr().err.count("W&B keeps what it has of the steps before 5") == 1
