"""Two processes on one GPU through NVIDIA's multi-process service, run as this user. No torch.

The daemon's pipe and log folders are private ones in the host's own temporary directory, one for each run: a
cluster's file system has no pipes, and other runs of this user must not meet there. It has the run's id in
its environment, so it ends with the run, as all of its processes do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hpcsched.contract.variables import LANE_MODE, RUN_ID
from hpcsched.errors import ConfigError

CONTROL = "nvidia-cuda-mps-control"
START_WITHIN_S = 20.0
BACKGROUND_PERCENT = "50"
"""Of the processors, what a background job may use at most, unless its environment says otherwise."""


def folder(environ: Mapping[str, str]) -> Path:
    """Where this run's daemon has its pipes and logs on this host."""
    return Path(tempfile.gettempdir()) / f"hpcsched-mps-{os.getuid()}-{environ.get(RUN_ID, 'none')}"


def variables(environ: Mapping[str, str], *, background: bool) -> dict[str, str]:
    """What a client of the daemon needs in its environment before it touches the GPU."""
    home = folder(environ)
    found = {
        "CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(home / "log"),
        "CUDA_MPS_CLIENT_PRIORITY": "1" if background else "0",  # 1 is below normal
    }
    if background:
        percent = environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or BACKGROUND_PERCENT
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
    return found


def use(environ: MutableMapping[str, str], *, background: bool) -> None:
    """Make this process a client, with a daemon for it where none runs yet.

    Raises ConfigError when the daemon is not installed, or does not start.
    """

    def refuse(got: str) -> ConfigError:
        accepted = "a host where its users may start it, or another mode"
        return ConfigError(where="environment", key=f"{LANE_MODE}=mps", got=got, accepted=accepted)

    program = shutil.which(CONTROL, path=environ.get("PATH"))
    if program is None:
        raise refuse(f"no {CONTROL} here")
    ours = variables(environ, background=background)
    try:
        home = folder(environ)
        home.mkdir(exist_ok=True, mode=0o700)
        if home.lstat().st_uid != os.getuid() or home.is_symlink():
            raise refuse(f"{home} is somebody else's")
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            Path(ours[name]).mkdir(exist_ok=True, mode=0o700)
        done = subprocess.run(
            [program, "-d"],
            env={**environ, **ours},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise refuse(f"{CONTROL}: {error}") from error
    # A daemon that runs already, perhaps since a moment ago, makes a second one end with an error.
    if done.returncode != 0 and not (home / "pipe" / "control").exists():
        raise refuse((done.stderr or done.stdout).decode(errors="replace").strip() or f"{CONTROL} failed")
    environ.update(ours)
