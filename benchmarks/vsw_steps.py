"""What stream workers cost: a step against data parallelism, comparing gradients, deciding anew.

    python benchmarks/vsw_steps.py [--json] [--quick]

One rank in this process and two over gloo, one thread each. A step that compares the two halves of its
gradient is timed against the others of the same training, with the same local batches; a decision (what all
ranks have measured goes to rank 0, which solves for the fastest configuration and says it to all) is timed by
itself. The paper's intervals: one comparison and one decision in 100 steps. Medians of wall time; for two
ranks of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from common import Report, Scratch, main, median, ms

EVERY = 10
"""Between two comparisons here; `AS_USUAL` is what counts."""
AS_USUAL = 100
STEPS, QUICK_STEPS = 400, 30
GOAL = 0.005
PAPER_ERROR = 0.059
STOP_S = 300.0

MODELS: dict[str, dict[str, Any]] = {
    "digits": {
        "trainer": "hpcsched.examples.digits:Digits",
        "args": {"kind": "cnn", "width": 32, "batch": 64},
    },
    "text": {"trainer": "hpcsched.examples.text:Text", "args": {"width": 128, "batch": 64}},
    "wide": {
        "trainer": "hpcsched.examples.digits:Digits",
        "args": {"width": 3300, "batch": 128},
        "steps": 120,
    },
}
"""A small CNN, a small transformer, and a network with 11.2 M parameters."""

RANK = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
from importlib import import_module
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.worker.session.session import session_of
from hpcsched.worker.session.trainer import build
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches

trainer, steps, every = json.loads(sys.argv[1])
home, _, name = trainer.partition(":")
parts = build(getattr(import_module(home), name)(), json.loads(os.environ["HPCSCHED_ARGS"]))
parts.model.train()
batch = parts.global_batch
found = {"usual": [], "compared": [], "decision": []}

class Timed(AdaptiveBatches):
    def decide(self):
        began = time.perf_counter()
        super().decide()
        found["decision"].append(time.perf_counter() - began)

table = {"local_batch": batch // 8, "global_batch": [batch, batch + batch // 4], "similarity": -0.999}
strategy = Timed(parts, WorkerOptions.parse({**table, "every": every}))
session = session_of(parts, strategy, total_steps=steps)
for _ in session.steps():
    which = "compared" if strategy.measures else "usual"
    began = time.perf_counter()
    strategy.train_step()
    if session.step > 10:
        found[which].append(time.perf_counter() - began)
if session.rank == 0:
    with open("found.json", "w") as file:
        json.dump(found, file)
session.finish()
"""
"""Similarity is never below the target, so that the batch stays and only the comparing differs."""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    for name, model in MODELS.items():
        steps = QUICK_STEPS if options.quick else model.get("steps", STEPS)
        if options.quick and name == "wide":
            continue
        for world in (1, 2):
            with Scratch.make() as scratch:
                found = _run(scratch.folder, model, world, steps)
            if errors := found.pop("prediction"):
                report.results[f"{name}_{world}_prediction_error"] = errors
                report.row(
                    f"{name}, {_ranks(world)}: steps expected by the performance model, mean error",
                    f"{fmean(errors):.1%}",
                    goal=f"{PAPER_ERROR:.1%} (paper)",
                )
            report.results |= {
                f"{name}_{world}_{key}_s": samples for key, samples in found.items() if samples
            }
            usual, compared = median(found["usual"]), median(found["compared"])
            cost = max(0.0, compared - usual) / AS_USUAL / usual
            report.row(
                f"{name}, {_ranks(world)}: comparing the halves of the gradient every {AS_USUAL} steps",
                f"{cost:.2%} of all time (steps {ms(usual)}, {ms(compared)})",
                goal=f"{GOAL:.1%}",
                ok=None if options.quick else cost <= GOAL,
            )
            decision = median(found["decision"][2:])
            share = decision / AS_USUAL / usual
            report.row(
                f"{name}, {_ranks(world)}: a decision",
                f"{ms(decision)}, {decision / usual:.2f} steps, {share:.2%} of all time",
                goal=f"a step, {GOAL:.1%}",
                ok=None if options.quick else decision <= usual and share <= GOAL,
            )
    return report


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def _run(folder: Path, model: dict[str, Any], world: int, steps: int) -> dict[str, list[float]]:
    """What rank 0 has timed in a training of its own processes."""
    (folder / "jobs" / "1").mkdir(parents=True)
    (folder / "rank.py").write_text(RANK)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(world):
        env = {
            **os.environ,
            "HPCSCHED_JOB_ID": "1",
            "HPCSCHED_RANK": str(rank),
            "HPCSCHED_LOCAL_RANK": str(rank),
            "HPCSCHED_WORLD_SIZE": str(world),
            "HPCSCHED_RUN_DIR": str(folder),
            "HPCSCHED_ARGS": json.dumps(model["args"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "rank.py", json.dumps([model["trainer"], steps, EVERY])]
        ranks.append(subprocess.Popen(command, env=env, cwd=folder))
    deadline = time.monotonic() + STOP_S
    try:
        codes = [rank.wait(deadline - time.monotonic()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * world, codes
    found: dict[str, list[float]] = json.loads((folder / "found.json").read_text())
    lines = (folder / "jobs" / "1" / "batches.jsonl").read_text().splitlines()
    past = [line for line in map(json.loads, lines) if line.get("expected_step_s")]
    found["prediction"] = [abs(line["expected_step_s"] / line["step_s"] - 1) for line in past]
    return found


if __name__ == "__main__":
    main(__doc__ or "", measure)
