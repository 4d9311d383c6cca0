"""Plays the agent for parameter-server trainings: servers and workers are started, changed, and killed."""

from __future__ import annotations

import json
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from elasticjobs import Elastic

TRAININGS = '''
import json, os, signal, time
from functools import partial
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from hpcsched.worker import Parts, Trainer
from hpcsched.worker.ps import meter
from hpcsched.worker.ps.parameter_server import ParameterServer
from hpcsched.worker.ps.roles import WiredPeers
from hpcsched.worker.ps.protocol import PeerChannels

usual = ParameterServer.close

def close(strategy):
    """Leaves behind what went over the server's link."""
    link = getattr(strategy.post, "link", None)
    if link is not None:
        with open("link." + os.environ["HPCSCHED_RANK"], "w") as file:
            json.dump([link.inward.bytes, link.outward.bytes], file)
    usual(strategy)

class Base(Trainer):
    """Goes slowly until the test lets it go, and writes down which samples each step was given."""
    dtype = torch.float64

    def build(self, args):
        self.args, self.seen = args, 0
        rank = os.environ["HPCSCHED_RANK"]
        if rank == "0":
            file = os.open("progress", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.environ["HPCSCHED_PROGRESS_FD"] = str(file)
            os.environ.pop("HPCSCHED_PROGRESS_ID", None)
        if "sample_s" in args:
            meter.SAMPLE_S, meter.Stability = args["sample_s"], partial(meter.Stability, limit=1.0)
        if rank == args.get("victim"):
            self.dies_before_it_pushes(args["dies_at"], args.get("dies_to", 1))
        if "joiner_dies" in args and os.environ.get("HPCSCHED_JOINING"):
            owner = ParameterServer if hasattr(ParameterServer, args["joiner_dies"]) else WiredPeers
            setattr(owner, args["joiner_dies"], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        ParameterServer.close = close
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(50, 6, generator=generator, dtype=self.dtype)
        y = torch.randint(0, 3, (50,), generator=generator)
        self.model = self.network().to(self.dtype)
        optimizer = self.optimizer(self.model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.95) if args.get("schedule") else None
        return Parts(
            model=self.model, optimizer=optimizer, dataset=(x, y, torch.arange(50)),
            global_batch=args.get("batch", 7), loss=self.loss, scheduler=schedule, seed=3,
            evaluate=lambda model: {
                "weight": sum(float(p.double().abs().sum()) for p in model.parameters()),
                "loss": float(self.losses(model, x, y).mean()),
            },
        )

    def dies_before_it_pushes(self, step, server):
        """The gradients of this step to this server; those before have got theirs."""
        send = PeerChannels.send
        def dying(wire, data, to):
            if to == server and self.seen == step:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            return send(wire, data, to)
        PeerChannels.send = dying

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
            with open("order", "a") as file:
                file.write(rank + "\\n")
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

class Drift(nn.Module):
    """What has been seen before changes what comes out, also in training."""
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        self.level = 0.5 * self.level + x.detach().mean()
        return x + self.level

class Normed(Base):
    def network(self):
        layers = nn.BatchNorm1d(16), nn.Dropout(0.2), Drift(), nn.Linear(16, 3)
        return nn.Sequential(nn.Linear(6, 16), *layers)

class Drifting(Base):
    def network(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Drift(), nn.Linear(16, 3))

class Hooked(Base):
    def optimizer(self, model):
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

class LBFGS(Base):
    def optimizer(self, model):
        return torch.optim.LBFGS(model.parameters())

class Failing(Base):
    def losses(self, model, x, y):
        if os.environ["HPCSCHED_RANK"] == "2" and self.seen == 5:
            raise RuntimeError("the user's own")
        return super().losses(model, x, y)

class Sparse(Base):
    def network(self):
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(48, 3))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(self, model, x, y):
        return cross_entropy(model((x * 8).long() % 50), y, reduction="none")
'''

Config = tuple[int, int]
"""Servers and workers."""


class PsJob(Elastic):
    """One job; its ranks are known by whether they serve."""

    def __init__(self, folder: Path, trainer: str = "Plain", steps: int = 60, **strategy: Any) -> None:
        super().__init__(folder, steps=steps)
        (folder / "pstraining.py").write_text(TRAININGS)
        self.trainer = f"pstraining:{trainer}"
        self.strategy = strategy
        self.serves: list[bool] = []

    def environment(self, rank: int, world: int, port: int, args: dict[str, Any]) -> dict[str, str]:
        found = super().environment(rank, world, port, args)
        if self.serves:
            found["HPCSCHED_STRATEGY"] = json.dumps({"kind": "ps", "cpus": 4, **self.strategy})
            found["HPCSCHED_SEATS"] = json.dumps([{"server": serves, "share": 1.0} for serves in self.serves])
        return found

    def usages(self) -> list[dict[str, Any]]:
        """What the agent was told of the use of resources."""
        lines = (self.folder / "progress").read_text().splitlines()
        return [line["usage"] for line in map(json.loads, lines) if "usage" in line]

    def begin_as(self, config: Config, **args: Any) -> list[BaseProcess]:
        """Start so many servers and workers."""
        self.serves = [True] * config[0] + [False] * config[1]
        return self.begin(sum(config), **args)

    def become(self, config: Config, *, share: float = 1.0, without: int | None = None) -> list[BaseProcess]:
        """Order other servers and workers; returns those that join.

        As few come and go as can be, but for the rank `without`, which has to leave.
        """
        left = list(config)
        keep = []
        for rank, serves in enumerate(self.serves):
            if left[not serves] > 0 and rank != without:
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
