"""Whole trainings with an adaptive batch against the fixed small batch, and on unequal CPU slots.

    python benchmarks/vsw_training.py [--json] [--quick]

`digits` (a small CNN) and `text` (a small transformer on the help texts of Python) are trained by `strategy =
"ddp"` with the fixed batch and by `strategy = "vsw"`, over the same samples, one after the other in one
process with one thread, five seeds each. What counts is CPU time from the first step to the end and the
accuracy on data that was held out. Two ranks on two cores, one of which has another process on it too, show
what unequal devices gain by shares in proportion.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import Report, Scratch, main, median

ADAPTIVE = {"kind": "vsw", "local_batch": [4, 64], "global_batch": [8, 128], "every": 20, "rate": 0.1}
TRAININGS: dict[str, tuple[str, dict[str, Any], float, dict[str, Any]]] = {
    "digits": (
        "hpcsched.examples.digits:Digits",
        {"kind": "cnn", "lr": 0.003, "batch": 8},
        40,
        {**ADAPTIVE, "similarity": 0.2, "learning_rate": "linear"},
    ),
    "text": (
        "hpcsched.examples.text:Text",
        {"width": 32, "length": 16, "samples": 8000, "lr": 0.003, "batch": 8},
        8,
        {**ADAPTIVE, "similarity": 0.2},
    ),
}
"""Trainer, its arguments, epochs, and the adaptive strategy."""

SEEDS, QUICK_SEEDS = 5, 1
GOAL = 0.75
"""Of the time of the fixed batch."""

UNEQUAL_GOAL = 1.3
UNEQUAL_STEPS, QUICK_STEPS = 150, 5
UNEQUAL_RUNS = 3
UNEQUAL_ARGS = {"kind": "cnn", "width": 64, "batch": 640}
WAYS = {
    "equal": {"kind": "vsw", "workers": 1, "accumulation": 7},
    "in_proportion": {"kind": "vsw", "local_batch": 40},
}
"""The same 16 workers on two ranks: eight each, and by speed. A step takes over 100 ms: a core changes
between processes every few."""

STOP_S = 300.0


def measure(options: argparse.Namespace) -> Report:
    import torch

    torch.set_num_threads(1)
    report = Report()
    for name, (trainer, args, epochs, strategy) in TRAININGS.items():
        accuracies: dict[str, list[float]] = {"fixed": [], "adaptive": []}
        times: dict[str, list[float]] = {"fixed": [], "adaptive": []}
        for seed in range(QUICK_SEEDS if options.quick else SEEDS):
            for way, table in (("fixed", {"kind": "ddp"}), ("adaptive", strategy)):
                length = epochs / 20 if options.quick else epochs
                seconds, metrics = trained(trainer, {**args, "seed": seed}, length, table)
                times[way].append(seconds)
                accuracies[way].append(100 * metrics["accuracy"])
        for way in times:
            report.results[f"{name}_{way}_s"] = times[way]
            report.results[f"{name}_{way}_accuracy"] = accuracies[way]
        ratio = median(times["adaptive"]) / median(times["fixed"])
        lost = mean(accuracies["fixed"]) - mean(accuracies["adaptive"])
        noise = _noise(*accuracies.values())
        report.row(
            f"{name}: adaptive against the fixed batch of {args['batch']}, {epochs} epochs, CPU time",
            f"{ratio:.2f} ({median(times['fixed']):.1f} s, {median(times['adaptive']):.1f} s)",
            goal=f"{GOAL}",
            ok=None if options.quick else ratio <= GOAL,
        )
        shown = ", ".join(f"{way} {_spread(values)}" for way, values in accuracies.items())
        report.row(
            f"{name}: accuracy (%), {len(accuracies['fixed'])} seeds",
            f"{shown}: {lost:+.2f} lost, noise {noise:.2f}",
            goal="lost no more than noise",
            ok=None if options.quick else lost <= noise,
        )
    _unequal(report, quick=options.quick)
    return report


def trained(
    trainer: str, args: dict[str, Any], epochs: float, strategy: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """CPU seconds of a whole training in this process, and what it reached."""
    from hpcsched.worker.process.contract import JobEnv

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "jobs" / "1"
        job.mkdir(parents=True)
        told = {
            "HPCSCHED_JOB_ID": "1",
            "HPCSCHED_RUN_DIR": folder,
            "HPCSCHED_EPOCHS": str(epochs),
            "HPCSCHED_ARGS": json.dumps(args),
            "HPCSCHED_STRATEGY": json.dumps(strategy),
            "HPCSCHED_TRAINER": trainer,
        }
        former = {name: os.environ.get(name) for name in told}
        os.environ.update(told)
        try:
            home, _, name = trainer.partition(":")
            env = JobEnv.from_environ()
            assert env is not None
            from hpcsched.worker.load import load_strategy

            run = load_strategy(strategy)
            began = time.process_time()
            run(getattr(import_module(home), name)(), env)
            seconds = time.process_time() - began
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return seconds, json.loads((job / "STATE.json").read_text())["metrics"]


def _noise(*samples: list[float]) -> float:
    """Two standard errors of the difference of two means."""
    if any(len(values) < 2 for values in samples):
        return float("inf")
    return 2.0 * sum(stdev(values) ** 2 / len(values) for values in samples) ** 0.5


def _spread(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" +- {stdev(values):.2f}" if len(values) > 1 else "")


# -- unequal devices -----------------------------------------------------------------------------------

TIMED = """
import time
from hpcsched.examples.digits import Digits

