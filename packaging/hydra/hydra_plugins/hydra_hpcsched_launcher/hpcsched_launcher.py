"""The launcher. Hydra imports this module in every program it runs: what is heavy is imported in `launch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hydra_plugins.hydra_hpcsched_launcher._run import SweepRun


class HpcschedLauncher(Launcher):
    """Jobs of a sweep as jobs of an hpcsched run: one array for each call of `launch`.

    The arguments are those of `HpcschedLauncherConf`; `keys` are keys of a job file.
    """

    def __init__(
        self,
        dir: str | None = None,
        wait_for_agent: str = "1h",
        run: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        self.dir, self.wait_for_agent, self.options, self.keys = dir, wait_for_agent, run or {}, keys
        self._run: SweepRun | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives each launcher."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one batch of jobs and wait for all of them; what each has returned or raised, in order.

        Raises CompactHydraException, one line, for what hpcsched does not accept.
        """
        from hpcsched.errors import HpcschedError
        from hydra_plugins.hydra_hpcsched_launcher._launch import launch
        from hydra_plugins.hydra_hpcsched_launcher._run import SweepRun

        try:
            if self._run is None or self._run.over:
                self._run = SweepRun.open(self.dir, self.options, self.wait_for_agent)
            return launch(self, self._run, job_overrides, initial_job_idx)
        except HpcschedError as error:
            raise CompactHydraException(f"hpcsched: {error}") from error
