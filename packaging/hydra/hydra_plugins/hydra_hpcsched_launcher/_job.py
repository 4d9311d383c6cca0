"""What runs in a job: one configuration of a sweep, as Hydra's own launcher would run it."""

from __future__ import annotations

from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hpcsched import Link
from hpcsched.worker.call import numbers


class HydraJob:
    """The program of a sweep, to be called in another process with the configuration of one job."""

    def __init__(self, name: str, hydra_context: HydraContext, task_function: TaskFunction) -> None:
        self.__name__ = name  # what the jobs are called
        self._hydra_context, self._task_function = hydra_context, task_function
        self._singletons: Any = Singleton.get_state()

    def __call__(self, config: DictConfig) -> JobReturn:
        """Run it. Raises what the program raises, so that the job fails."""
        Singleton.set_state(self._singletons)
        setup_globals()
        ended = run_job(
            hydra_context=self._hydra_context,
            task_function=self._task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if metrics := numbers(ended.return_value):
            Link().finish(metrics)
        return ended
