"""The final weights of trainings that nothing disturbs: one run for all, kept while the code is the same."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from livebench import COMMAND, Bench
from places import ROOT

from . import jobs, programs
from .jobs import SAME
from .schedule import Job, Schedule

STEPS = 60


def key(job: Job) -> str:
    """By what the weights are told apart: packed trainings are as if alone."""
    kind = "elastic" if job.kind == "elastic" else "ddp"
    return f"{kind} {job.steps} {job.options['seed']}"


def undisturbed() -> dict[str, float]:
    """Weights by `key`, for all trainings that a schedule may draw."""
    path = Path(tempfile.gettempdir()) / f"chaos-weights-{os.getuid()}-{mark(ROOT / 'hpcsched')}.json"
    try:
        found: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):
        found = _trained()
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.rename(path)
    return found


def mark(package: Path) -> str:
    """By what it is told whether weights may have changed: the trainer, what trains it, and torch."""
    found = hashlib.sha256(programs.TRAINER.encode())
    found.update(json.dumps({k: dict(v) for k, v in jobs.STRATEGIES.items()}).encode())
    found.update(version("torch").encode())
    for path in sorted((package / "worker").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _trained() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="chaos-weights-") as folder:
        bench = Bench(Path(folder))
        jobs.write(bench.folder)
        one = [
            Job(f"{kind}-{seed}", kind, STEPS, {"checkpoint_every": 600}, {"seed": seed, "pause": 0})
            for kind in ("ddp", "elastic")
            for seed in range(3)
        ]
        alone = [replace(job, keys={**job.keys, "gpus": 1}) for job in one]
        file = jobs.file_of(bench.folder, "set.toml", *alone)
        env = {**bench.env, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        words = [COMMAND, "run", str(file), "--devices", "cpu:1", "--json", "-q"]
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the undisturbed trainings have failed: {done.stderr[-500:]}")
        metrics = {row["name"]: row["metrics"] for row in bench.status()["jobs"]}
        return {key(job): metrics[job.name]["weights"] for job in one}


def needed(schedule: Schedule) -> bool:
    return any(job.kind in SAME for job in schedule.jobs)
