"""Random models, plans and batches for the tests of burst plans, and ranks that run them."""

from __future__ import annotations

import copy
import random
import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import ncclrules
import torch
import torch.distributed as dist
from forkserver import SERVER
from torch import nn
from torch.nn import functional

from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.engine import Engine
from hpcsched.worker.layers.graph import Layers, trace

DEADLINE_S = 120.0


class Ranks:
    """Processes in one group, of gloo or NCCL's stand-in, that do what they are asked to, all together."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        pairs = [SERVER.Pipe() for _ in range(world_size)]
        self._lines = [ours for ours, _ in pairs]
        self._processes = [
            SERVER.Process(target=_serve, args=(theirs, rank, world_size, port, backend), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(wires, *arguments)` returns on each rank; AssertionError with what went wrong."""
        for line in self._lines:
            line.send((function, arguments))
        answers = []
        for rank, line in enumerate(self._lines):
            assert line.poll(DEADLINE_S), f"rank {rank} says nothing"
            good, answer = line.recv()
            assert good, f"rank {rank}: {answer}"
            answers.append(answer)
        return answers

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(line: Connection, rank: int, world_size: int, port: int, backend: str) -> None:
    torch.set_num_threads(1)
    ncclrules.use()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=DEADLINE_S)
    )
    wires = Channels(rank, world_size, torch.device("cpu"))
    while True:
        try:
            function, arguments = line.recv()
        except EOFError:
            break
        try:
            line.send((True, function(wires, *arguments)))
        except Exception:
            line.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


# -- random cases --------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Branches, nested ones too, that are added up, or put side by side and mixed."""

    def __init__(self, branches: list[nn.Module], mix: nn.Module | None, skip: bool) -> None:
        super().__init__()
        self.branches, self.mix, self.skip = nn.ModuleList(branches), mix, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [branch(x) for branch in self.branches]
        if self.mix is not None:
            return self.mix(torch.cat(made, 1))  # type: ignore[no-any-return]
        total = x if self.skip else made.pop()
        for one in made:
            total = total + one
        return total


class Scaled(nn.Module):
    """Draws by the function, not the module."""

    def __init__(self, inner: nn.Module, p: float) -> None:
        super().__init__()
        self.inner, self.p = inner, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.inner(x), self.p, self.training)


class Draw:
    """Makes random things, by one seed the same on every rank."""

    def __init__(self, seed: int, *, dropout: bool) -> None:
        self.random, self.dropout = random.Random(seed), dropout

    def image(self, channels: int, depth: int) -> nn.Module:
        """Keeps the shape [samples, channels, 4, 4]."""
        kind = self.random.choice(["conv", "conv", "chain", "branch", "branch"]) if depth else "conv"
        if kind == "conv":
            norm = self.random.choice(
                [
                    nn.BatchNorm2d(channels),
                    nn.BatchNorm2d(channels, momentum=None),
                    nn.BatchNorm2d(channels, affine=False),
                    nn.GroupNorm(1, channels),
                    nn.Identity(),
                ]
            )
            size = self.random.choice([1, 3])
            conv = nn.Conv2d(channels, channels, size, padding=size // 2, bias=self.random.random() < 0.5)
            return nn.Sequential(conv, norm, self.act(), *self.drop(nn.Dropout2d))
        if kind == "chain":
            return nn.Sequential(*(self.image(channels, depth - 1) for _ in range(2)))
        branches = [self.image(channels, depth - 1) for _ in range(self.random.choice([1, 2, 2, 3]))]
        skip = len(branches) == 1 or self.random.random() < 0.3
        mix = None if skip or self.random.random() < 0.5 else nn.Conv2d(channels * len(branches), channels, 1)
        return Residual(branches, mix, skip)

    def flat(self, width: int, depth: int) -> nn.Module:
        """Keeps the shape [samples, width]."""
        kind = self.random.choice(["linear", "linear", "chain", "branch"]) if depth else "linear"
        if kind == "linear":
            norm = self.random.choice([nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Identity()])
            whole: nn.Module = nn.Sequential(
                nn.Linear(width, width), norm, self.act(), *self.drop(nn.Dropout)
            )
            return Scaled(whole, 0.2) if self.dropout and self.random.random() < 0.3 else whole
        if kind == "chain":
            return nn.Sequential(*(self.flat(width, depth - 1) for _ in range(2)))
        branches = [self.flat(width, depth - 1) for _ in range(self.random.choice([1, 2]))]
        skip = len(branches) == 1 or self.random.random() < 0.3
        mix = None if skip or self.random.random() < 0.5 else nn.Linear(width * len(branches), width)
        return Residual(branches, mix, skip)

    def act(self) -> nn.Module:
        return self.random.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Tanh()])

    def drop(self, kind: type[nn.Module]) -> list[nn.Module]:
        return [kind(0.25)] if self.dropout and self.random.random() < 0.4 else []

    def model(self) -> nn.Module:
        depth = self.random.choice([1, 2, 2, 3])
        if self.random.random() < 0.6:
            body = [nn.Conv2d(2, 3, 3, padding=1), self.image(3, depth), nn.Flatten(), nn.Linear(48, 3)]
        else:
            body = [nn.Flatten(), nn.Linear(32, 6), self.flat(6, depth), nn.Linear(6, 3)]
        return nn.Sequential(*body)

    def plan(self, layers: Layers, world_size: int, batch: int) -> BurstPlan:
        """Any ranks for each layer, in any order in which layers can run."""
        alike = self.random.random() < 0.15
        everyone = range(world_size)
        sets = [
            self.random.sample(everyone, self.random.randint(1, min(world_size, batch))) for _ in range(9)
        ]
        done: set[int] = set()
        planned = []
        while len(planned) < len(layers.layers):
            ready = [layer for layer in layers.layers if layer.id not in done and set(layer.prev) <= done]
            layer = ready[0] if self.random.random() < 0.7 else self.random.choice(ready)
            done.add(layer.id)
            ranks = tuple(sorted(sets[0] if alike else self.random.choice(sets)))
            planned.append(PlannedLayer(id=layer.id, name=layer.name, ranks=ranks))
        return BurstPlan(model="random", gpus=world_size, global_batch=batch, layers=tuple(planned))