class Timed(Digits):
    def build(self, args):
        parts = super().build(args)
        loss, began = parts.loss, []

        def timed(model, batch):
            began or began.append(time.monotonic())
            return loss(model, batch)

        parts.loss = timed
        parts.evaluate = lambda model: {"seconds": time.monotonic() - began[0]}
        return parts
"""


def _unequal(report: Report, *, quick: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        report.row("unequal CPU slots", "one core only: not measured")
        return
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with Scratch.make() as scratch, _busy(cores[1]):
        for number in range(1 if quick else UNEQUAL_RUNS):
            for way, strategy in WAYS.items():
                folder = scratch.folder / f"{way}-{number}"
                times[way].append(_on_two(folder, cores, strategy, QUICK_STEPS if quick else UNEQUAL_STEPS))
    for way, values in times.items():
        report.results[f"unequal_{way}_s"] = values
    gain = median(times["equal"]) / median(times["in_proportion"])
    report.row(
        "two CPU slots, one with another process on it: shares in proportion against equal ones",
        f"{gain:.2f}x",
        goal=f"{UNEQUAL_GOAL}x",
        ok=None if quick else gain >= UNEQUAL_GOAL,
    )


@contextlib.contextmanager
def _busy(core: int) -> Iterator[None]:
    """Something else computes on this core meanwhile."""
    script = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"
    other = subprocess.Popen(
        [sys.executable, "-c", script], preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        yield
    finally:
        other.kill()
        other.wait()


def _on_two(folder: Path, cores: list[int], strategy: dict[str, Any], steps: int) -> float:
    """Wall seconds of a training by two ranks, one on each core, from the first step to the end."""
    job = folder / "jobs" / "1"
    job.mkdir(parents=True)
    (folder / "timed.py").write_text(TIMED)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank, core in enumerate(cores):
        env = {
            **os.environ,
            "HPCSCHED_JOB_ID": "1",
            "HPCSCHED_RANK": str(rank),
            "HPCSCHED_LOCAL_RANK": str(rank),
            "HPCSCHED_WORLD_SIZE": "2",
            "HPCSCHED_RUN_DIR": str(folder),
            "HPCSCHED_STEPS": str(steps),
            "HPCSCHED_ARGS": json.dumps(UNEQUAL_ARGS),
            "HPCSCHED_STRATEGY": json.dumps(strategy),
            "HPCSCHED_TRAINER": "timed:Timed",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "hpcsched.worker"],
                env=env,
                cwd=folder,
                preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
            )
        )
    try:
        codes = [rank.wait(STOP_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], codes
    return float(json.loads((job / "STATE.json").read_text())["metrics"]["seconds"])


if __name__ == "__main__":
    main(__doc__ or "", measure)
