"""Ranks of a job that are resized in place."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

from rankjobs import Job  # noqa: E402

WATCHED = '''
import json, os, signal, time
import torch
from torch import nn
from training import Exact, Noisy
from hpcsched.worker.ranks import process_group

def dies(where):
    """Be killed at this point, once the test has armed it."""
    usual = getattr(process_group.Peers, where)
    def dying(self, *args, **rest):
        if os.path.exists("armed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, *args, **rest)
    setattr(process_group.Peers, where, dying)

class Watched:
    """Writes down which samples each step was given, and goes slowly until the test lets it go."""

    def build(self, args):
        process_group.HAND_OVER_TIMEOUT_S = 10.0
        if os.environ["HPCSCHED_RANK"] == args.get("victim"):
            dies(args["dies"])
        parts = super().build(args)
        parts.dataset = (*parts.dataset, torch.arange(50))
        return parts

    def loss(self, model, batch):
        rank = os.environ["HPCSCHED_RANK"]
        if not (self.seen == 0 and os.environ.get("HPCSCHED_JOINING")):  # else it rehearses
            with open("seen." + rank + "." + str(os.getpid()), "a") as file:
                file.write(json.dumps(batch[2].tolist()) + "\\n")
        if not os.path.exists("go"):
            # On a busy machine a resize takes long: there must be steps left for all of them.
            crawls = self.seen >= self.args.get("crawl_at", self.seen + 1)
            time.sleep(0.5 if crawls else self.args.get("pause", 0.0))
        return super().loss(model, batch[:2])

class WatchedExact(Watched, Exact): pass
class WatchedNoisy(Watched, Noisy): pass

class Convolutional(Watched, Noisy):
    def network(self):
        return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8),
                             nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(),
                             nn.Linear(48, 3))

class Attentive(Watched, Noisy):
    def network(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        return nn.Sequential(nn.Linear(6, 16), nn.Unflatten(1, (2, 8)), nn.TransformerEncoder(layer, 2),
                             nn.Flatten(), nn.Linear(16, 3))

    def build(self, args):
        parts = super().build(args)
        parts.optimizer = torch.optim.AdamW(parts.model.parameters(), lr=0.01)
        parts.scheduler = None
        return parts
'''


class Elastic(Job):
    """Plays the agent for a job that is resized in place."""

    def __init__(self, folder: Path, trainer: str = "WatchedExact", steps: int = 300) -> None:
        super().__init__(folder, trainer=f"watched:{trainer}", steps=steps)
        (folder / "watched.py").write_text(WATCHED)
        os.mkfifo(folder / "control")
        self.control = os.open(folder / "control", os.O_RDWR)
        self.arena = os.memfd_create("arena")
        self.port = 0
        self.args: dict[str, Any] = {}
        self.resumes = False

    def environment(self, rank: int, world: int, port: int, args: dict[str, Any]) -> dict[str, str]:
        self.port = port
        return super().environment(rank, world, port, args) | {
            "OPEN_CONTROL": f"/proc/{os.getpid()}/fd/{self.control}" if rank == 0 else "",
            "OPEN_ARENA": f"/proc/{os.getpid()}/fd/{self.arena}",
        }

    def begin(self, world: int, **args: Any) -> list[BaseProcess]:
        self.args = args
        return self.start(world, **args)

    def order(self, **orders: Any) -> None:
        os.write(self.control, json.dumps(orders).encode() + b"\n")

    def resize(self, old: int, new: int, *, one_host: bool = True) -> list[BaseProcess]:
        """Ask for `new` ranks instead of `old`; returns those that join."""
        keep, attempt, port = list(range(min(old, new))), self.attempt + 1, self.port
        env = [self.environment(rank, new, port, self.args) for rank in range(len(keep), new)]
        self.attempt = attempt
        joining = [
            self.fork({**one, "HPCSCHED_JOINING": "1", "HPCSCHED_ATTEMPT": str(attempt)}) for one in env
        ]
        self.order(resize={"attempt": attempt, "world_size": new, "keep": keep, "one_host": one_host})
        return joining

    def go(self) -> None:
        """Let it train at full speed, to its end."""
        (self.folder / "go").touch()

    def word(self, attempt: int | None = None) -> dict[str, Any]:
        """What rank 0 says once it is ready as this attempt."""
        path = self.dir / f"ready.{attempt or self.attempt}"
        eventually(path.exists)
        return json.loads(path.read_text() or "{}")

    def samples_seen(self) -> list[int]:
        return sorted(itertools.chain.from_iterable(self.steps_seen()))

    def steps_seen(self) -> list[list[int]]:
        """What all ranks were given, rank by rank and step by step."""
        return [
            json.loads(line)
            for path in sorted(self.folder.glob("seen.*"))
            for line in path.read_text().splitlines()
        ]


def eventually(what: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "nothing has come of it"
        time.sleep(0.005)


def expected_samples(job: Elastic) -> list[int]:
    from hpcsched.worker.session.sampler import Sampler

    return sorted(Sampler(50, 3).batch(0, job.steps * 7).tolist())
