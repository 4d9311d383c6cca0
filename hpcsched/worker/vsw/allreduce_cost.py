"""How long a sum over the ranks takes, by its length (JABAS, Eq. 3)."""

from __future__ import annotations

import time
from statistics import median

import torch

from hpcsched.planning.vsw.costs import AllReduceCost, fit_line
from hpcsched.worker.ranks.process_group import Peers

LENGTHS = 6
REPEATS = 4
"""The first of which counts for nothing."""


def measure_line(peers: Peers, device: torch.device, largest: int) -> AllReduceCost:
    """Time sums of up to `largest` bytes, all ranks together; each gets what it has measured itself."""
    points = []
    for number in range(LENGTHS):
        size = max(1024, largest >> (2 * number)) // 4
        tensor = torch.zeros(size, dtype=torch.float32, device=device)
        times = []
        for _ in range(REPEATS):
            peers.agree(False)  # that none waits for another one
            began = time.perf_counter()
            work = peers.sum_async(tensor)
            if work is not None:
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        points.append((4 * size * 2 * (peers.world_size - 1) / peers.world_size, median(times[1:])))
    return fit_line(points)
