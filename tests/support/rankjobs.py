"""Plays the agent for the ranks of a training job."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from forkserver import SERVER

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


_DEADLINE_S = 300.0

TRAINING = '''
import os, resource, signal
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from hpcsched.worker import Parts, Session, Trainer

class Base(Trainer):
    """Signals itself in the middle of a step, so that no test has to wait for the right moment."""
    seen = 0

    def build(self, args):
        self.args = args
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(50, 6, generator=generator, dtype=self.dtype)
        self.y = torch.randint(0, 3, (50,), generator=generator)
        if "file_limit" in args:
            resource.setrlimit(resource.RLIMIT_FSIZE, (args["file_limit"],) * 2)
        model = self.network().to(self.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Parts(
            model=model, optimizer=optimizer, dataset=self.dataset(), global_batch=args.get("batch", 7),
            loss=self.loss, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9), seed=3,
            loaders=args.get("loaders", 0), evaluate=lambda model: {"training": float(model.training)},
        )

    def dataset(self):
        return (self.x, self.y)

    def loss(self, model, batch):
        if self.args.get("rank", "0") == os.environ["HPCSCHED_RANK"]:
            if self.seen == self.args.get("at"):
                os.kill(os.getpid(), getattr(signal, self.args.get("signal", "SIGTSTP")))
            if self.seen == self.args.get("raise_at"):
                raise ZeroDivisionError("the user's own")
        self.seen += 1
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

class Noisy(Base):
    """Everything that makes bitwise equality hard: dropout, batch norm, float32, several buckets."""
    dtype = torch.float32

    def network(self):
        return nn.Sequential(nn.Linear(6, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Dropout(0.3),
                             nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3))

class Exact(Base):
    dtype = torch.float64

    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

class Normed(Exact):
    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

class Mapped(Exact):
    def dataset(self):
        return [(x, y) for x, y in zip(self.x, self.y)]

class Branches(Exact):
    """Each sample uses only one of two layers, and a third one is never used."""
    def network(self):
        return nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def loss(self, model, batch):
        x, y = batch
        if len(x) == 1:
            return cross_entropy(model[int(x[0, 0] > 0)](x), y, reduction="none")
        return torch.cat([self.loss(model, (x[i : i + 1], y[i : i + 1])) for i in range(len(x))])

def own_loop():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    x = torch.arange(8.0).unsqueeze(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(model=model, optimizer=optimizer, dataset_size=8, global_batch=4, total_steps=20)
    for indices in session.steps():
        optimizer.zero_grad()
        session.backward(mse_loss(model(x[indices]), 3 * x[indices]))
        optimizer.step()
    session.finish({"done": 1.0, "broken": float("nan")})
'''


@dataclass
class Job:
    """One job in a run directory; `start` is what the agent does for an attempt."""

    folder: Path
    trainer: str = "training:Noisy"
    steps: int = 12
    env: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    program: str = ""
    """A script of the user's own in the folder, instead of a trainer."""

    def __post_init__(self) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        (self.folder / "training.py").write_text(TRAINING)

    @property
    def dir(self) -> Path:
        return self.folder / "jobs" / "1"

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoint"

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.dir / "STATE.json").read_text())

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def environment(self, rank: int, world: int, port: int, args: dict[str, Any]) -> dict[str, str]:
        return {
            "HPCSCHED_JOB_ID": "1",
            "HPCSCHED_ATTEMPT": str(self.attempt),
            "HPCSCHED_RANK": str(rank),
            "HPCSCHED_LOCAL_RANK": str(rank),
            "HPCSCHED_WORLD_SIZE": str(world),
            "HPCSCHED_RUN_DIR": str(self.folder),
            "HPCSCHED_JOB_DIR": str(self.dir),
            "HPCSCHED_CHECKPOINT_DIR": str(self.checkpoints),
            "HPCSCHED_RESUME": str(int(self.attempt > 1)),
            "HPCSCHED_NOTIFY_PID": str(os.getpid()),
            "HPCSCHED_STEPS": str(self.steps),
            "HPCSCHED_TRAINER": self.trainer,
            "HPCSCHED_ARGS": json.dumps(args),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **self.env,
        }

    def start(self, world: int = 1, **args: Any) -> list[BaseProcess]:
        """Fork the ranks of the next attempt."""
        self.attempt += 1
        port = free_port()
        return [self.fork(self.environment(rank, world, port, args)) for rank in range(world)]

    def fork(self, env: dict[str, str]) -> BaseProcess:
        """Start one rank."""
        process = SERVER.Process(target=_be_rank, args=(str(self.folder), env, self.program))
        process.start()
        return process

    def run(self, world: int = 1, **args: Any) -> list[int | None]:
        """Start them and wait; returns their exit codes."""
        return wait(self.start(world, **args))

    def spawn(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start one rank for real: a child of ours in a session of its own."""
        self.attempt += 1
        env = {**os.environ, **self.environment(0, 1, free_port(), {}), **options.pop("env", {})}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    def final(self) -> dict[str, Any]:
        from hpcsched.worker import load_checkpoint

        return load_checkpoint(self.checkpoints)


@contextlib.contextmanager
def woken_by(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Take SIGUSR1, as an agent does; without a handler it would end this process."""
    former = signal.signal(signal.SIGUSR1, lambda *_: note())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)


def wait(ranks: list[BaseProcess]) -> list[int | None]:
    for process in ranks:
        process.join(_DEADLINE_S)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in ranks]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _be_rank(folder: str, env: dict[str, str], program: str) -> None:
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in ("CONTROL", "ARENA"):
        if path := env.pop(f"OPEN_{name}", ""):
            env[f"HPCSCHED_{name}_FD"] = str(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    os.environ.update(env)
    torch.set_num_threads(1)
    if program:
        runpy.run_path(program, run_name="__main__")
        return
    from hpcsched.worker.__main__ import main

    sys.exit(main())


def same(a: Any, b: Any) -> bool:
    """Whether two checkpoints are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
