"""CPU slots in place of GPUs: `cpu:N` splits the cores that this process may use into N parts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import Device
from hpcsched.devices.base import Sample


def split_cores(cores: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """Contiguous parts of `cores`, whose sizes differ by at most one.

    With fewer cores than slots each slot gets one, in turn. Raises ValueError without a core or a slot.
    """
    if slots < 1 or not cores:
        raise ValueError(f"cannot split {len(cores)} cores over {slots} slots")
    n = len(cores)
    if slots > n:
        return [(cores[i % n],) for i in range(slots)]
    return [tuple(cores[n * i // slots : n * (i + 1) // slots]) for i in range(slots)]


def cpu_list(cores: Sequence[int]) -> str:
    """Ascending cores in Linux's list format, e.g. "0-3,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cpus_of(text: str) -> tuple[int, ...]:
    """The cores of a list in Linux's format."""
    runs = (word.partition("-") for word in text.split(","))
    return tuple(core for first, _, last in runs for core in range(int(first), int(last or first) + 1))


class CpuSlots:
    """The cores of this process's affinity mask in `slots` parts. Raises ValueError for none."""

    speed = 1.0
    kind = "cpu"
    visibility = CUDA

    def __init__(self, slots: int, host: str) -> None:
        self._slots = split_cores(sorted(os.sched_getaffinity(0)), slots)
        self._inventory = tuple(
            Device(index=i, host=host, kind=self.kind, handle=cpu_list(cores))
            for i, cores in enumerate(self._slots)
        )
        self._primed = False

    def inventory(self) -> tuple[Device, ...]:
        return self._inventory

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        # One number serves all ranks of a group, so the smallest slot sets it: one thread too few
        # costs less than one core with two threads, which every rank then waits for.
        threads = str(min((len(self._slots[d.index]) for d in devices), default=1))
        return {**CUDA.hidden(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def numbered(self, devices: Sequence[Device]) -> dict[str, str]:
        return {}

    def cpus(self, device: Device) -> frozenset[int] | None:
        return frozenset(self._slots[device.index])

    def sample(self) -> list[Sample]:
        """The utilisation of each slot's cores, by all processes, since the last call; None at the first."""
        import psutil

        busy = psutil.cpu_percent(interval=None, percpu=True)
        primed, self._primed = self._primed, True
        return [
            Sample(gpu=i, utilisation=_mean([busy[c] for c in cores if c < len(busy)]) if primed else None)
            for i, cores in enumerate(self._slots)
        ]

    def free(self, device: Device) -> bool | None:
        """True: a core keeps nothing of what ran there."""
        return True

    def close(self) -> None:
        """Does nothing: nothing is open."""


def _mean(percents: Sequence[float]) -> float | None:
    return min(1.0, sum(percents) / len(percents) / 100) if percents else None
