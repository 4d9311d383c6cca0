"""Plays the agent for parameter-server trainings: servers and workers are started, changed, and killed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from test_worker_resize import Elastic

TRAININGS = '''
import json, os, time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from hpcsched.worker import Parts, Trainer

class Base(Trainer):
    """Goes slowly until the test lets it go, and writes down which samples each step was given."""
    dtype = torch.float64

    def build(self, args):
        self.args, self.seen = args, 0
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(50, 6, generator=generator, dtype=self.dtype)
        y = torch.randint(0, 3, (50,), generator=generator)
        self.model = self.network().to(self.dtype)
        optimizer = self.optimizer(self.model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.95) if args.get("schedule") else None
        return Parts(
            model=self.model, optimizer=optimizer, dataset=(x, y, torch.arange(50)),
            global_batch=args.get("batch", 7), loss=self.loss, scheduler=schedule, seed=3,
            evaluate=lambda model: {"weight": sum(float(p.double().abs().sum()) for p in model.parameters())},
        )

    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer(self, model):
        if self.args.get("optimizer") == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def loss(self, model, batch):
        rank = os.environ["HPCSCHED_RANK"]
        if not (self.seen == 0 and os.environ.get("HPCSCHED_JOINING")):  # else it rehearses
            with open("seen." + rank + "." + str(os.getpid()), "a") as file:
                file.write(json.dumps(batch[2].tolist()) + "\\n")
        self.seen += 1
        if not os.path.exists("go"):
            time.sleep(self.args.get("pause", 0.0))
        if rank == self.args.get("slow"):
            time.sleep(0.02)
        return self.losses(model, *batch[:2])

    def losses(self, model, x, y):
        return cross_entropy(model(x), y, reduction="none")

class Plain(Base):
    pass

class Wholes(Base):
    """An optimizer that looks at whole tensors."""
    def optimizer(self, model):
        return torch.optim.Adafactor(model.parameters(), lr=0.05)

class Odd(Base):
    """One layer is frozen, one is never used but decays, samples use one of two others; two types."""
    def network(self):
        return nn.ModuleDict({
            "frozen": nn.Linear(6, 6), "left": nn.Linear(6, 3), "right": nn.Linear(6, 3),
            "unused": nn.Linear(6, 3), "scale": nn.Linear(1, 3),
        })

    def build(self, args):
        parts = super().build(args)
        model = parts.model
        model["scale"].float()
        model["frozen"].requires_grad_(False)
        with torch.no_grad():
            model["frozen"].weight.mul_(args.get("frozen", 1.0))
        groups = [
            {"params": [*model["left"].parameters(), *model["unused"].parameters()], "weight_decay": 0.1},
            {"params": [p for n in ("frozen", "right", "scale") for p in model[n].parameters()]},
        ]
        parts.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        parts.scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 4, 0.95)
        return parts

    def losses(self, model, x, y):
        hidden = torch.tanh(model["frozen"](x))
        side = (x[:, :1] > 0).double()
        if side.all() or not side.any():
            result = model["left" if side.all() else "right"](hidden)
        else:
            result = side * model["left"](hidden) + (1 - side) * model["right"](hidden)
        shift = model["scale"](torch.ones(1, 1)).double()
        return cross_entropy(result + shift, y, reduction="none")

class Normed(Base):
    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
'''

Config = tuple[int, int]
"""Servers and workers."""


def seats(config: Config, ranks: Sequence[int] = (), share: float = 4.0) -> list[dict[str, Any]]:
    """Servers first; `ranks` says which ones are the servers where that is not so."""
    servers, workers = config
    chosen = ranks or range(servers)
    return [{"server": rank in chosen, "share": share} for rank in range(servers + workers)]


class PsJob(Elastic):
    """One job; its ranks are known by whether they serve."""

    def __init__(self, folder: Path, trainer: str = "Plain", steps: int = 60, **strategy: Any) -> None:
        super().__init__(folder, steps=steps)
        (folder / "pstraining.py").write_text(TRAININGS)
        self.trainer = f"pstraining:{trainer}"
        self.strategy = strategy
        self.serves: list[bool] = []
        read, self.lines = os.pipe()
        os.set_blocking(read, False)
        self.progress = read

    def environment(self, rank: int, world: int, port: int, args: dict[str, Any]) -> dict[str, str]:
        found = super().environment(rank, world, port, args)
        if self.serves:
            found["HPCSCHED_STRATEGY"] = json.dumps({"kind": "ps", **self.strategy})
            found["HPCSCHED_SEATS"] = json.dumps([{"server": serves, "share": 4.0} for serves in self.serves])
        return found

    def begin_as(self, config: Config, **args: Any) -> list[BaseProcess]:
        """Start so many servers and workers."""
        self.serves = [seat["server"] for seat in seats(config)]
        return self.begin(sum(config), **args)

    def become(self, config: Config, *, share: float = 4.0) -> list[BaseProcess]:
        """Order other servers and workers; returns those that join. As few come and go as can be."""
        left = list(config)
        keep = []
        for rank, serves in enumerate(self.serves):
            if left[not serves] > 0:
                left[not serves] -= 1
                keep.append(rank)
        self.serves = [self.serves[rank] for rank in keep] + [True] * left[0] + [False] * left[1]
        attempt, world = self.attempt + 1, len(self.serves)
        self.attempt = attempt
        joining = [
            self.fork(
                {
                    **self.environment(rank, world, self.port, self.args),
                    "HPCSCHED_JOINING": "1",
                    "HPCSCHED_ATTEMPT": str(attempt),
                }
            )
            for rank in range(len(keep), world)
        ]
        told = [{"server": serves, "share": share} for serves in self.serves]
        order = {"attempt": attempt, "world_size": world, "keep": keep, "one_host": True, "seats": told}
        self.order(resize=order)
        return joining
