"""Which GPUs a program or a rank sees, and which programs would see others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.contract.driver import changed
from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.own_gpus import own_device, refuse_other_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


def plan(argv: tuple[str, ...], handles: tuple[str, ...], *, per_rank: bool = False) -> LaunchPlan:
    devices = tuple(Device(index=i, host="h", kind="k", handle=handle) for i, handle in enumerate(handles))
    folder = Path("/nowhere")
    return LaunchPlan(
        job_id=1,
        attempt=1,
        argv=argv,
        cwd=folder,
        folder=folder,
        output=folder,
        devices=devices,
        per_rank=per_rank,
    )


def refused(argv: tuple[str, ...], handles: tuple[str, ...], *, per_rank: bool = False) -> str:
    try:
        refuse_other_gpus(plan(argv, handles, per_rank=per_rank), argv, {VISIBLE: ",".join(handles)})
    except LaunchError as error:
        assert not error.transient
        return str(error)
    return ""


GPUS, PARTS = ("GPU-a", "GPU-b"), ("MIG-a", "MIG-b")


@pytest.mark.parametrize(
    ("argv", "handles", "per_rank", "says"),
    [
        (("deepspeed", "t.py"), GPUS, False, ""),
        (("deepspeed", "--num_gpus=2", "t.py"), GPUS, False, "takes GPUs of other jobs"),
        (("deepspeed", "t.py"), PARTS, False, "MIG instances do not have"),
        (("accelerate", "launch", "--gpu_ids", "all", "t.py"), GPUS, False, ""),
        (("accelerate", "launch", "--gpu_ids=all", "t.py"), GPUS, False, ""),
        (("accelerate", "launch", "--gpu_ids", "0,1", "t.py"), GPUS, False, "takes GPUs of other jobs"),
        (("accelerate", "launch", "--gpu_ids=0", "t.py"), GPUS, False, "takes GPUs of other jobs"),
        (("accelerate", "launch", "t.py", "--gpu_ids", "0"), GPUS, False, ""),
        (("python", "t.py", "--gpu_ids", "0"), GPUS, False, ""),
        (("python", "t.py"), GPUS, False, ""),
        (("python", "t.py"), PARTS, True, ""),
        (("python", "t.py"), PARTS[:1], False, ""),
        (("python", "t.py"), PARTS, False, "of 2 MIG instances CUDA shows a process only the first"),
        (("torchrun", "t.py"), PARTS, False, 'processes = "per-gpu"'),
        (("torchrun", "--virtual-local-rank", "t.py"), PARTS, False, ""),
    ],
)
def test_what_would_see_other_gpus_or_not_all_is_refused(
    argv: tuple[str, ...], handles: tuple[str, ...], per_rank: bool, says: str
) -> None:
    told = refused(argv, handles, per_rank=per_rank)
    assert (says in told) if says else not told
    assert "\n" not in told


def test_a_rank_is_shown_its_own_instance() -> None:
    env = {VISIBLE: "MIG-a,MIG-b", "HPCSCHED_CUDA_DEVICES": "MIG-a,MIG-b", "HOME": "/h"}
    shown = {VISIBLE: "MIG-b", "HPCSCHED_CUDA_DEVICES": "MIG-b", "OMP_NUM_THREADS": "2"}
    own = own_device(shown, env)
    assert (own[VISIBLE], own["HPCSCHED_CUDA_DEVICES"]) == ("MIG-b", "MIG-b")
    assert "OMP_NUM_THREADS" not in own, "that one is of all ranks"
    assert changed({**env, **own}) == [], "the program has not changed it"


def test_what_a_job_says_itself_is_left_to_it() -> None:
    env = {VISIBLE: "MIG-c", "HPCSCHED_CUDA_DEVICES": "MIG-a,MIG-b"}
    assert own_device({VISIBLE: "MIG-b", "HPCSCHED_CUDA_DEVICES": "MIG-b"}, env) == {}
    assert own_device({}, env) == {}, "devices that are not shown"
