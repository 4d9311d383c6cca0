"""When a worker could not use its GPU: whether that is the GPU's fault, or the job's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from hpcsched.agent.attempts import Attempt
from hpcsched.core.events import DeviceLost
from hpcsched.core.machine import Machine
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput
from hpcsched.launch.base import SUSPENDED
from hpcsched.printing import printable

_MOST_BYTES = 4096
_MOST_WHY = 300

_CHANGES = ("CUDA_", "NVIDIA_", "LD_")
"""Variables by which a job can hide GPUs, or their driver, from itself."""


class Unusable(msgspec.Struct, kw_only=True):
    """What the worker says: which GPU, why, and the file of the torch that could not use it."""

    gpu: int
    why: str
    torch: str = ""


def unusable_gpu(attempt: Attempt, code: int, env: Mapping[str, str]) -> Unusable | None:
    """What is wrong with a GPU on which nobody else is to be started; None: it is the job's own affair.

    `code`: what the attempt ended with; a launcher may have made another one of the worker's 69. `env`: the
    job's variables. The job is to blame where it brings a torch of its own, or variables by which
    it may hide the GPU from itself; and once it was ready, it had a GPU.
    """
    if code in (0, SUSPENDED) or attempt.ready or any(name.startswith(_CHANGES) for name in env):
        return None
    try:
        file = attempt.folder / f"unusable.{attempt.attempt}"
        said = decode_file(file, Unusable, most_bytes=_MOST_BYTES)
        ours = importlib.util.find_spec("torch")
        if ours is None or ours.origin is None or not Path(said.torch).samefile(ours.origin):
            return None
    except (OSError, ValueError, ImportError, BadInput):
        return None
    said.why = printable(said.why[:_MOST_WHY])
    return said if said.gpu in attempt.gpus else None


def gpus_lost(attempt: Attempt, code: int, machine: Machine, at: float) -> Iterator[DeviceLost]:
    """The same as an event. Told before the end of the attempt, it makes that end no failure of the job."""
    if found := unusable_gpu(attempt, code, machine.jobs[attempt.job_id].spec.env):
        yield DeviceLost(at=at, gpu=found.gpu, why=found.why)