def on_one_rank(layers: Layers, batch: int) -> BurstPlan:
    """Everything on one rank."""
    planned = tuple(PlannedLayer(id=layer.id, name=layer.name, ranks=(0,)) for layer in layers.layers)
    return BurstPlan(model="random", gpus=1, global_batch=batch, layers=planned)


def batches(
    seed: int, steps: int, batch: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(batch, 2, 4, 4, generator=generator, dtype=dtype)
        yield x, torch.randint(0, 3, (batch,), generator=generator)


def step_of(engine: Engine, x: torch.Tensor, y: torch.Tensor, seen: int) -> None:
    """A training step without the optimizer's."""
    share, last = engine.first_share, engine.last_share
    engine.clock.on = seen // len(x) % 3 == 2  # some steps layer by layer, as for timing
    engine.begin(seen)
    result = engine.forward((x[share.start : share.stop],) if share else ())
    if result is not None:
        losses = functional.cross_entropy(result, y[last.start : last.stop], reduction="none")
        (losses.sum() / len(x)).backward()
    engine.backward()


def cases(
    wires: Channels, seeds: list[int], plans: int, dtype: torch.dtype, adam: bool, steps: int = 20
) -> list[tuple[float, str]]:
    """For each model, with several plans and batches: the largest difference from training in one process.

    Of anything trained or kept, after so many steps, on rank 0, with its name.
    """
    return [worst for seed in seeds for worst in _Model(wires, seed, dtype, adam, steps).compared(plans)]


class _Model:
    """A random model, trained by plans and in one process."""

    def __init__(self, wires: Channels, seed: int, dtype: torch.dtype, adam: bool, steps: int) -> None:
        self.wires, self.seed, self.dtype, self.adam, self.steps = wires, seed, dtype, adam, steps
        self.draw = Draw(seed, dropout=seed % 3 == 0)
        torch.manual_seed(seed)
        self.model = self.draw.model().to(dtype)
        self.plain = copy.deepcopy(self.model)
        self.begin = copy.deepcopy(self.model.state_dict())
        self.example = (torch.zeros(2, 2, 4, 4, dtype=dtype),)
        self.layers = trace(self.model, self.example)
        self.lone = trace(self.plain, self.example) if self.draw.dropout and not wires.rank else None

    def compared(self, plans: int) -> Iterator[tuple[float, str]]:
        for number in range(plans):
            batch = self.draw.random.randint(4, 9)
            first, second = (self.draw.plan(self.layers, self.wires.world_size, batch) for _ in range(2))
            seen = 100 * number  # places in the stream, from which dropout draws
            states = self.by_plan(first, second if number % 2 else None, batch, seen)
            if self.wires.rank == 0:
                yield self.difference(states, self.in_one(batch, seen), batch, first)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        model.load_state_dict(self.begin)
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def engine(
        self, layers: Layers, plan: BurstPlan, batch: int, wires: Channels, optimizer: torch.optim.Optimizer
    ) -> Engine:
        return Engine(
            layers, self.example, plan, batch=batch, seed=self.seed, wires=wires, optimizer=optimizer
        )

    def by_plan(
        self, plan: BurstPlan, then: BurstPlan | None, batch: int, seen: int
    ) -> torch.optim.Optimizer:
        optimizer = self.optimizer_of(self.model)
        engine = self.engine(self.layers, plan, batch, self.wires, optimizer)
        for number, (x, y) in enumerate(batches(self.seed, self.steps, batch, self.dtype)):
            if then is not None and number == self.steps // 2:
                engine.switch(then)
            optimizer.zero_grad()
            step_of(engine, x, y, seen + number * batch)
            optimizer.step()
        engine.gather_state()
        return optimizer

    def in_one(self, batch: int, seen: int) -> torch.optim.Optimizer:
        """As anyone would train it; where there is dropout, with the samples' own random numbers."""
        optimizer = self.optimizer_of(self.plain)
        alone = None
        if self.lone is not None:
            wires = Channels(0, 1, torch.device("cpu"))
            alone = self.engine(self.lone, on_one_rank(self.lone, batch), batch, wires, optimizer)
        for number, (x, y) in enumerate(batches(self.seed, self.steps, batch, self.dtype)):
            optimizer.zero_grad()
            if alone is not None:
                step_of(alone, x, y, seen + number * batch)
            else:
                (functional.cross_entropy(self.plain(x), y, reduction="none").sum() / batch).backward()
            optimizer.step()
        return optimizer

    def difference(
        self, here: torch.optim.Optimizer, there: torch.optim.Optimizer, batch: int, plan: BurstPlan
    ) -> tuple[float, str]:
        pairs = [
            (name, a, b)
            for (name, a), b in zip(
                self.model.state_dict().items(), self.plain.state_dict().values(), strict=True
            )
        ]
        for (name, a), b in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            pairs += [
                (f"{key} of {name}", here.state[a][key], value) for key, value in there.state[b].items()
            ]
        worst, name = max(((a.double() - b.double()).abs().max().item(), name) for name, a, b in pairs)
        return worst, f"{name}: seed {self.seed}, batch {batch}, {[at.ranks for at in plan.layers]}"
