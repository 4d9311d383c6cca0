"""One job of 2 GB suspended and resumed 100 times: nothing may grow, nothing get slow."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from common import percentile

from gpu_day.device import Gpus
from gpu_day.found import Found
from gpu_day.live import LiveRun, job, processes

TIMES, CPU_TIMES = 100, 3
MEGABYTES, CPU_MEGABYTES = 2000, 2
GROWTH_MIB, TAIL = 64.0, 1.5
LEAST_S = 20.0


def run(found: Found) -> None:
    """As far as the time goes."""
    times, megabytes = (CPU_TIMES, CPU_MEGABYTES) if found.cpu else (TIMES, MEGABYTES)
    text = "schema = 1\n" + job("a", "mobilenet-v2", 10**6, found, pause_s=0.02, megabytes=megabytes)
    gpus = None if found.cpu else Gpus()
    suspend_s: list[float] = []
    resume_s: list[float] = []
    gpu_mib: list[float] = []
    host_mib: list[float] = []
    with LiveRun.of(found, text) as live:
        live.until(lambda: live.trains("a"), "the job", found.left_s)
        for _ in range(times):
            if found.left_s < LEAST_S:
                break
            began, seen = time.monotonic(), len(live.records("a"))
            live.order("suspend", "a")
            live.until(lambda: live.state("a") == "SUSPENDED", "the suspend", found.left_s, every_s=0.01)
            suspend_s.append(time.monotonic() - began)
            gpu_mib.append(0.0 if gpus is None else _lowest_mib(gpus))
            host_mib.append(_used_mib())
            began = time.monotonic()
            live.order("resume", "a")
            live.until(
                lambda seen=seen: len(live.records("a")) > seen and live.trains("a"),  # type: ignore[misc]
                "the resume",
                found.left_s,
                every_s=0.01,
            )
            resume_s.append(time.monotonic() - began)
            found.number(suspend_s=suspend_s, resume_s=resume_s, gpu_mib=gpu_mib, host_mib=host_mib)
        live.order("cancel", "a")
        live.ended(found.left_s)
    found.number(processes_left=len(processes()))
    found.check("suspends", f">= {min(times, 30)}", len(suspend_s), len(suspend_s) >= min(times, 30))
    early = len(suspend_s) // 5
    for name, used in (("GPU", gpu_mib), ("host", host_mib)):
        grown = median(used[-3:]) - median(used[early : early + 3])
        found.speed(
            f"{name} memory grows while the job is suspended",
            f"<= {GROWTH_MIB:g} MiB",
            f"{grown:+.0f} MiB",
            grown <= GROWTH_MIB,
        )
    for name, taken in (("suspend", suspend_s), ("resume", resume_s)):
        last, usual = percentile(taken, 0.99), median(taken)
        found.speed(
            f"{name}: p99 against median",
            f"<= {TAIL:g} times",
            f"{last:.2f} s, {usual:.2f} s",
            last <= TAIL * usual,
        )


def _lowest_mib(gpus: Gpus) -> float:
    """What is in use on the GPU soon after a process has ended: the driver takes a moment."""
    found = []
    for _ in range(10):
        found.append(gpus.used_mib())
        time.sleep(0.02)
    return min(found)


def _used_mib() -> float:
    """The host's memory that is not available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines}
    return values["MemTotal"] - values["MemAvailable"]
