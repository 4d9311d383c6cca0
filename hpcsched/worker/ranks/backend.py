"""Which backend of torch.distributed carries tensors between ranks, and how its groups begin and end.

NCCL on GPUs, gloo on CPUs. What NCCL asks for, and gloo does not: whatever a group is given comes in the same
order on all its ranks, and so does what several groups on one GPU are given; a group is made by all its ranks
together, with no limit in time; `destroy_process_group` waits for all of them too, so groups are aborted
instead, by everyone, when nothing of theirs is on its way any more.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcsched.contract import variables
from hpcsched.errors import ConfigError, LaunchError
from hpcsched.worker.process.guest import surroundings

GLOO, NCCL = "gloo", "nccl"

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

_LOOK_S = 0.001


def backend_for(device: torch.device) -> str:
    """The backend for tensors on this device, or the one that `variables.RANKS_BACKEND` names.

    Raises ConfigError for one that this torch does not have, or not for this device.
    """
    named = surroundings().get(variables.RANKS_BACKEND, "")
    if not named:
        return NCCL if device.type == "cuda" else GLOO
    # torch itself also knows capital letters, `undefined` and one backend for each kind of device: words that
    # would be taken for another backend where we ask which one it is.
    known = named in dist.Backend.backend_list and named != dist.Backend.UNDEFINED
    if not known or not dist.is_backend_available(named) or (named == NCCL and device.type != "cuda"):
        accepted = ", ".join(
            name
            for name in (GLOO, NCCL)
            if dist.is_backend_available(name) and (name != NCCL or device.type == "cuda")
        )
        raise ConfigError(
            where="environment", key=variables.RANKS_BACKEND, got=repr(named), accepted=accepted
        )
    return named


def ranks_share_gpus() -> bool:
    """Whether several ranks may be on one GPU: only where `variables.RANKS_BACKEND` says `gloo`."""
    return surroundings().get(variables.RANKS_BACKEND) == GLOO


def order_launches() -> None:
    """To be called before the first group is made, where ranks will use several: what these are given starts
    on a GPU in the order of calls, which is the same on all ranks. NCCL before 2.26 does not know this."""
    os.environ.setdefault(_LAUNCH_ORDER, "1")


def connect_now(device: torch.device) -> None:
    """Do what a group's first message would have to do: NCCL opens its connections then, for a while."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def patience_can_change() -> bool:
    """Whether `set_patience` works: in torches before it was public, gloo's sums kept to the first one."""
    return hasattr(dist.ProcessGroup, "set_timeout")


def set_patience(group: Any, seconds: float) -> None:
    """From now on wait so long for the ranks of a group."""
    group.set_timeout(timedelta(seconds=seconds))


def settle(device: torch.device, within_s: float) -> None:
    """Wait until the GPU has done all that it was given so far: then nothing of ours is on its way.

    Raises LaunchError if it takes longer; what is on the GPU then is of no use.
    """
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + within_s
    while not done.query():
        if time.monotonic() > deadline:
            raise LaunchError(f"{device} has not ended its work within {within_s:g} s", transient=True)
        time.sleep(_LOOK_S)


def end_groups() -> None:
    """Forget all groups of this process, whatever their other ranks do.

    Those that are still on their way are lost: call `settle` before, on all ranks.
    """
    if dist.get_backend() == GLOO or not hasattr(distributed_c10d, "_abort_process_group"):
        dist.destroy_process_group()  # which aborts NCCL's groups in torch 2.4
    else:
        # Named, as without a name torch 2.5 to 2.7 abort the default group alone, and still have one.
        distributed_c10d._abort_process_group(dist.group.WORLD)
