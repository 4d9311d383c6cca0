"""What packing small trainings saves on a CPU, one thread: a step of all members against so many trainings.

    python benchmarks/pack_steps.py [--json] [--quick]

Each training alone is the loop of `strategy = "ddp"`, with its own reading of the data. All ways of a set of
trainings live in one process and take turns in random order, some steps each, so that whatever else the
machine does meets all of them; the trainings alone are there twice, which shows how much of a difference is
chance. Times are the process's CPU time. IMPV is the share of time saved (pack, Eq. 3).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common import Report, main, median, ms

SIZES, QUICK_SIZES = (1, 2, 4, 8), (2,)
BATCHES, QUICK_BATCHES = (8, 32, 100), (8,)
INSTANCES = {1: 10, 2: 5, 4: 3, 8: 3}
"""By trainings: few make less to do, and more that is chance."""
ROUNDS, QUICK_ROUNDS = 4, 1
SLICE_S = 0.03
"""A slice takes about so long; in whole turns."""
MODES = ("loop", "stacked", "auto")
GOALS = {2: 0.20, 8: 0.50}
"""By trainings, what packing has to save of small ones at the middle batch."""
WORST = 0.02
UNEQUAL, QUICK_UNEQUAL = (20, 20, 35, 35, 50, 50, 70, 70), (20, 20, 35)
"""Batches of trainings of which a stack may fill up the smaller ones."""


def measure(options: argparse.Namespace) -> Report:
    import torch

    torch.set_num_threads(1)
    report = Report()
    Case("mlp", 2, 8).setup_s()  # the first stack of a process imports half of torch's compiler
    sizes = QUICK_SIZES if options.quick else SIZES
    batches = QUICK_BATCHES if options.quick else BATCHES
    cases = [Case(net, n, batch) for net in ("mlp", "wide", "cnn") for batch in batches for n in sizes]
    if not options.quick:
        cases += [Case("broad", 2, 100), Case("broad", 4, 100)]
    worst = worst_alone = 0.0
    for case in cases:
        instances, rounds = (1, QUICK_ROUNDS) if options.quick else (INSTANCES[case.size], ROUNDS)
        found = case.run(instances, rounds)
        report.results |= {f"{case.name}_{key}": samples for key, samples in found.items()}
        alone = median(found["separate_step_s"] + found["again_step_s"])
        chance = median(found["again_step_s"]) / median(found["separate_step_s"]) - 1
        saved = {m: 1 - median(found[f"{m}_step_s"]) / alone for m in MODES if f"{m}_step_s" in found}
        if case.size > 1:
            worst = max(worst, -saved["auto"])
        else:
            worst_alone = max(worst_alone, -saved["auto"])
        goal = GOALS.get(case.size) if case.net in ("mlp", "cnn") and case.batch == 32 else None
        shares = ", ".join(f"{mode} {value:+.0%}" for mode, value in saved.items())
        taken = " or ".join(sorted(set(case.chosen)))
        report.row(
            f"{case.size} of `{case.net}` at batch {case.batch}: IMPV",
            f"{shares} of {ms(alone)} (chance {chance:+.1%}); `auto` takes {taken}",
            goal="" if goal is None else f"the best at least {goal:.0%}",
            ok=None if goal is None else max(saved.values()) >= goal,
        )
    for net in ("mlp", "wide"):
        _unequal(report, net, quick=options.quick)
    setups = [s for name, samples in report.results.items() if name.endswith("setup_s") for s in samples]
    report.row(
        "making a stack: tracing it and checking it", f"{ms(median(setups))}, at most {ms(max(setups))}"
    )
    report.row("`auto` at its worst", f"{worst:.1%} slower", goal=f"at most {WORST:.0%}", ok=worst <= WORST)
    report.row("... of one, which is a loop as each alone is", f"{worst_alone:.1%} slower")
    return report


class Case:
    """So many trainings of one kind at one batch size, or each at one of its own."""

    def __init__(self, net: str, size: int, batch: int, batches: Sequence[int] = ()) -> None:
        self.net, self.size, self.batch = net, size, batch
        self.batches: Sequence[int] = tuple(batches) or (batch,) * size
        self.name = f"{net}_b{batch}_n{size}"
        self.chosen: list[str] = []

    def run(self, instances: int, rounds: int) -> dict[str, list[float]]:
        """CPU seconds of steps of all, by way; and of making a stack.

        Where the tensors of a training happen to lie makes a difference of some per cent, so all are made
        anew a few times.
        """
        found: dict[str, list[float]] = {}
        for _ in range(instances):
            for key, samples in self.compare(rounds).items():
                found.setdefault(key, []).extend(samples)
        return found | ({"setup_s": [self.setup_s()]} if self.size > 1 else {})

    def compare(self, rounds: int) -> dict[str, list[float]]:
        """The same for one making of all trainings."""
        packs = self.packs()
        trainings = {key: [self.alone(seed) for seed in range(self.size)] for key in ("separate", "again")}
        ways: dict[str, Callable[[int], None]] = {key: _alone(some) for key, some in trainings.items()}
        ways |= {mode: _together(*some) for mode, some in packs.items()}
        every = [pack for some in packs.values() for pack in some]
        for pack in every:
            while any(group.first or group.wanted is None for group in pack.groups):
                pack.step()
        self.chosen.append(packs["auto"][0].groups[0].wanted)
        for way in ways.values():  # everybody has its memory, and no turn is begun
            way(10)
        for pack in every:
            pack.settle()
        steps = self.steps(ways["separate"])
        draw = random.Random(0)
        order = list(ways.items())
        found: dict[str, list[float]] = {f"{key}_step_s": [] for key in ways}
        for _ in range(rounds):
            draw.shuffle(order)
            for key, way in order:
                found[f"{key}_step_s"].append(_cpu_s(way, steps) / steps)
        return found

    def steps(self, way: Callable[[int], None]) -> int:
        """So many that a slice takes long enough to be measured."""
        return 10 * max(1, round(SLICE_S / _cpu_s(way, 10)))

    def setup_s(self) -> float:
        """CPU seconds more that the step takes in which a stack is made."""
        pack = self.packed("stacked")
        for _ in range(3):
            pack.step()
        making_s = _cpu_s(_together(pack), 1)
        return max(0.0, making_s - _cpu_s(_together(pack), 5) / 5)

    def samples_s(self, mode: str, samples: int) -> tuple[float, float]:
        """CPU seconds until each training has seen so many samples: one after the other, and in a pack whose
        members go through them at the same pace."""
        alone_s = 0.0
        for seed in range(self.size):
            training = self.alone(seed)
            _alone([training])(10)
            alone_s += _cpu_s(_alone([training]), samples // self.batches[seed])
        pack = self.packed(mode)
        while any(group.first or group.wanted is None for group in pack.groups):
            pack.step()
        _together(pack)(50)
        pack.settle()
        began, wanted = sum(m.session.samples for m in pack.members), samples * self.size
        began_s = time.process_time()
        while (seen := sum(m.session.samples for m in pack.members) - began) < wanted:
            pack.step()
        pack.settle()
        return alone_s, (time.process_time() - began_s) * wanted / seen

    def alone(self, seed: int) -> Iterator[None]:
        """As `ddp` trains, a step at a time."""
        from hpcsched.worker.session.data_parallel import DataParallel
        from hpcsched.worker.session.session import session_of

        parts = self.parts(seed)
        strategy = DataParallel(parts)
        for _ in session_of(parts, strategy, total_steps=10**9).steps():
            strategy.train_step()
            yield

    def packs(self) -> dict[str, list[Any]]:
        """By way, the packs of which each makes a step then."""
        modes = [mode for mode in MODES if self.size > 1 or mode != "stacked"]
        return {mode: [self.packed(mode)] for mode in modes}

    def packed(self, mode: str, seeds: Sequence[int] | None = None) -> Any:
        """A pack of these, or of all."""
        from hpcsched.worker.packed import load, pack

        seeds = range(self.size) if seeds is None else seeds
        return pack([load(self.parts(seed), name=str(seed), steps=10**9) for seed in seeds], mode=mode)

    def parts(self, seed: int) -> Any:
        import torch
        from torch.nn.functional import cross_entropy

        from hpcsched.worker import Parts

        torch.manual_seed(0)
        x, y = torch.randn(1024, *_SHAPES[self.net]), torch.randint(10, (1024,))
        torch.manual_seed(seed)
        model = _network(self.net)
        return Parts(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01 * (seed + 1), momentum=0.9),
            dataset=(x, y),
            global_batch=self.batches[seed],
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        )


class Unequal(Case):
    """Trainings of one kind with batches of their own."""

    def __init__(self, net: str, batches: Sequence[int]) -> None:
        super().__init__(net, len(batches), max(batches), batches)
        self.name = f"{net}_unequal"

    def packs(self) -> dict[str, list[Any]]:
        """`equal`: a stack of those of each batch; `ragged`: one of all, filled up."""
        alike: dict[int, list[int]] = {}
        for seed, batch in enumerate(self.batches):
            alike.setdefault(batch, []).append(seed)
        return {
            # A pack of each: in one pack that is to loop those with small batches make more steps.
            "loop": [self.packed("loop", [seed]) for seed in range(self.size)],
            "equal": [self.packed("stacked", seeds) for seeds in alike.values()],
            "ragged": [self.packed("stacked")],
            "auto": [self.packed("auto")],
        }


def _unequal(report: Report, net: str, *, quick: bool) -> None:
    case = Unequal(net, QUICK_UNEQUAL if quick else UNEQUAL)
    found = case.run(1, QUICK_ROUNDS) if quick else case.run(INSTANCES[case.size], ROUNDS)
    report.results |= {f"{case.name}_{key}": samples for key, samples in found.items()}
    step_s = {key.removesuffix("_step_s"): median(samples) for key, samples in found.items()}
    alone = median(found["separate_step_s"] + found["again_step_s"])
    shares = ", ".join(f"{way} {1 - step_s[way] / alone:+.0%}" for way in ("loop", "equal", "ragged", "auto"))
    report.row(
        f"{case.size} of `{net}` at batches {', '.join(map(str, dict.fromkeys(case.batches)))}: IMPV",
        f"{shares} of {ms(alone)}; `auto` takes {' or '.join(sorted(set(case.chosen)))}",
    )


_SHAPES = {"mlp": (64,), "wide": (3072,), "broad": (3072,), "cnn": (3, 8, 8)}
_WIDTHS = {"mlp": (64, 32, 32, 10), "wide": (3072, 128, 128, 10), "broad": (3072, 1024, 1024, 10)}


def _network(net: str) -> Any:
    from torch import nn

    if net == "cnn":
        first = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        second = (nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, 10))
    a, b, c, d = _WIDTHS[net]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def _alone(trainings: list[Iterator[None]]) -> Callable[[int], None]:
    """Each all of its steps, then the next one: as in processes of their own."""

    def go(steps: int) -> None:
        for training in trainings:
            for _ in range(steps):
                next(training)

    return go


def _together(*packs: Any) -> Callable[[int], None]:
    def go(steps: int) -> None:
        for _ in range(steps):
            for pack in packs:
                pack.step()

    return go


def _cpu_s(way: Callable[[int], None], steps: int) -> float:
    began = time.process_time()
    way(steps)
    return time.process_time() - began


if __name__ == "__main__":
    main("packed steps", measure)
