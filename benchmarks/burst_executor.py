"""What running a training by a burst plan costs by itself, on CPU slots (gloo), two ranks.

    python benchmarks/burst_executor.py [--json] [--quick] [--cuda]

All trainings live in the same two processes and take turns in random order, a few steps each, so that
whatever else the machine does meets all of them: one by a plan that gives every layer to all ranks (with
batch norm: both of its kinds), and two with `strategy = "ddp"`'s session, which count alike and show how much
of a difference is chance. Then the plan is switched back and forth at a step boundary. With `--cuda`: on two
GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import Report, main, median, ms

RANKS = 2
ROUNDS, QUICK_ROUNDS, STEPS = 200, 2, 4
SWITCHES, QUICK_SWITCHES = 12, 2
BATCH, QUICK_BATCH = 64, 4
SIZE, QUICK_SIZE = 32, 8
DEADLINE_S = 900.0
OVERHEAD, SWITCH_S = 0.03, 0.020

_SERVER = multiprocessing.get_context("forkserver")


def measure(options: argparse.Namespace) -> Report:
    _SERVER.set_forkserver_preload(["torch", "torch._dynamo", "hpcsched.worker.burst.strategy"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ours, theirs = _SERVER.Pipe()
    ranks = [
        _SERVER.Process(target=_rank, args=(rank, port, theirs, options.quick, options.cuda), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise RuntimeError(f"nothing after {DEADLINE_S:g} s")
        found: dict[str, list[float]] = ours.recv()
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    report = Report(results=found)
    _say(report, found, "plain_ddp", "plain_burst", "no batch norm", goal=True)
    _say(report, found, "normed_ddp", "normed_local", "batch norm of each rank's share by both", goal=True)
    whole = "batch norm of each rank's share by ddp, of the whole batch by the plan"
    _say(report, found, "normed_ddp", "normed_burst", whole, goal=False)
    step_s = median(found["plain_burst_step_s"])
    switch_s = median(found["switch_s"])
    report.row(
        f"switch of the plan, half the layers change hands ({found['moved_bytes'][0] / 1e6:.3g} MB)",
        f"{ms(switch_s)}, where a step takes {ms(step_s)}",
        goal="at most a step + 20 ms",
        ok=switch_s <= step_s + SWITCH_S,
    )
    return report


def _say(
    report: Report, found: dict[str, list[float]], base: str, other: str, what: str, *, goal: bool
) -> None:
    first, again, burst = (found[f"{name}_step_s"] for name in (base, f"{base}_again", other))
    ddp = first + again
    over = median(burst) / median(ddp) - 1
    chance = median(again) / median(first) - 1
    report.row(
        f"a step by a plan with all layers on all ranks, over one of ddp ({what})",
        f"{over:+.1%} ({ms(median(burst))} against {ms(median(ddp))}; ddp against itself {chance:+.1%})",
        goal="at most 3 % more" if goal else "",
        ok=over <= OVERHEAD if goal else None,
    )


# -- in the ranks --------------------------------------------------------------------------------------


def _rank(rank: int, port: int, line: Connection, quick: bool, cuda: bool) -> None:
    import torch

    from hpcsched.worker.process.contract import JobEnv
    from hpcsched.worker.ranks.process_group import Peers

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    env = JobEnv(
        job_id=1,
        attempt=1,
        rank=rank,
        world_size=RANKS,
        local_rank=rank,
        devices=(),
        job_dir=Path("/nonexistent"),
        checkpoint_dir=Path("/nonexistent"),
        resume=False,
        notify_pid=None,
        master_addr="127.0.0.1",
        master_port=port,
    )
    bench = _Bench(Peers.join(env, device), quick=quick)
    found = bench.compare("plain") | bench.compare("normed") | bench.switches()
    if rank == 0:
        line.send(found)


class _Bench:
    """One rank's part."""

    def __init__(self, peers: Any, *, quick: bool) -> None:
        self.peers = peers
        self.batch, self.size = (QUICK_BATCH, QUICK_SIZE) if quick else (BATCH, SIZE)
        self.rounds, self.switching = (QUICK_ROUNDS, QUICK_SWITCHES) if quick else (ROUNDS, SWITCHES)

    def compare(self, key: str) -> dict[str, list[float]]:
        trainings = [("ddp", self.ddp(key)), ("ddp_again", self.ddp(key)), ("burst", self.burst(key)[0])]
        if key == "normed":
            trainings.append(("local", self.burst(key, local_norms=True)[0]))
        times: dict[str, list[float]] = {name: [] for name, _ in trainings}
        for _, training in 3 * trainings:
            next(training)  # the first steps cost more
        draw = random.Random(0)  # the same on both ranks
        for _ in range(self.rounds):
            draw.shuffle(trainings)
            for name, training in trainings:
                times[name].append(self.timed(training))
        return {f"{key}_{name}_step_s": found for name, found in times.items()}

    def timed(self, training: Iterator[None]) -> float:
        """Seconds of a step."""
        self.settle()
        began = time.perf_counter()
        for _ in range(STEPS):
            next(training)
        self.settle()
        return (time.perf_counter() - began) / STEPS

    def settle(self) -> None:
        import torch

        if self.peers.device.type == "cuda":
            torch.cuda.synchronize()
        self.peers.agree(False)

    def parts(self, key: str) -> Any:
        import torch
        from torch import nn
        from torch.nn.functional import cross_entropy

        from hpcsched.worker import Parts

        torch.manual_seed(0)
        widths = [3, 32, 32, 64, 64, 128]
        model = nn.Sequential()
        for i, (a, b) in enumerate(itertools.pairwise(widths)):
            model.append(nn.Conv2d(a, b, 3, padding=1, stride=1 + i % 2))
            if key == "normed":
                model.append(nn.BatchNorm2d(b))
            model.append(nn.ReLU())
        model.extend(
            [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        )
        x, y = torch.randn(256, 3, self.size, self.size), torch.randint(0, 10, (256,))
        return Parts(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            dataset=(x, y),
            global_batch=self.batch,
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        )

    def arguments(self, parts: Any) -> dict[str, Any]:
        return {
            "model": parts.model,
            "optimizer": parts.optimizer,
            "dataset_size": parts.size,
            "global_batch": self.batch,
            "total_steps": 10**6,
            "ranks": self.peers,
        }

    def ddp(self, key: str) -> Iterator[None]:
        """As the strategy trains, a step at a time."""
        from hpcsched.worker.session.data_parallel import DataParallel
        from hpcsched.worker.session.session import Session

        parts = self.parts(key)
        strategy = DataParallel(parts)
        session = Session(**self.arguments(parts), strategy=strategy)
        for _ in session.steps():
            strategy.train_step()
            yield

    def burst(self, key: str, *, local_norms: bool = False) -> tuple[Iterator[None], Any, Any]:
        """The same by a plan; the strategy and the layers too."""

        from hpcsched.worker.burst.burst_parallel import BurstParallel
        from hpcsched.worker.burst.channels import Channels
        from hpcsched.worker.burst.engine import Engine
        from hpcsched.worker.layers.graph import trace
        from hpcsched.worker.session.session import Session

        parts = self.parts(key)
        strategy = BurstParallel(parts)
        session = Session(**self.arguments(parts), strategy=strategy)
        example = (parts.dataset[0][:2].to(self.peers.device),)
        layers = trace(parts.model, example)
        wires = Channels(self.peers.rank, RANKS, self.peers.device)
        engine = Engine(
            layers,
            example,
            self.plan(layers, len(layers.layers)),
            batch=self.batch,
            seed=0,
            wires=wires,
            optimizer=parts.optimizer,
            local_norms=local_norms,
        )
        strategy.run_by(engine, wires)

        def training() -> Iterator[None]:
            for _ in session.steps():
                strategy.train_step()
                yield

        return training(), strategy, layers

    def plan(self, layers: Any, wide: int, narrow: tuple[int, ...] = (0,)) -> Any:
        """The first `wide` layers on all ranks, the others on `narrow`."""
        from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer

        ranks = tuple(range(RANKS))
        planned = tuple(
            PlannedLayer(id=layer.id, name=layer.name, ranks=ranks if layer.id < wide else narrow)
            for layer in layers.layers
        )
        return BurstPlan(model="bench", gpus=RANKS, global_batch=self.batch, layers=planned)

    def switches(self) -> dict[str, list[float]]:
        """Half the layers go from rank 0 to rank 1, then to both."""
        training, strategy, layers = self.burst("plain")
        half = len(layers.layers) // 2
        plans = [self.plan(layers, half), self.plan(layers, half, (1,)), self.plan(layers, half + half)]
        times = []
        for number in range(3 * self.switching + 1):
            for _ in range(2):
                next(training)
            self.settle()
            began = time.perf_counter()
            strategy.switch(plans[number % 3])
            self.settle()
            times.append(time.perf_counter() - began)
        moved = sum(
            p.numel() * p.element_size() for la in layers.layers[half:] for p in la.module.parameters()
        )
        # The one to rank 1 moves parameters and momentum; the others nothing, or as much.
        return {"switch_s": times[1::3], "moved_bytes": [2.0 * moved]}


if __name__ == "__main__":
    main("training by a burst plan", measure, "--cuda")
