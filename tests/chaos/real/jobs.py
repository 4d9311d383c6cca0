"""What a schedule's jobs are in a job file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from livebench import job as table

from .programs import CONTRACT, OWN_SAVES, SHELL, TRAINER, TRIAL
from .schedule import TORCH, Job, Schedule

PYTHON = [sys.executable, "-I", "-S", "-B"]
RETRIES = 6
"""Failures in a row that are forgiven, where a job says nothing else: faults are none of its own."""

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"gpus": 1},
    "elastic": {"gpus": "auto", "strategy": {"kind": "ddp", "reproducible": True, "shards": 4}},
    "packed": {"gpus": 1, "strategy": {"kind": "packed", "mode": "loop"}},
    "vsw": {
        "strategy": {
            "kind": "vsw",
            "local_batch": 2,
            "global_batch": [8, 16],
            "similarity": 0.99,
            "every": 10,
        }
    },
    "burst": {"gpus": 1, "strategy": "burst"},
    "ps": {"strategy": {"kind": "ps", "cpus": 1, "servers": 1, "workers": 1}},
}
SAME = ("ddp", "elastic", "packed")
"""Kinds whose final weights are, to the last bit, those of an undisturbed training."""


def write(folder: Path) -> None:
    """The programs, in the folder in which jobs run."""
    (folder / "ledger").mkdir()
    for name, text in (("contract", CONTRACT), ("own", OWN_SAVES), ("trial", TRIAL), ("small", TRAINER)):
        (folder / f"{name}.py").write_text(text)


def job_file(schedule: Schedule, folder: Path) -> Path:
    """The file for `hpcsched run` or `tune`."""
    if schedule.flavour == "tune":
        return search_file(folder)
    return file_of(folder, "set.toml", *schedule.jobs)


def file_of(folder: Path, name: str, *jobs: Job) -> Path:
    path = folder / name
    path.write_text("\n".join(["schema = 1", *(_table(job, folder) for job in jobs)]))
    return path


def search_file(folder: Path) -> Path:
    options = json.dumps({"ledger": str(folder / "ledger"), "pause": 0.02})
    command = [*PYTHON, str(folder / "trial.py"), options]
    command = [*command, "{lr}", "{budget}", "{dir}", "{trial}"]
    lines = [
        "schema = 1",
        f"command = {json.dumps(command)}",
        'metric = "loss"',
        'mode = "min"',
        "result = 'loss: *([-+0-9.e]+)'",
        "R = 9",
        'method = "halving"',
        "trials = 9",
        "[space]",
        "lr = { uniform = [0.0, 1.0] }",
        "[defaults]",
        f"retries = {RETRIES}",
    ]
    path = folder / "search.toml"
    path.write_text("\n".join([*lines, ""]))
    return path


def _table(job: Job, folder: Path) -> str:
    keys = {"steps": job.steps, "retries": RETRIES, **job.keys}
    writer = _training if job.kind in TORCH else WRITERS[job.kind]
    return table(job.name, **{**writer(job, folder), **keys})


def _options(job: Job, folder: Path, **more: Any) -> dict[str, Any]:
    return {"ledger": str(folder / "ledger"), **job.options, **more}


def _contract(job: Job, folder: Path) -> dict[str, Any]:
    return {"command": [*PYTHON, str(folder / "contract.py"), json.dumps(_options(job, folder))]}


def _shell(job: Job, folder: Path) -> dict[str, Any]:
    text = SHELL
    for key, value in _options(job, folder).items():
        text = text.replace("{" + key + "}", str(value))
    return {"command": ["sh", "-c", text]}


def _saves(job: Job, folder: Path) -> dict[str, Any]:
    return _own(job, folder, out=str(folder / "out" / job.name), catches=job.kind == "saves") | {
        "checkpoints": str(folder / "out" / job.name / "checkpoint-*[0-9]"),
        "resume_args": ["--resume", "{checkpoint}"],
        "progress_pattern": r"step (\d+)",
    }


def _plain(job: Job, folder: Path) -> dict[str, Any]:
    return _own(job, folder, every=0, out="")


def _array(job: Job, folder: Path) -> dict[str, Any]:
    """Its jobs are told apart by their names, which the programs read; a value has to be somewhere."""
    return _plain(job, folder) | {"env": {"VALUE": "{x}"}}


def _own(job: Job, folder: Path, **more: Any) -> dict[str, Any]:
    options = json.dumps(_options(job, folder, steps=job.steps, **more))
    return {"command": [*PYTHON, str(folder / "own.py"), options]}


def _training(job: Job, folder: Path) -> dict[str, Any]:
    args = {**_options(job, folder, name=job.name), **NO_NOISE.get(job.kind, {})}
    return {"trainer": "small:Small", "args": args, "workdir": str(folder), **STRATEGIES[job.kind]}


NO_NOISE = {"vsw": {"dropout": False}, "burst": {"dropout": False}, "ps": {"dropout": False}}

WRITERS: Mapping[str, Callable[[Job, Path], dict[str, Any]]] = {
    "contract": _contract,
    "shell": _shell,
    "saves": _saves,
    "goes": _saves,
    "plain": _plain,
    "array": _array,
}
