"""Times on the device of a part, and programs that a part runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from gpu_day.found import Found

SLICES = 5


def device_of(found: Found) -> torch.device:
    """The first GPU; the CPU, with one thread, where there is none."""
    if found.cpu:
        torch.set_num_threads(1)
        return torch.device("cpu")
    return torch.device("cuda", 0)


def settle(device: torch.device) -> None:
    """Wait until all that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, *, window_s: float = 0.5) -> float:
    """Seconds that `work` takes on the device, called again and again: the median of some slices."""
    for _ in range(2):
        work()
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    count = max(1, round(window_s / SLICES / max(time.perf_counter() - began, 1e-7)))
    taken = []
    for _ in range(SLICES):
        began = time.perf_counter()
        for _ in range(count):
            work()
        settle(device)
        taken.append((time.perf_counter() - began) / count)
    return median(taken)


def run_program(
    command: Sequence[str], *, within_s: float, env: Mapping[str, str] | None = None, quiet: bool = False
) -> tuple[int | None, str]:
    """The exit code of a program, and what it has printed if `quiet`; else that goes to the part's log.

    After `within_s`, or when the part is ended, it gets SIGTERM and 5 s later SIGKILL; the code is None then.
    """
    output = subprocess.PIPE if quiet else None
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=sys.stdout, env=env, text=True
    )
    try:
        said, _ = child.communicate(timeout=max(1.0, within_s))
        return child.returncode, said or ""
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
