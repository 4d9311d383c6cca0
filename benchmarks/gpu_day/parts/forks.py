"""Processes that wait for a job must not have touched the driver: it shows a process its GPUs once."""

from __future__ import annotations

import time

from gpu_day.device import Gpus
from gpu_day.found import Found
from gpu_day.live import LiveRun, job, nvidia_files, processes

ZYGOTE = "hpcsched.worker.zygote"
WARM_S = 2.0
"""A standby has done all it does before its task."""


def run(found: Found) -> None:
    """A job runs; standbys are made meanwhile; the next job is one of them."""
    text = "schema = 1\n" + job("first", "resnet50", 10**6, found, pause_s=0.05)
    text += job("second", "resnet50", 3, found) + job("third", "resnet50", 3, found)
    with LiveRun.of(found, text) as live:
        live.until(lambda: live.trains("first"), "the first job", found.left_s)
        took_s = live.until(lambda: len(_waiting(live)) >= 2, "a zygote and a standby", found.left_s)
        time.sleep(WARM_S)
        waiting = _waiting(live)
        found.number(standby_after_s=took_s, waiting=len(waiting))
        found.check("a zygote and a standby are there", ">= 2 processes", len(waiting), len(waiting) >= 2)
        files = {pid: nvidia_files(pid) for pid in waiting}
        opened = sorted({file for those in files.values() for file in those})
        found.check("files of the driver open in them", "none", ", ".join(opened) or "none", not opened)
        if not found.cpu:
            gpus = Gpus()
            there, uuid = gpus.processes(), str(gpus.facts()[0]["uuid"]).removeprefix("GPU-")
            found.check("processes on the GPU, as NVML says", "only the job's", len(there), len(there) <= 1)
        live.order("cancel", "first")
        ended = live.ended(found.left_s)
        states = {name: one["state"] for name, one in ended.items()}
        wanted = {"first": "CANCELLED", "second": "COMPLETED", "third": "COMPLETED"}
        found.check("jobs", wanted, states, states == wanted)
        records = [live.records(name)[-1] for name in ("second", "third")]
        forked = sum(record["forked"] for record in records)
        found.check("jobs that were a standby or forked", ">= 1", forked, forked >= 1)
        if not found.cpu:
            right = all(uuid in (record["uuid"] or "") for record in records)
            found.check("they are on the GPU they were given", uuid, [r["uuid"] for r in records], right)


def _waiting(live: LiveRun) -> list[int]:
    """The zygote and what it has forked that is not a job yet."""
    jobs = {record["pid"] for name in ("first", "second", "third") for record in live.records(name)}
    return [pid for pid, _ in processes(ZYGOTE) if pid not in jobs]
