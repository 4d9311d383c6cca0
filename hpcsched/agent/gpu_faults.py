"""GPU faults reported by workers: whether the GPU is to blame, or the job."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.contract import files, words
from hpcsched.contract.driver import finds_driver
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.words import Unusable
from hpcsched.core.model import JobSpec, Kind, PythonEnvironment
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.printing import printable

_MAX_WHY_CHARS = 300
_MAX_NAMES_CHARS = 100


class GpuVerdict(msgspec.Struct, frozen=True):
    """The judgement of one report. `lost`: the GPU, if it is to blame; it gets no more jobs."""

    lost: int | None
    why: str


class GpuFaults:
    """The reports of workers about GPUs since this agent started.

    A job is believed once: a broken program would otherwise take out one GPU after the other.
    """

    def __init__(self) -> None:
        self._trained: set[PythonEnvironment | None] = set()
        """The environments whose torch has trained on a GPU."""
        self._believed: dict[int, int] = {}
        """By job the GPU that it has taken out."""

    def note_ready(self, spec: JobSpec) -> None:
        """Note that a job is ready: if it is a trainer, the torch of its environment can use a GPU."""
        if spec.kind is Kind.TRAINER:
            self._trained.add(spec.environment)

    def judge(
        self, attempt: WatchedAttempt, code: int, spec: JobSpec, others: Collection[WatchedAttempt]
    ) -> GpuVerdict | None:
        """The verdict on an attempt that has ended; None if it has reported none of its GPUs.

        `code`: its exit code (a launcher may have changed the worker's NO_GPU). `spec`: the job's. `others`:
        the attempts that run.
        """
        if code in (0, SUSPENDED):
            return None
        try:
            file = attempt.folder / files.unusable(attempt.attempt)
            said = Unusable.decode(read_file(file, most_bytes=words.MOST_BYTES))
        except (OSError, BadInput):
            return None
        if said.gpu not in attempt.gpus:
            return None
        why = printable(said.why[:_MAX_WHY_CHARS])
        if fault := self._fault(said, attempt, spec, others):
            return GpuVerdict(
                None, f"GPU {said.gpu} cannot be used: {why}; the job's own failure, as {fault}"
            )
        self._believed[attempt.job_id] = said.gpu
        return GpuVerdict(said.gpu, why)

    def _fault(
        self, said: Unusable, attempt: WatchedAttempt, spec: JobSpec, others: Collection[WatchedAttempt]
    ) -> str:
        """Why the job is to blame; "" if the GPU is."""
        if attempt.ready:
            return "it was ready, so it had a GPU"
        if own := sorted(filter(finds_driver, spec.env)):
            return f"it sets {_listed(own)}"
        known = spec.kind is Kind.TRAINER and spec.environment in self._trained
        if not (known or _is_ours(said.torch)):
            return "it has another torch than hpcsched"
        if said.changed:
            return f"its program has changed {_listed(said.changed)}"
        if (before := self._believed.get(attempt.job_id)) is not None:
            return f"it could not use GPU {before} either"
        beside = [other.job_id for other in others if other.ready and said.gpu in other.gpus]
        return f"job {beside[0]} works on it" if beside else ""


def _is_ours(torch: str) -> bool:
    """Whether this file is of the torch that hpcsched's own Python would import."""
    try:
        ours = importlib.util.find_spec("torch")
        return ours is not None and ours.origin is not None and Path(torch).samefile(ours.origin)
    except (OSError, ValueError, ImportError):
        return False


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names)[:_MAX_NAMES_CHARS])
