"""Groups of one rank, made and ended again and again: what a group leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gpu_day.found import Found
from gpu_day.timing import device_of, settle
from hpcsched.worker.ranks.process_group import Peers

TIMES, CPU_TIMES = 20, 4
GROWTH_MIB, THREADS = 2.0, 1


def run(found: Found) -> None:
    """By torch alone, destroyed and aborted; then as a session does (NCCL on a GPU, gloo on the CPU)."""
    device = device_of(found)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.ones(1, device=device)
    for name, once in (("destroy", _destroyed), ("abort", _aborted), ("peers", _peers)):
        with found.trying(name):
            _again_and_again(found, name, once, device)


def _again_and_again(
    found: Found, name: str, once: Callable[[torch.device], float], device: torch.device
) -> None:
    seconds, threads, memory = [], [], []
    for _ in range(CPU_TIMES if found.cpu else TIMES):
        seconds.append(once(device))
        settle(device)
        threads.append(len(list(Path("/proc/self/task").iterdir())))
        memory.append(0.0 if found.cpu else _used_mib())
    found.number(**{f"{name}_init_s": seconds, f"{name}_threads": threads, f"{name}_used_mib": memory})
    early = min(3, len(memory) - 1)  # what is made once is made by then
    grown, more = memory[-1] - memory[early], threads[-1] - threads[early]
    kept = None if found.cpu else grown <= GROWTH_MIB
    found.check(f"{name}: GPU memory grows by", f"<= {GROWTH_MIB:g} MiB", f"{grown:.1f} MiB", kept)
    found.check(f"{name}: threads more", f"<= {THREADS}", more, more <= THREADS)
    took_s = median(seconds[1:])
    found.speed(f"{name}: a group is made in", "<= 1 s", f"{took_s * 1e3:.0f} ms", took_s <= 1)


def _made(device: torch.device) -> float:
    """Seconds that it takes to make a group and to have it add up something."""
    stores: Any = dist
    began = time.perf_counter()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=stores.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    dist.all_reduce(torch.ones(1024, device=device))
    settle(device)
    return time.perf_counter() - began


def _destroyed(device: torch.device) -> float:
    took_s = _made(device)
    dist.destroy_process_group()
    return took_s


def _aborted(device: torch.device) -> float:
    took_s = _made(device)
    group: Any = dist.group.WORLD
    if device.type == "cuda":
        group.abort()
    dist.destroy_process_group()
    return took_s


def _peers(device: torch.device) -> float:
    began = time.perf_counter()
    peers = Peers.join(None, device, alone=True)
    dist.all_reduce(torch.ones(1024, device=device))
    settle(device)
    took_s = time.perf_counter() - began
    peers.close()
    return took_s


def _used_mib() -> float:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
