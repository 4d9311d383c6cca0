"""What suspending into memory costs by the size of the state, where its time goes, and the floor below it.

    python benchmarks/suspend.py [--cuda] [--gigabytes 1,4,10] [--budget-s N] [--quick] [--json [FILE]]

The state is a model's and AdamW's: three tensors a layer and a step. For each size, first in this process:

- reserve: room made for two copies and, on a GPU, the part pinned that is written next (beside the training);
- save: the copy and the checksum, in one pass; "unpinned": by a process that has pinned nothing;
- load: checked, and copied into tensors that are there;
- floor of a save: one copy of as many bytes (on a GPU: from it, into pinned memory) and one checksum.

Then with real processes, by the agent's own launcher: suspended, and resumed from a standby, from the zygote
and from nothing (three times, more than 2 GB once). On a GPU also how long its memory is in use after the
process has ended (NVML).

Each number is told at once, and the file holds all that there are: who ends this program loses the one under
way. Where memory or time (`--budget-s`) is too short, a size is left out, and that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import Report, median, ms, table
from resize import LAYERS, Training, step_of, warm

from hpcsched.worker.checkpoint.layout import BLOCK, flatten
from hpcsched.worker.checkpoint.pinning import Cuda
from hpcsched.worker.checkpoint.shared_memory import Arena
from hpcsched.worker.process.memory import available

GB = 1e9
LAYER = 4096 * 4096
"""Parameters of a layer, of the state that is saved in this process."""
REPEAT, FEW = 5, 2
RESUMES = 3
SMALL_GIGABYTES = 2.0
"""Larger states are saved and resumed less often."""
QUICK_GIGABYTES = 0.02
MOST_MEMORY = 6
"""What a state needs room for, in its own size: itself, its two copies, and half of the rest stays free."""
KEPT_S = 120.0
MEMORY_BACK_S = 10.0
WAYS = {"standby": 1, "zygote": 0, "nothing": None}
"""How a training is resumed, and the standbys that this takes."""
QUICK_WAYS = ("zygote",)


class Found:
    """The numbers so far, on screen and on disk."""

    def __init__(self, file: Path | None, budget_s: float, head: dict[str, Any]) -> None:
        self.report = Report()
        self._file, self._head = file, head
        self._end = time.monotonic() + budget_s
        self._took_s: dict[str, float] = {}  # by what: of the smallest size

    def number(self, name: str, seconds: float) -> None:
        """`name` ends in the unit."""
        self.report.results.setdefault(name, []).append(seconds)
        print(f"{name} {seconds:.6g}", file=sys.stderr, flush=True)
        self._keep()

    def row(self, what: str, measured: str, *, goal: str = "", ok: bool | None = None) -> None:
        self.report.row(what, measured, goal=goal, ok=ok)
        self._keep()

    def median(self, name: str) -> float | None:
        values = self.report.results.get(name)
        return median(values) if values else None

    @contextlib.contextmanager
    def within(self, what: str, expected_s: float) -> Iterator[bool]:
        """Whether there is time for this; no less is expected than another size has taken."""
        expected_s = max(expected_s, self._took_s.get(what, 0.0))
        began = time.monotonic()
        if began + expected_s > self._end:
            print(f"left out, as there is no time: {what}", file=sys.stderr, flush=True)
            yield False
            return
        yield True
        self._took_s.setdefault(what, time.monotonic() - began)

    def page(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.report.rows]
        return {"schema": 1, **self._head, "results": self.report.results, "rows": rows}

    def _keep(self) -> None:
        if self._file is not None:
            temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self.page()))
            temporary.replace(self._file)


class TimedCuda(Cuda):
    """Notes how long pinning takes, and how much is pinned."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0

    def host_register(self, address: int, size: int) -> int:
        began = time.perf_counter()
        error = super().host_register(address, size)
        self.seconds += time.perf_counter() - began
        self.bytes += 0 if error else size
        return error


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def state_of(size: float, device: torch.device) -> dict[str, Any]:
    """A model's and AdamW's state of about so many bytes."""
    layers = max(1, round(size / (3 * 4 * LAYER)))
    count = round(size / (3 * 4 * layers))

    def tensor(value: float) -> torch.Tensor:
        return torch.full((count,), value, device=device)

    moments = {
        layer: {"step": torch.tensor(1.0), "exp_avg": tensor(0.1), "exp_avg_sq": tensor(0.2)}
        for layer in range(layers)
    }
    model = {f"layer{layer}": tensor(0.5 + layer) for layer in range(layers)}
    groups = [{"lr": 1e-3, "params": list(range(layers))}]
    return {"step": 1, "samples": 1, "model": model, "optimizer": {"state": moments, "param_groups": groups}}


