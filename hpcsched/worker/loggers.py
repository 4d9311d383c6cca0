"""Loggers that go on in one run over all attempts of a job: TensorBoard, Weights & Biases, MLflow.

    from hpcsched.worker import loggers

    logger = loggers.WandB(project="cifar")
    logger.log({"loss": loss}, step)
    logger.close()

Each imports its package when it is made, begins its run with the first `log`, and logs on rank 0 only.
Without hpcsched they begin a run at each start, as these packages do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, SupportsFloat

from hpcsched.contract.environment import Environment
from hpcsched.contract.ranks import own_rank
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import surroundings

TAG = "hpcsched.job"
"""The tag by which MLflow finds a job's run."""

FOLDER = "tensorboard"
"""In the job's folder."""


def run_id() -> str | None:
    """An id for this job's run in a logger, the same in all its attempts and no other job's; None without
    hpcsched. Letters, digits and a hyphen."""
    told = Environment.from_environ(surroundings())
    return f"{told.run_id}-{told.job_id}" if told.run_id and told.job_id is not None else None


def mlflow_run(experiment: str) -> str | None:
    """MLflow's id of this job's run in an experiment; both are made if need be.

    For what is told an id, such as Lightning's MLFlowLogger. None without hpcsched, and on other ranks than
    0. An id that MLFLOW_RUN_ID says goes first. Raises what MLflow raises.
    """
    own = run_id()
    if not _logs() or own is None or "MLFLOW_RUN_ID" in os.environ:
        return os.environ.get("MLFLOW_RUN_ID")
    mlflow = import_module("mlflow")
    where = mlflow.set_experiment(experiment).experiment_id
    client = mlflow.MlflowClient()
    found = client.search_runs([where], f"tags.`{TAG}` = '{own}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    name = Environment.from_environ(surroundings()).job_name
    return str(client.create_run(where, tags={TAG: own}, run_name=name).info.run_id)


class Logger:
    """What the loggers here have in common; on other ranks than 0 it does nothing.

    A logger that fails, because its server is away or the disk is full, says so once, and the training goes
    on without it.
    """

    def __init__(self) -> None:
        self._on = _logs()

    def log(self, metrics: Mapping[str, SupportsFloat | None], step: int) -> None:
        """Log metrics by name after `step` steps in all; None is passed over."""
        if self._on:
            numbers = {name: float(value) for name, value in metrics.items() if value is not None}
            try:
                self._log(numbers, step)
            except Exception as error:  # of any kind of server
                self._on = False
                why = " ".join(str(error).split())
                say(f"{type(self).__name__} logs no more: {type(error).__name__}: {why}")

    def close(self) -> None:
        """Write out what is left, at the end and before leaving; a second time it does nothing."""
        on, self._on = self._on, False
        if on:
            self._close()

    def _log(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


class TensorBoard(Logger):
    """TensorBoard, in one folder: `hpcsched-run/jobs/ID/tensorboard`, if none is given.

    `more` is what `torch.utils.tensorboard.SummaryWriter` takes. What a later attempt logs replaces what was
    logged of the same and later steps, so steps that are done again after a crash are seen once.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None, **more: Any) -> None:
        super().__init__()
        self._writer: Any = None
        env = JobEnv.from_environ()
        if dir is None and env is not None:
            dir = env.job_dir / FOLDER
        self._dir, self._more = dir, more
        self._again = env is not None and env.attempt > 1
        self._make = import_module("torch.utils.tensorboard").SummaryWriter if self._on else None

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if self._writer is None:
            assert self._make is not None  # on rank 0
            if self._again:
                self._more.setdefault("purge_step", step)
            self._writer = self._make(self._dir, **self._more)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Logger):
    """Weights & Biases, in one run; `init` is what `wandb.init` takes.

    The run's id is `run_id`, unless `init` or WANDB_RUN_ID says another. W&B takes no step that is behind the
    newest one of a run: of steps that are done again after a crash it keeps what it was told first, and a
    line says so.
    """

    def __init__(self, project: str | None = None, **init: Any) -> None:
        super().__init__()
        self._init: dict[str, Any] = {"project": project, **init}
        self._wandb = import_module("wandb") if self._on else None
        self._run: Any = None
        self._least = 0
        self._said = False

    @property
    def run(self) -> Any:
        """What `wandb.init` returns, which is called now if it was not yet; None on other ranks."""
        if self._run is None and self._wandb is not None:
            init = self._init
            if (own := run_id()) is not None:
                if "WANDB_RUN_ID" not in os.environ:
                    init.setdefault("id", own)
                if "WANDB_RESUME" not in os.environ and "resume_from" not in init:
                    init.setdefault("resume", "allow")
                if "WANDB_NAME" not in os.environ:
                    init.setdefault("name", Environment.from_environ(surroundings()).job_name)
            self._run = self._wandb.init(**init)
            self._least = self._run.step
        return self._run

    def _log(self, metrics: dict[str, float], step: int) -> None:
        run = self.run
        if step >= self._least:
            run.log(metrics, step=step)
        elif not self._said:
            self._said = True
            say(f"W&B keeps what it has of the steps before {self._least}, also of those that are done again")

    def _close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0)


class MLflow(Logger):
    """MLflow, in one run, found by the tag `hpcsched.job`; `start` is what `mlflow.start_run` takes.

    Where is MLflow's affair: MLFLOW_TRACKING_URI and so on. MLflow adds to what it has: of steps that are
    done again after a crash it keeps both values.
    """

    def __init__(self, experiment: str, **start: Any) -> None:
        super().__init__()
        self._experiment, self._start = experiment, start
        self._mlflow = import_module("mlflow") if self._on else None
        self._run: Any = None

    @property
    def run(self) -> Any:
        """What `mlflow.start_run` returns, which is called now if it was not yet; None on other ranks.

        It is the active run, so `mlflow.log_params` and others work after this.
        """
        if self._run is None and self._mlflow is not None:
            self._mlflow.set_experiment(self._experiment)
            if (found := mlflow_run(self._experiment)) is not None:
                self._start.setdefault("run_id", found)
            self._run = self._mlflow.start_run(**self._start)
        return self._run

    def _log(self, metrics: dict[str, float], step: int) -> None:
        run, mlflow = self.run, self._mlflow
        assert mlflow is not None  # on rank 0
        metric, now = mlflow.entities.Metric, int(time.time() * 1000)
        values = [metric(name, value, now, step) for name, value in metrics.items()]
        mlflow.MlflowClient().log_batch(run.info.run_id, values)

    def _close(self) -> None:
        if self._run is not None and self._mlflow is not None:
            self._mlflow.end_run()


def _logs() -> bool:
    return own_rank(surroundings()).rank == 0
