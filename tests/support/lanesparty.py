"""A foreground and a background job on one pretended GPU."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from forkserver import SERVER
from rankjobs import free_port, same

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

DEADLINE_S = 60.0

TRAINING = '''
import os, random, signal, sys, time
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from hpcsched.worker import Parts, Trainer

class Noisy(Trainer):
    """Draws from every generator that a process has."""

    def build(self, args):
        self.args, self.seen = args, 0
        while "slow_build" in args and not os.path.exists(args["slow_build"]):
            time.sleep(0.01)
        if "default_dtype" in args:
            torch.set_default_dtype(torch.float64)
        self.x, self.y = torch.randn(50, 6), torch.randint(0, 3, (50,))
        width = 300 + random.randrange(3)
        model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True),
                              nn.Dropout(0.3), nn.Linear(width, 300), nn.ReLU(), nn.Dropout(0.3),
                              nn.Linear(300, 3))
        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                     dataset=(self.x, self.y), global_batch=args.get("batch", 7), loss=self.loss, seed=3,
                     evaluate=lambda model: {"training": float(model.training)})

    def loss(self, model, batch):
        self.seen += 1
        args = self.args
        if "slow_until" in args and self.seen >= 5 and not os.path.exists(args["slow_until"]):
            time.sleep(0.1)  # a few steps, at which guests can come in, take as long as that needs
        if "say" in args and self.seen == 3:
            print(args["say"])
        if self.seen == args.get("raise_at"):
            raise ZeroDivisionError("the user's own")
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        x = batch[0] + 0.01 * noise * torch.rand_like(batch[0])
        return cross_entropy(model(x), batch[1], reduction="none")
'''


@dataclass
class Party:
    """A foreground and a background job in one run directory, on one device."""

    folder: Path
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "lanes_training.py").write_text(TRAINING)

    def dir(self, job: int) -> Path:
        return self.folder / "jobs" / str(job)

    def output(self, job: int) -> str:
        return (self.folder / f"output{job}").read_text()

    def final(self, job: int) -> dict[str, Any]:
        from hpcsched.worker import load_checkpoint

        return load_checkpoint(self.dir(job) / "checkpoint")

    def start(
        self, job: int, lane: str | None, *, steps: int = 12, attempt: int = 1, env: Any = None, **args: Any
    ) -> BaseProcess:
        self.dir(job).mkdir(parents=True, exist_ok=True)
        environ = {
            "HPCSCHED_RUN_ID": self.run,
            "HPCSCHED_JOB_ID": str(job),
            "HPCSCHED_ATTEMPT": str(attempt),
            "HPCSCHED_DEVICES": "0",
            "HPCSCHED_JOB_DIR": str(self.dir(job)),
            "HPCSCHED_RESUME": str(int(attempt > 1)),
            "HPCSCHED_NOTIFY_PID": "",
            "HPCSCHED_STEPS": str(steps),
            "HPCSCHED_TRAINER": "lanes_training:Noisy",
            "HPCSCHED_ARGS": json.dumps(args),
            "HPCSCHED_LANE": lane or "",
            "HPCSCHED_LANE_MODE": "streams",
            "MASTER_PORT": str(free_port()),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        process = SERVER.Process(target=_be_rank, args=(str(self.folder), f"output{job}", environ))
        process.start()
        self.started.append(process)
        return process

    def alone(self, job: int, **options: Any) -> dict[str, Any]:
        """The final state of the same job in a process of its own, with nobody beside it."""
        assert code_of(self.start(job, None, **options)) == 0, self.output(job)
        return self.final(job)


def _be_rank(folder: str, output: str, env: dict[str, str]) -> None:
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if path := env.pop("OPEN_CONTROL", ""):
        env["HPCSCHED_CONTROL_FD"] = str(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    os.environ.update(env)
    torch.set_num_threads(1)
    from hpcsched.worker.__main__ import main
    from hpcsched.worker.background import build_gate, proxy

    build_gate.BUILT_WITHIN_S = float(env.get("TEST_BUILT_WITHIN_S", "60"))
    proxy.HOST_WITHIN_S = float(env.get("TEST_HOST_WITHIN_S", "20"))
    sys.exit(main())


def code_of(process: BaseProcess) -> int | None:
    process.join(DEADLINE_S)
    return process.exitcode


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def models_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(same(a[key], b[key]) for key in ("step", "samples", "model", "optimizer", "rng"))
