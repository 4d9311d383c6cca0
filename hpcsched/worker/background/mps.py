"""Two processes on one GPU through NVIDIA's multi-process service. No torch.

The first job of a run that needs it begins the daemon, in an environment that is not the job's; the agent
ends it with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hpcsched.contract.variables import LANE_MODE, LOCAL_RANK, RUN_ID
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import ConfigError
from hpcsched.mps_control import CONTROL as CONTROL
from hpcsched.mps_control import Daemon, MpsError, daemon_for
from hpcsched.worker.background import settings

BACKGROUND_PERCENT = "50"
"""Of the processors, what a background job may use at most, unless its environment says otherwise."""


def daemon(environ: Mapping[str, str]) -> Daemon:
    """The daemon that serves the GPU of this process."""
    names = [name.strip() for name in environ.get(CUDA.variable, "").split(",")]
    rank = int(environ.get(LOCAL_RANK) or 0)
    return daemon_for(environ.get(RUN_ID, "none"), names[rank] if rank < len(names) else names[0])


def variables(environ: Mapping[str, str], *, lane: str) -> dict[str, str]:
    """What a client of the daemon needs in its environment before it touches the GPU.

    `lane`: as `settings.lane` has it. Raises ConfigError where the limit of its memory makes no sense.
    """
    found = {
        **daemon(environ).variables(),
        "CUDA_MPS_CLIENT_PRIORITY": "1" if lane == "background" else "0",  # 1 is below normal
    }
    if lane == "background":
        percent = environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or BACKGROUND_PERCENT
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
    if lane != "foreground" and (most := settings.memory_mib(environ)) is not None:
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={most}M"
    return found


def use(environ: MutableMapping[str, str], *, lane: str) -> None:
    """Make this process a client, with a daemon for it where none runs yet.

    Raises ConfigError when the daemon is not installed, or does not start.
    """
    ours = variables(environ, lane=lane)
    try:
        daemon(environ).start(environ)
    except MpsError as error:
        accepted = "a host where its users may start it, or another mode"
        raise ConfigError(
            where="environment", key=f"{LANE_MODE}=mps", got=str(error), accepted=accepted
        ) from error
    environ.update(ours)
