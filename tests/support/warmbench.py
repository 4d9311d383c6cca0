"""A launcher with a zygote."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


from hpcsched.core.model import Device  # noqa: E402
from hpcsched.launch.base import LaunchPlan  # noqa: E402
from hpcsched.launch.local import LocalLauncher  # noqa: E402
from hpcsched.launch.proc import stat  # noqa: E402
from hpcsched.launch.workers import LocalWorkers  # noqa: E402
from hpcsched.launch.zygote import Zygote  # noqa: E402
from hpcsched.testing.conformance_launch import plan, reaped  # noqa: E402

WITHIN_S = 120.0


PROGRAM = '''
"""What a worker finds, as JSON; then it does as the job's arguments say."""
import gc, json, os, random, signal, sys, time
import numpy as np
import torch
from hpcsched.worker.session.trainer import Trainer

ROOT = os.environ["HPCSCHED_JOB_DIR"]

def link(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition("[")[0].partition("-")[0]
    except OSError:  # that of the listing itself
        return "gone"

def found():
    return {
        "argv": sys.argv,
        "path": sys.path[0],
        "main": sys.modules["__main__"].__spec__.name,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "streams": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
        "descriptors": sorted(link(n) for n in os.listdir("/proc/self/fd") if int(n) > 2),
        "cores": [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")],
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "parent": os.getppid(),
        "handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "umask": os.umask(0o22),
        "frozen": gc.get_freeze_count() > 100_000,
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }

FOUND = found()  # before the worker seeds anything

class Told(Trainer):
    def build(self, args):
        with open(f"{ROOT}/found.{os.environ['HPCSCHED_RANK']}.part", "w") as file:
            json.dump(FOUND, file)
        os.rename(file.name, file.name.removesuffix(".part"))
        if "wait" in args:
            time.sleep(args["wait"])
        if "code" in args:
            sys.exit(args["code"])
        raise KeyError("mine")
'''

TRAINING = """
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Net(Trainer):
    def build(self, args):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
                              nn.Linear(288, 300), nn.ReLU(), nn.Linear(300, 10))
        x, y = torch.randn(512, 1, 8, 8), torch.randint(0, 10, (512,))
        return Parts(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
                     dataset=torch.utils.data.TensorDataset(x, y), global_batch=128,
                     loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
"""


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def children(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal()
        and (seen := stat(int(entry.name)))
        and seen.parent == pid
        and seen.state != "Z"
    ]


class Bench:
    """A launcher of one kind, and jobs for it."""

    def __init__(self, folder: Path, standbys: int | None, **settings: Any) -> None:
        self.folder = folder
        self.devices = [Device(index=i, host="here", kind="fake", handle=str(i)) for i in range(2)]
        self.launcher = LocalLauncher(standbys=standbys, devices=self.devices, **settings)
        self.standbys = min(standbys or 0, 2)
        (folder / "told.py").write_text(PROGRAM)
        (folder / "training.py").write_text(TRAINING)
        self._jobs = 0

    def plan(
        self, trainer: str = "told:Told", *, ranks: int = 1, env: dict[str, str] | None = None, **args: Any
    ) -> LaunchPlan:
        self._jobs += 1
        job = self.folder / f"job-{self._jobs}"
        job.mkdir()
        contract = {
            "JOB_ID": str(self._jobs), "ATTEMPT": "1", "JOB_DIR": str(job), "RUN_ID": "warm",
            "TRAINER": trainer, "CHECKPOINT_DIR": str(job / "checkpoint"), "ARGS": json.dumps(args),
            "STEPS": "12",
        }  # fmt: skip
        return replace(
            plan(job, [], ranks=ranks),
            module="hpcsched.worker",
            job_id=self._jobs,
            env={f"HPCSCHED_{name}": value for name, value in contract.items()} | (env or {}),
            cwd=self.folder,
            arena=True,
        )

    def launch(self, **wanted: Any) -> tuple[LaunchPlan, LocalWorkers]:
        job = self.plan(**wanted)
        return job, self.launcher.launch(job)

    def run(self, **wanted: Any) -> tuple[Path, int]:
        job, workers = self.launch(**wanted)
        code = reaped(workers)
        workers.close()
        return job.folder, code

    def warm_up(self) -> None:
        """Until the next launch is of the kind that this is for."""
        if not self.launcher._zygotes:
            return
        self.run(code=0)
        wait_for(self.ready)
        wait_for(lambda: len(self.waiting()) == self.standbys)

    def ready(self) -> bool:
        self.warm.look()
        return self.warm.ready

    @property
    def warm(self) -> Zygote:
        assert self.launcher._zygotes
        return self.launcher._zygotes.of(sys.executable)

    @property
    def zygote(self) -> int:
        return self.warm._pid

    def waiting(self) -> list[int]:
        """The standbys that are warm: they sleep, and have used no processor for a while."""
        found = [pid for between in children(self.zygote) for pid in children(between)]
        before = [used(pid) for pid in found]
        time.sleep(0.3)
        return [pid for pid, was in zip(found, before, strict=True) if was and was == used(pid)]


def used(pid: int) -> list[bytes]:
    """The processor time of a sleeping process; [] if it does not sleep."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().split()
    except OSError:
        return []
    return fields[13:15] if fields[2] == b"S" else []


def output(folder: Path) -> str:
    return (folder / "logs" / "out").read_text()


def by_zygote(bench: Bench, workers: LocalWorkers) -> bool:
    """Whether all ranks have been forked: the command line stays the zygote's."""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid, _ in workers.processes]
    return all(b"zygote" in line for line in lines)
