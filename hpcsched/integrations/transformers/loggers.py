"""One run in the logger for all attempts of a job: W&B, MLflow, TensorBoard."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Mapping, MutableMapping
from typing import Any

from transformers import Trainer

from hpcsched.worker.process.contract import say


def go_on(trainer: Trainer, known: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the Trainer's loggers go on with the runs that are `known` (`runs` of before); {}: begin them.

    Run ids that the environment says already stay.
    """
    names = {name for one in trainer.callback_handler.callbacks for name in _names(one)}
    if "WandbCallback" in names:
        environ.setdefault("WANDB_RUN_ID", known.get("wandb", uuid.uuid4().hex[:8]))
        environ.setdefault("WANDB_RESUME", "allow")
    if "MLflowCallback" in names and "mlflow" in known:
        environ.setdefault("MLFLOW_RUN_ID", known["mlflow"])
    if "tensorboard" in known:
        for one in trainer.callback_handler.callbacks:
            if "TensorBoardCallback" in _names(one):
                if hasattr(one, "logging_dir"):
                    one.logging_dir = known["tensorboard"]
                else:  # transformers 4
                    trainer.args.logging_dir = known["tensorboard"]


def runs(trainer: Trainer, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Which runs the Trainer's loggers write to now, by the logger's name. Rank 0 knows."""
    found: dict[str, str | None] = {}
    for one in trainer.callback_handler.callbacks:
        names = _names(one)
        if "WandbCallback" in names:
            found["wandb"] = environ.get("WANDB_RUN_ID")
        elif "MLflowCallback" in names and (run := _module("mlflow").active_run()):
            found["mlflow"] = run.info.run_id
        elif "TensorBoardCallback" in names:
            found["tensorboard"] = getattr(one, "logging_dir", None) or getattr(
                trainer.args, "logging_dir", None
            )
    return {name: run for name, run in found.items() if run}


def close(trainer: Trainer, *, told: bool) -> None:
    """End what loggers leave open until the process ends; `told`: `on_train_end` has been called.

    Only those of Transformers' own, and what is made of them, hear of an end: the training has none yet, and
    what others do then (merge a model, upload it) would be done at each suspension.
    """
    handler = trainer.callback_handler
    for one in () if told else handler.callbacks:
        if any(kind.__module__.startswith("transformers.integrations.") for kind in type(one).__mro__):
            try:
                one.on_train_end(trainer.args, trainer.state, trainer.control, model=handler.model)
            except Exception as error:  # its server is away: what is saved is saved
                say(f"{type(one).__name__}.on_train_end: {error.__class__.__name__}: {error}")
    wandb = sys.modules.get("wandb")
    if any("WandbCallback" in _names(one) for one in handler.callbacks) and wandb is not None:
        with contextlib.suppress(Exception):
            if wandb.run is not None:
                wandb.finish(exit_code=0)  # by itself it would take the process's exit code for a failure


def _names(callback: object) -> set[str]:
    """Names of its class and of those that it is made of."""
    return {kind.__name__ for kind in type(callback).__mro__}


def _module(name: str) -> Any:
    return sys.modules[name]
