"""Programs and ranks see the GPUs that are theirs, and no others. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from hpcsched.contract import driver, variables
from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import Device
from hpcsched.core.processes import KnownLauncher, chooses_gpus, launcher_of
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan

_ONE_EACH = ("--virtual-local-rank", "--virtual_local_rank")
"""With this torchrun shows each of its ranks one of the GPUs that it is shown itself; not all versions have
it."""


def has_parts(devices: Sequence[Device]) -> bool:
    """Whether one of these is a part of a GPU, a MIG instance."""
    return any(device.handle.startswith(CUDA.part) for device in devices)


def own_device(shown: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a rank its own MIG instance only: of several in a list CUDA shows a process the
    first one.

    `shown`: those of that instance. `env`: the environment of all ranks; a choice of the program's stays.
    """
    own = {name: shown[name] for name in (CUDA.variable, variables.CUDA_DEVICES) if name in shown}
    if not own or env.get(CUDA.variable) != env.get(variables.CUDA_DEVICES):
        return {}
    return own | driver.told({**env, **own})


def refuse_other_gpus(plan: LaunchPlan, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises LaunchError for a program that would use GPUs of other jobs, or not all that it holds.

    `argv`, `env`: what is started, and its environment.
    """
    launcher = launcher_of(argv)
    deepspeed = launcher is KnownLauncher.DEEPSPEED
    one_each = plan.per_rank or any(word in _ONE_EACH for word in argv)
    why = ""
    if deepspeed and env.get(CUDA.variable) and chooses_gpus(argv):
        why = "deepspeed with --num_gpus, --include or --exclude takes GPUs of other jobs: leave that out"
    elif launcher is KnownLauncher.ACCELERATE and env.get(CUDA.variable) and _has_gpu_ids(argv):
        why = "accelerate with --gpu_ids takes GPUs of other jobs: leave that out"
    elif deepspeed and has_parts(plan.devices):
        why = "deepspeed takes GPUs by number, which MIG instances do not have: use another launcher"
    elif not one_each and len(plan.devices) > 1 and has_parts(plan.devices):
        why = (
            f"of {len(plan.devices)} MIG instances CUDA shows a process only the first: "
            'say processes = "per-gpu" (to torchrun: --virtual-local-rank) for a rank on each, or gpus = 1'
        )
    if why:
        raise LaunchError(why, transient=False)


def _has_gpu_ids(argv: Sequence[str]) -> bool:
    """Whether an `accelerate launch` names GPUs: it then sets the variable anew."""
    own = takewhile(lambda word: not word.endswith(".py"), argv)  # what follows is the script's
    words = [part for word in own for part in word.split("=", 1)]
    named = [words[i + 1 :][:1] for i, word in enumerate(words) if word in ("--gpu_ids", "--gpu-ids")]
    return any(value != ["all"] for value in named)