def in_this_process(found: Found, name: str, size: float, device: torch.device, repeat: int) -> None:
    state = state_of(size, device)
    # Pages that this machine has had in use before, as those of a training that has gone on for a while.
    floor = Floor(flatten(state).area, device)
    descriptor = os.memfd_create("suspend")
    cuda = TimedCuda()
    arena, other = Arena.open(descriptor, cuda), Arena.open(descriptor)
    assert arena is not None and other is not None
    try:
        for number in range(repeat):
            pinned, pinning_s = cuda.bytes, cuda.seconds
            reserve_s = seconds_of(lambda: arena.reserve(state))
            if number == 0:
                found.number(f"{name}_reserve_s", reserve_s)
            if cuda.bytes > pinned:
                found.number(f"{name}_pin_s", cuda.seconds - pinning_s)
                found.number(f"{name}_pinned_gb", (cuda.bytes - pinned) / GB)
            floor.measure(found, name)
            found.number(f"{name}_save_s", seconds_of(lambda: arena.save(state)))
        if device.type == "cuda":
            other._touch_pages(other._saves)  # a first look at them is not what this is about
            found.number(f"{name}_save_unpinned_s", seconds_of(lambda: other.save(state)))
        own = {"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}
        for _ in range(repeat):
            found.number(f"{name}_load_s", seconds_of(lambda: arena.load(into=own)))
        fresh: dict[str, Any] = {"model": state["model"], "optimizer": {"state": device}}
        found.number(f"{name}_load_new_s", seconds_of(lambda: arena.load(into=fresh)))
    finally:
        arena.close()
        other.close()
        os.close(descriptor)
    in_lines(found, name)


class Floor:
    """One copy of so many bytes, and one checksum, by torch: each quicker than anybody else's here."""

    def __init__(self, area: int, device: torch.device) -> None:
        count = min(area, 1 << 30) // BLOCK * BLOCK // 8 or BLOCK // 8
        self._share = area / (count * 8)
        self._device = device
        self._source = torch.ones(count, dtype=torch.int64, device=device)
        self._target = torch.zeros(count, dtype=torch.int64)
        self._pinned = self._target.pin_memory() if device.type == "cuda" else self._target

    def measure(self, found: Found, name: str) -> None:
        copy_s = self._copy(self._pinned, self._source)
        found.number(f"{name}_floor_copy_s", copy_s)
        checksum_s = seconds_of(lambda: self._target.view(-1, BLOCK // 8).sum(1)) * self._share
        found.number(f"{name}_floor_checksum_s", checksum_s)
        if self._device.type == "cuda":
            found.number(f"{name}_floor_copy_pageable_s", self._copy(self._target, self._source))
            found.number(f"{name}_floor_copy_back_s", self._copy(self._source, self._pinned))
            found.number(f"{name}_floor_copy_back_pageable_s", self._copy(self._source, self._target))
        found.number(f"{name}_floor_s", copy_s + checksum_s)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return seconds_of(work) * self._share


def in_lines(found: Found, name: str) -> None:
    save_s, floor_s = found.median(f"{name}_save_s"), found.median(f"{name}_floor_s")
    copy_s = found.median(f"{name}_floor_copy_s")
    if save_s is None or floor_s is None or copy_s is None:
        return
    what = name.replace("gb", " GB")
    floor = f"{ms(copy_s)} the copy, {ms(floor_s - copy_s)} the checksum"
    found.row(
        f"save {what} into memory: {save_s / floor_s:.2f} of the floor",
        ms(save_s),
        goal=f"<= {ms(floor_s)} ({floor})",
        ok=save_s <= floor_s,
    )
    for word in ("save_unpinned", "reserve", "pin", "load", "load_new"):
        if (value := found.median(f"{name}_{word}_s")) is not None:
            found.row(f"... {word.replace('_', ' ')}, {what}", ms(value))


def by_processes(found: Found, name: str, way: str, size: float, *, cuda: bool, resumes: int) -> None:
    """Suspend a training and resume it, several times."""
    width = max(64, round((size / (3 * 4 * LAYERS)) ** 0.5))
    devices = "cuda:1" if cuda else "cpu:1"
    with tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder:
        job = Training(Path(folder) / way, WAYS[way], width, devices, fresh=True, adamw=True)
        try:
            if WAYS[way] is not None:
                warm(job)
            before = memory_mib(job)
            job.start(1)
            for _ in range(resumes):
                job.train(4)
                asked, free = job.suspend(quick=way != "nothing")
                last = job.steps("e")[-1]
                found.number(f"{name}_{way}_suspend_s", free - max(asked, last))
                if cuda and before is not None:
                    found.number(f"{name}_{way}_memory_back_s", memory_back(job, before, free))
                job.launcher.wait_kept(KEPT_S)
                time.sleep(job.rest_s)
                launched = job.start(1)
                ends = job.train()
                begun = next(t for t in job.steps("b") if t > launched)
                ended = next(t for t in job.steps("e") if t > launched)
                found.number(f"{name}_{way}_to_first_step_s", begun - launched)
                found.number(f"{name}_{way}_through_first_step_s", ended - launched)
                found.number(f"{name}_{way}_step_s", step_of(ends))
        finally:
            job.close()
    what = name.replace("gb", " GB")
    goal_s = 0.1 * size / GB if way == "standby" and cuda else None
    for word in ("suspend", "memory_back", "to_first_step"):
        if (value := found.median(f"{name}_{way}_{word}_s")) is None:
            continue
        limit_s = goal_s if word == "suspend" else 0.1 if word == "memory_back" else None
        found.row(
            f"{what}, {way}: {word.replace('_', ' ')}",
            ms(value),
            goal="" if limit_s is None else f"<= {ms(limit_s)}",
            ok=None if limit_s is None else value <= limit_s,
        )


def memory_mib(job: Training) -> float | None:
    """The memory in use on the job's GPU."""
    return job.devices.sample()[0].memory_mib


def memory_back(job: Training, before: float, free: float) -> float:
    """Seconds from the end of its processes until its GPU has no more memory in use than before it began."""
    while time.monotonic() < free + MEMORY_BACK_S:
        now = memory_mib(job)
        if now is not None and now <= before + 1:
            break
        time.sleep(0.002)
    return time.monotonic() - free


def measure(found: Found, sizes: list[float], device: torch.device, *, quick: bool) -> None:
    cuda = device.type == "cuda"
    kept = []
    for gigabytes in sizes:
        needed, there = MOST_MEMORY * gigabytes * GB, available()
        if needed > there:
            found.row(
                f"{gigabytes:g} GB", f"left out: {needed / GB:.3g} GB of {there / GB:.3g} GB are needed"
            )
            continue
        kept.append(gigabytes)
        with found.within(f"{gigabytes:g} GB in this process", 2 * gigabytes) as go:
            if go:
                repeat = FEW if quick or gigabytes > SMALL_GIGABYTES else REPEAT
                in_this_process(found, f"{gigabytes:g}gb", gigabytes * GB, device, repeat)
        if cuda:
            torch.cuda.empty_cache()
    for way in QUICK_WAYS if quick else WAYS:
        for gigabytes in kept:
            with found.within(way, 0.0 if quick else 6 + 5 * gigabytes) as go:
                if go:
                    resumes = 1 if quick or gigabytes > SMALL_GIGABYTES else RESUMES
                    name = f"{gigabytes:g}gb"
                    by_processes(found, name, way, gigabytes * GB, cuda=cuda, resumes=resumes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="the state is on a GPU")
    parser.add_argument(
        "--gigabytes", default="1", metavar="N[,N...]", help="sizes of the state (default: 1)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=1200.0, metavar="N", help="begin nothing after that"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write what there is so far there; else print it"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "has saved": we look anyway
    if options.cuda and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    device = torch.device("cuda", 0) if options.cuda else torch.device("cpu")
    sizes = [QUICK_GIGABYTES] if options.quick else [float(size) for size in options.gigabytes.split(",")]
    head = {
        "quick": options.quick,
        "device": torch.cuda.get_device_name(device) if options.cuda else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    file = Path(options.json) if options.json not in (None, "-") else None
    found = Found(file, options.budget_s, head)
    measure(found, sizes, device, quick=options.quick)
    if options.json == "-":
        print(json.dumps(found.page()))
    elif file is None:
        print(table(found.report.rows))


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    main()
