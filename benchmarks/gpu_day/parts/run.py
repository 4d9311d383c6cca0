"""A whole run of six jobs, with orders by hand, a killed worker and a stopped loader."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from gpu_day.device import Gpus
from gpu_day.found import Found
from gpu_day.live import LiveRun, job, processes
from hpcsched.launch.proc import stat

STOPPED = "transformer"
KILLED = "vgg16"
STOPPED_S = 1.0
PAUSE_S, CPU_PAUSE_S = 0.05, 0.3
"""In each step: else a job may have ended before it gets an order, which takes longest on a busy CPU."""


def run(found: Found) -> None:
    """All of them must complete, with no step lost, and leave nothing behind."""
    steps, pause_s = (8, CPU_PAUSE_S) if found.cpu else (30, PAUSE_S)
    text = "schema = 1\n" + job("resnet50", "resnet50", steps, found, pause_s=pause_s)
    text += job(KILLED, "vgg16", steps, found, pause_s=pause_s)
    text += job(STOPPED, "transformer", steps, found, loaders=1, samples=64, pause_s=pause_s)
    text += job("mobilenet", "mobilenet-v2", steps, found) + job("densenet", "densenet121", steps // 2, found)
    # The background of a CPU slot gets next to nothing beside whatever else the machine does.
    text += job("background", "transformer", steps, found, "" if found.cpu else "background = true")
    with LiveRun.of(found, text) as live:
        with found.trying("orders and accidents"):
            _scenes(found, live)
        ended = live.ended(found.left_s)
        found.number(jobs=ended)
        states = {name: one["state"] for name, one in ended.items()}
        wrong = {name: state for name, state in states.items() if state != "COMPLETED"}
        found.check("jobs", "all COMPLETED", wrong or "all COMPLETED", not wrong)
        lost = {name: one["step"] for name, one in ended.items() if one["step"] != one["steps"]}
        found.check("steps lost", "none", lost or "none", not lost)
        again = {name: one["steps_repeated"] for name, one in ended.items() if name != KILLED}
        again = {name: count for name, count in again.items() if count}
        found.check("steps repeated, but for the killed job", "none", again or "none", not again)
        left: list[str] = []
        with contextlib.suppress(RuntimeError):
            live.until(lambda: not processes(), "its processes' end", 5)
        left = [str(pid) for pid, _ in processes()]
        found.check("processes left", "none", ", ".join(left) or "none", not left)
        if not found.cpu:
            gpus = Gpus()
            with contextlib.suppress(RuntimeError):
                live.until(lambda: not gpus.processes(), "the GPU's release", 5)
            there = gpus.processes()
            found.check("processes left on the GPU, as NVML says", "none", there or "none", not there)


def _scenes(found: Found, live: LiveRun) -> None:
    live.until(lambda: live.trains("resnet50"), "the first job", found.left_s)
    live.order("suspend", "resnet50")
    took_s = live.until(lambda: live.state("resnet50") == "SUSPENDED", "the suspend", found.left_s)
    live.until(lambda: live.trains(KILLED), KILLED, found.left_s)
    os.kill(live.records(KILLED)[-1]["pid"], signal.SIGKILL)
    live.order("resume", "resnet50")
    live.until(lambda: live.trains(STOPPED), STOPPED, found.left_s)
    worker = live.records(STOPPED)[-1]["pid"]
    loaders = [pid for pid, _ in processes() if (seen := stat(pid)) is not None and seen.parent == worker]
    for pid in loaders:
        os.kill(pid, signal.SIGSTOP)
    live.order("suspend", STOPPED)
    time.sleep(STOPPED_S)  # it cannot end its step
    for pid in loaders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    stopped_s = live.until(lambda: live.state(STOPPED) == "SUSPENDED", "the suspend", found.left_s)
    live.order("resume", STOPPED)
    found.number(suspend_s=took_s, suspend_after_a_stopped_loader_s=stopped_s, loaders=len(loaders))
    found.check("loaders that were stopped", ">= 1", len(loaders), len(loaders) >= 1)
