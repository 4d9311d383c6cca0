"""What stands under `hydra.launcher` with `hydra/launcher: hpcsched`."""

# Annotations are types here, not texts: Hydra runs plugins before they are among `sys.modules`, where texts
# would be looked up.
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class RunConf:
    """Options of `hpcsched run`, for the agent that is started where there is no run; null: as there.

    Others are added with a plus: `+hydra.launcher.run.warm=off`.
    """

    devices: str | None = None
    policy: str | None = None
    profiles: Any = None
    idle_timeout: str = "10m"


@dataclass
class HpcschedLauncherConf:
    """Where the jobs of a sweep run, and the keys of a job file that all of them have; null: as there.

    `wait_for_agent`: so long a sweep waits where no agent runs (any more) in a run that was there before it.
    """

    _target_: str = "hydra_plugins.hydra_hpcsched_launcher.hpcsched_launcher.HpcschedLauncher"
    dir: str | None = None
    wait_for_agent: str = "1h"
    run: RunConf = field(default_factory=RunConf)
    # Keys of a job file. What may be of several types is checked where job files are.
    name: str | None = None
    at_once: int | None = None
    gpus: Any = None
    nodes: int | None = None
    gpu_type: str | None = None
    gpu_memory: str | None = None
    memory: str | None = None
    cpus_per_gpu: int | None = None
    time: str | None = None
    modules: Any = None
    env: dict[str, Any] = field(default_factory=dict)
    processes: Any = None
    strategy: Any = None
    model: str | None = None
    steps: int | None = None
    after: Any = None
    retries: int | None = None
    background: bool | None = None
    max_foreground_slowdown: float | None = None
    output: str | None = None
    checkpoint_every: str | None = None
    keep_checkpoints: int | None = None
    restartable: bool | None = None
    suspend_signal: str | None = None
    saved_exit_codes: Any = None
    batch: str | None = None
    progress_pattern: str | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="hpcsched", node=HpcschedLauncherConf, provider="hydra-hpcsched-launcher"
)
