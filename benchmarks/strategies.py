"""Is any strategy slower than plain training? Example models by each strategy, on one and on two CPU slots.

    python benchmarks/strategies.py [--json] [--quick] [--only MODEL]... [--budget-s S] [--output FILE]

All trainings of a model live in the same two processes, one thread each, as `hpcsched run` starts them for
two slots (they keep freed memory as those do). They take turns, some steps each, every one beside a turn of
`ddp` that it is compared with: whatever else the machine does meets both. `plain` is a loop as anybody writes
it, without hpcsched. `ddp again` is a second training by `ddp`: how far it is from the first is chance.
Strategies that try something at their start have done so before anything is counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import Report, main, median, ms, partial_results

RANKS = 2
ROUNDS, QUICK_ROUNDS = 16, 2
TURN_S, MOST_STEPS = 0.3, 40
"""A turn takes about as long, or so many steps. In short ones all begin with others' data in the caches."""
BEGIN_STEPS, QUICK_BEGIN_STEPS = {"burst": 130, "vsw": 160}, 12
"""Within so many steps a strategy has tried what it tries at the start; others try nothing."""
DEADLINE_S, BUDGET_S = 1500.0, 1500.0
GOAL = 0.02

_NETWORK, _DIGITS = "hpcsched.examples.models:Network", "hpcsched.examples.digits:Digits"
_SMALL = {"network": "", "image": 32, "classes": 10, "width": 0.25, "batch": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits mlp": (_DIGITS, {}),
    "digits cnn": (_DIGITS, {"kind": "cnn"}),
    "text": ("hpcsched.examples.text:Text", {}),
    "vgg16": (_NETWORK, {**_SMALL, "network": "vgg16"}),
    "mobilenet-v2": (_NETWORK, {**_SMALL, "network": "mobilenet-v2"}),
    "resnet50": (_NETWORK, {**_SMALL, "network": "resnet50"}),
    "inception-v3": (_NETWORK, {**_SMALL, "network": "inception-v3", "image": 75, "batch": 8}),
}
"""Trainers with their arguments. The networks have a quarter of their channels."""

STRATEGIES = ("plain", "ddp again", "burst", "burst, local norms", "vsw", "packed")
JUDGED = ("burst", "burst, local norms", "vsw", "packed")

Pairs = dict[str, list[tuple[float, float]]]
"""Seconds of a step by a strategy on so many slots, and by ddp just before or after."""

_SERVER = multiprocessing.get_context("forkserver")


def measure(options: argparse.Namespace) -> Report:
    _SERVER.set_forkserver_preload(["torch", "torch._dynamo", "hpcsched.worker.burst.strategy"])
    report = Report(output=options.output)
    models = options.only or (["digits cnn"] if options.quick else list(MODELS))
    end = time.monotonic() + options.budget_s
    for model in models:
        if time.monotonic() < end:
            found, kept = _measured(model, options.quick)
            for slots in (1, RANKS):
                _say(report, model, slots, found, kept)
            for name, pairs in found.items():
                key = f"{model} {name.replace(',', '')}".replace(" ", "_")
                report.results[f"{key}_step_s"] = [own for own, _ in pairs]
                report.results[f"{key}_ddp_step_s"] = [ddp for _, ddp in pairs]
    return report


