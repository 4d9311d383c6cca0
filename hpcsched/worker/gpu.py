"""Whether the GPUs that this process was given can be used, and whether it has begun to use the driver.

`python -m hpcsched.worker.gpu` multiplies two matrices on the first visible GPU; one line of JSON says how it
went. It is for `hpcsched doctor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import warnings
from typing import Any, NoReturn

from hpcsched.contract import files
from hpcsched.contract.driver import changed
from hpcsched.contract.exits import NO_GPU
from hpcsched.contract.variables import CUDA_DEVICES
from hpcsched.contract.visibility import CUDA
from hpcsched.contract.words import Unusable
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import surroundings

_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what the driver answers before `cuInit`, without doing anything."""

_MOST_NAMES, _MOST_NAME = 8, 64
"""How many variables are named as changed, and how much of each name."""

_NOT_THE_GPUS = ("out of memory", "busy", "forked subprocess")
"""In a complaint: whoever else is on the GPU is in the way, and may be gone soon; or the program has used the
driver before it made this process, where it cannot be used for that reason."""


def driver_in_use() -> bool:
    """Whether this process has called CUDA's `cuInit`, which reads once for its life which GPUs it sees.

    The driver itself is asked: torch does not know of all calls (a backward pass asks it for the number of
    GPUs on models that are on the CPU), and its library is loaded by `import torch` already.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # not loaded
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def device_files_open() -> bool:
    """Whether this process has a file of the GPUs' driver open."""
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(CUDA.device_files):  # noqa: PTH115
                return True
    return False


def given() -> tuple[str, ...]:
    """The names of the GPUs that the agent has given; () also where the program has chosen others itself."""
    told, now = surroundings().get(CUDA_DEVICES, ""), surroundings().get(CUDA.variable, "")
    return tuple(told.split(",")) if told and told == now else ()


def chosen() -> str | None:
    """The GPUs that the program has named itself, where they are not those that it was given; None if they
    are."""
    told, now = surroundings().get(CUDA_DEVICES, ""), surroundings().get(CUDA.variable, "")
    return now if told and now != told and now not in CUDA.none else None


def why_unusable(number: int) -> str | None:
    """Why torch cannot use the GPU that it would call `cuda:number`; None if it can, which makes a context.

    Raises RuntimeError (torch's own) where the program, or others on the GPU, are the cause.
    """
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            if (seen := torch.cuda.device_count()) <= number:
                return f"torch {torch.__version__} sees {seen} of the GPUs given"
            torch.cuda.synchronize(number)
    except RuntimeError as error:
        said = (str(error).splitlines() or [repr(error)])[0]
        if any(word in said for word in _NOT_THE_GPUS):
            raise
        return f"torch {torch.__version__}: {said}"
    return None


def leave_unusable(env: JobEnv | None, number: int, why: str) -> NoReturn:
    """End this process since torch cannot use `cuda:number`, and have the agent know which GPU that is."""
    import torch

    name = CUDA.short(given()[number])
    if env is not None and env.devices and not env.joining:
        each = len(env.devices) // env.world_size  # more than one where a process has several
        with contextlib.suppress(OSError, ValueError, IndexError):  # without a word it is the job's fault
            index = int(env.devices[env.rank * each])
            name = f"{index} ({name})"
            word = Unusable(
                gpu=index,
                why=why,
                torch=torch.__file__,
                changed=tuple(name[:_MOST_NAME] for name in changed(surroundings())[:_MOST_NAMES]),
            )
            env.leave_word(files.unusable(env.attempt), word.encode())
    say(f"GPU {name} cannot be used: {why}")
    raise SystemExit(NO_GPU)


def multiplied() -> dict[str, Any]:
    """What became of a small product on the first visible GPU: `ok`, and `found` in words."""
    import torch

    try:
        if (why := why_unusable(0)) is not None:
            return {"ok": False, "found": why}
        a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        error = float(((a.cuda() @ b.cuda()).cpu() - a @ b).abs().max())
    except RuntimeError as error_:
        return {"ok": False, "found": f"torch {torch.__version__}: {str(error_).splitlines()[0]}"}
    name = torch.cuda.get_device_name(0)
    if not error < 1e-9:
        return {"ok": False, "found": f"torch {torch.__version__} multiplies wrongly on {name}, by {error}"}
    return {"ok": True, "found": f"torch {torch.__version__} computes on {name}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(multiplied()) + "\n")
