"""Pyxis: a plugin of Slurm's, so a program in its container is a step of our batch job, started by srun.

srun sets variables about tasks and GPUs of its own, which are taken out and put right again inside. It hands
no descriptors on, so no progress is heard, and it does not pass SIGTSTP on: a program hears by the stop file,
or by SIGTERM.
"""

from __future__ import annotations

import re

from hpcsched.contract.visibility import CUDA
from hpcsched.errors import LaunchError
from hpcsched.launch.containers.base import Inside, Outside

_NAME = re.compile(r"[A-Za-z_]\w*")

_OF_THE_STEP = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"),
    *("SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_SRUN_COMM_HOST"),
    *("SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_JOBID"),
)
"""A library that finds these takes each process for rank 0 of 1."""


class Pyxis:
    """`srun --container-image`: an image that Enroot can import, or its file."""

    programs = ("srun",)
    passes_signals = True

    def start(self, inside: Inside, program: str) -> Outside:
        """See `base.Runtime`."""
        if "SLURM_JOB_ID" not in inside.env:
            raise LaunchError("pyxis needs a Slurm job: take enroot here", transient=False)
        for outside, at, _ in inside.mounts:
            if any(letter in outside + at for letter in ":, \t\n"):
                raise LaunchError(
                    f"pyxis cannot mount {outside!r}: no spaces, commas and colons", transient=False
                )
        kept = sorted(name for name in inside.told if _NAME.fullmatch(name))
        shown = [f"{name}={inside.env[name]}" for name in (CUDA.variable, CUDA.order) if name in inside.env]
        argv = [program, "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--unbuffered"]
        if node := inside.env.get("SLURMD_NODENAME"):
            argv.append(f"--nodelist={node}")
        argv += [
            "--export=ALL",
            "--cpu-bind=none",
            f"--container-image={inside.container.image}",
            f"--container-mounts={','.join(':'.join(mount) for mount in inside.mounts)}",
            f"--container-workdir={inside.cwd}",
            f"--container-env={','.join(kept)}",
            *inside.container.options,
            "env",
            *(word for name in _OF_THE_STEP for word in ("-u", name)),
            *shown,
            *inside.argv,
        ]
        return Outside(argv=tuple(argv), env=inside.env)