def _measured(model: str, quick: bool) -> tuple[Pairs, dict[str, str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ours, theirs = _SERVER.Pipe()
    with tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder:
        arguments = (port, theirs, Path(folder), model, quick)
        ranks = [_SERVER.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            if not ours.poll(DEADLINE_S):
                raise RuntimeError(f"{model}: nothing after {DEADLINE_S:g} s")
            found, kept = ours.recv()
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
    return found, kept


def _say(report: Report, model: str, slots: int, found: Pairs, kept: dict[str, str]) -> None:
    """A row: what a step takes by each strategy over one of ddp, of the turns beside it."""
    names = [name for name in STRATEGIES if f"{name} on {slots}" in found]
    pairs = {name: found[f"{name} on {slots}"] for name in names}
    ratios = {name: median([own / ddp for own, ddp in pairs[name]]) for name in names}
    words = [f"{name} {ratio:.2f}{_runs(kept, name, slots)}" for name, ratio in ratios.items()]
    base_s = median([ddp for some in pairs.values() for _, ddp in some])
    report.row(
        f"{model}, {slots} slot{'s' if slots > 1 else ''}: {ms(base_s)} by ddp",
        "; ".join(words),
        goal=f"none above {1 + GOAL:g}",
        ok=all(ratios[name] <= 1 + GOAL for name in names if name in JUDGED),
    )


def _runs(kept: dict[str, str], name: str, slots: int) -> str:
    """Which plan a burst training has kept."""
    what = kept.get(f"{name} on {slots}")
    return f" (keeps {what})" if what else ""


# -- in the ranks --------------------------------------------------------------------------------------


def _rank(rank: int, port: int, line: Connection, folder: Path, model: str, quick: bool) -> None:
    import torch

    from hpcsched.worker.process.contract import JobEnv
    from hpcsched.worker.process.memory import keep_freed_memory
    from hpcsched.worker.ranks.process_group import Peers

    torch.set_num_threads(1)
    keep_freed_memory()
    env = JobEnv(
        job_id=1,
        attempt=1,
        rank=rank,
        world_size=RANKS,
        local_rank=rank,
        devices=(),
        job_dir=folder,
        checkpoint_dir=folder / "none",
        resume=False,
        notify_pid=None,
        master_addr="127.0.0.1",
        master_port=port,
    )
    found = _Bench(Peers.join(env, torch.device("cpu")), env, model, quick=quick).run()
    if rank == 0:
        line.send(found)


class _Bench:
    """One rank's part."""

    def __init__(self, peers: Any, env: Any, model: str, *, quick: bool) -> None:
        from hpcsched.worker.ranks.process_group import Peers

        self.peers, self.alone = peers, Peers(0, 1, peers.device)
        self.env, self.model, self.quick = env, model, quick
        self.bursts: dict[str, Any] = {}

    def run(self) -> tuple[Pairs, dict[str, str]]:
        from hpcsched.worker.vsw import adaptive_batches

        trainings = self.trainings()
        # A share of the clock's time, of which each has a small part here.
        adaptive_batches.LOOK_SHARE /= len(trainings)
        for name, training in trainings.items():
            steps = QUICK_BEGIN_STEPS if self.quick else BEGIN_STEPS.get(name.split()[0], QUICK_BEGIN_STEPS)
            for number in range(steps):
                self.step(name, training)
                if number > QUICK_BEGIN_STEPS and name in self.bursts and self.bursts[name].running:
                    break
        steps = self.turns(trainings)
        others = [name for name in trainings if not name.startswith("ddp on")]
        found: Pairs = {name: [] for name in others}
        draw = random.Random(0)  # the same on both ranks
        for _ in range(QUICK_ROUNDS if self.quick else ROUNDS):
            for name in draw.sample(others, len(others)):
                pair = [name, f"ddp on {name[-1]}"]
                draw.shuffle(pair)
                took = {each: self.timed(each, trainings[each], steps) for each in pair}
                found[name].append((took[name], took[f"ddp on {name[-1]}"]))
        return found, {name: strategy.running for name, strategy in self.bursts.items()}

    def step(self, name: str, training: Iterator[None]) -> None:
        if name.endswith(f" on {RANKS}") or self.peers.rank == 0:
            next(training)

    def turns(self, trainings: dict[str, Iterator[None]]) -> int:
        """Steps of a turn, the same on all ranks."""
        name = f"ddp on {RANKS}"
        step_s = self.timed(name, trainings[name], 4)
        return int(self.peers.tell(max(1, min(MOST_STEPS, round(TURN_S / step_s))), int))

    def timed(self, name: str, training: Iterator[None], steps: int) -> float:
        """Seconds of a step."""
        self.peers.agree(False)
        began = time.perf_counter()
        for _ in range(steps):
            self.step(name, training)
        self.peers.agree(False)
        return (time.perf_counter() - began) / steps

    def trainings(self) -> dict[str, Iterator[None]]:
        """All of them, in the same order on both ranks."""
        makers: dict[str, Callable[[int], Iterator[None]]] = {
            "plain": self.plain,
            "ddp": self.ddp,
            "ddp again": self.ddp,
            "burst": self.burst,
            "burst, local norms": lambda slots: self.burst(slots, batch_norm="local"),
            "vsw": self.vsw,
            "packed": self.packed,
        }
        return {
            f"{name} on {slots}": make(slots)
            for slots in (1, RANKS)
            for name, make in makers.items()
            if slots == 1 or name not in ("plain", "packed")
        }

    def parts(self) -> Any:
        from hpcsched.worker.session.trainer import build

        trainer, args = MODELS[self.model]
        module, _, name = trainer.partition(":")
        parts = build(getattr(import_module(module), name)(), args)
        parts.model.train()
        return parts

    def session(self, slots: int) -> dict[str, Any]:
        return {"ranks": self.peers if slots > 1 else self.alone, "total_steps": 10**6}

    def plain(self, slots: int) -> Iterator[None]:
        """A loop of the user's own."""
        parts = self.parts()
        from hpcsched.worker.session.sampler import Sampler

        sampler, at = Sampler(parts.size, parts.seed), 0
        while True:
            batch = parts.batch(sampler.batch(at, parts.global_batch))
            at += parts.global_batch
            parts.optimizer.zero_grad()
            parts.loss(parts.model, batch).mean().backward()
            parts.optimizer.step()
            yield

    def made_by(self, session: Any, strategy: Any) -> Iterator[None]:
        for _ in session.steps():
            strategy.train_step()
            yield

    def ddp(self, slots: int) -> Iterator[None]:
        from hpcsched.worker.session.data_parallel import DataParallel
        from hpcsched.worker.session.session import session_of

        parts = self.parts()
        strategy = DataParallel(parts)
        return self.made_by(session_of(parts, strategy, **self.session(slots)), strategy)

    def burst(self, slots: int, **options: Any) -> Iterator[None]:
        from hpcsched.contract.strategies import Burst
        from hpcsched.worker.burst.strategy import begin

        parts = self.parts()
        if slots == 1 and self.peers.rank > 0:
            return iter(())
        home = self.env.job_dir / f"{slots}{options}"
        home.mkdir(exist_ok=True)
        env = replace(self.env, job_dir=home)
        session, strategy = begin(parts, env, Burst(**options), **self.session(slots))
        self.bursts[f"burst{', local norms' if options else ''} on {slots}"] = strategy
        return self.made_by(session, strategy)

    def vsw(self, slots: int) -> Iterator[None]:
        """With a global batch that stays what it is."""
        from hpcsched.planning.vsw.options import WorkerOptions
        from hpcsched.worker.session.session import session_of
        from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches

        parts = self.parts()
        share = parts.global_batch // slots
        table = {"local_batch": [share // 2, share], "global_batch": parts.global_batch, "every": 50}
        strategy = AdaptiveBatches(parts, WorkerOptions.parse(table))
        return self.made_by(session_of(parts, strategy, **self.session(slots)), strategy)

    def packed(self, slots: int) -> Iterator[None]:
        """A pack of one."""
        from hpcsched.worker.packed import load, pack

        together = pack([load(self.parts(), steps=10**6)])
        while True:
            together.step()
            yield


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=list(MODELS), metavar="MODEL", default=[])
    partial_results(parser, BUDGET_S)


if __name__ == "__main__":
    main("is any strategy slower than plain training?", measure, options_of=_options)
