"""What jobs have used, as it was measured: `job-use.jsonl` of a run directory.

A line is what an attempt used since its line before, so lines are added up. There is one when an attempt is
over, and one of each that runs in every ten minutes; a file that has become too long gets no more.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcsched.store.json_lines import append_lines, read_lines

MOST_BYTES = 2**25
"""The longest that the file gets (chosen): some 200 000 lines."""

_SUMS = ("gpu_s", "busy_gpu_s", "energy_j", "energy_gpu_s", "cpu_s", "cpu_over_s")
_Number = Annotated[float, Meta(ge=0, le=1e15)]
_Mib = Annotated[float, Meta(ge=0, le=2.0**40)]


class JobUse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was measured of a job; times are in seconds of the run's clock.

    `gpu_s` are the GPU-seconds for which the utilisation of its GPUs was sampled, and `busy_gpu_s` those of
    them for which they were busy. `energy_j` is what its GPUs took in `energy_gpu_s` GPU-seconds, in joules.
    `cpu_s` are the CPU-seconds of its processes in `cpu_over_s` seconds, and `memory_mib` the most memory
    that these had resident at once (0: none was seen); both where they run on the agent's host.

    Job 0 is nobody alone: with `shared` the GPUs that several jobs had at once, else those that none had.
    """

    job: Annotated[int, Meta(ge=0)]
    attempt: Annotated[int, Meta(ge=0)] = 0
    shared: bool = False
    gpu_s: _Number = 0.0
    busy_gpu_s: _Number = 0.0
    energy_j: _Number = 0.0
    energy_gpu_s: _Number = 0.0
    cpu_s: _Number = 0.0
    cpu_over_s: _Number = 0.0
    memory_mib: _Mib = 0.0

    def add(self, other: JobUse) -> None:
        """Add what was measured at another time."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory_mib = max(self.memory_mib, other.memory_mib)

    def take_off(self, other: JobUse) -> None:
        """Take off what was measured before a time, and is in this."""
        for name in _SUMS:
            setattr(self, name, max(0.0, getattr(self, name) - getattr(other, name)))

    @property
    def nothing(self) -> bool:
        """Whether nothing was measured."""
        return not (self.gpu_s or self.energy_gpu_s or self.cpu_over_s)

    @property
    def utilisation(self) -> float | None:
        """The share of the sampled time for which its GPUs were busy; None: none was sampled."""
        return min(1.0, self.busy_gpu_s / self.gpu_s) if self.gpu_s else None


def append(path: Path, uses: list[JobUse]) -> None:
    """Add lines; never raises: a run does not end because nobody can see later what its jobs have used."""
    if measured := [use for use in uses if not use.nothing]:
        with contextlib.suppress(OSError):
            append_lines(path, measured, most_bytes=MOST_BYTES)


def read(path: Path) -> dict[tuple[int, bool], JobUse]:
    """What each job used, by its id and whether it is of several at once; nothing without such a file.

    Lines that cannot be decoded are left out. Raises StoreError if the file cannot be read.
    """
    found: dict[tuple[int, bool], JobUse] = {}
    for use in read_lines(path, JobUse, most_bytes=2 * MOST_BYTES):
        found.setdefault((use.job, use.shared), JobUse(job=use.job, shared=use.shared)).add(use)
    return found


def read_attempts(path: Path) -> dict[tuple[int, int], JobUse]:
    """The same of each attempt, by its job's id and its number, of what was not several jobs' at once."""
    found: dict[tuple[int, int], JobUse] = {}
    for use in read_lines(path, JobUse, most_bytes=2 * MOST_BYTES):
        if not use.shared:
            key = use.job, use.attempt
            found.setdefault(key, JobUse(job=use.job, attempt=use.attempt)).add(use)
    return found
