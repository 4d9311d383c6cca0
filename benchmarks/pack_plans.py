"""How long it takes to plan packs, and what strategies of pairing gain by speeds that were measured.

    python benchmarks/pack_plans.py [--json] [--quick]

Planning: members drawn from the search space of the paper's Table 3, with made-up costs.

Pairing: Gavel's measurements of two processes on one GPU (profiles/packs/gavel-pairs.csv), alone and
together, on three types. A set is some jobs drawn at random that each take an hour alone. Pairs run together
until one is done, the other goes on alone; one pair after another. Pairs that do not fit into memory run one
after the other. Gavel's jobs are of different kinds with data of their own: nothing is shared but the GPU, so
this says little about stacks of one network on one stream of data, and much about who should be kept apart.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections import defaultdict
from functools import cache
from itertools import product

from common import ROOT, Report, main, median, ms

from hpcsched.planning.packing.admission import PackLimits
from hpcsched.planning.packing.costs import ModelBatch, PackCosts
from hpcsched.planning.packing.distance import DistanceAxis
from hpcsched.planning.packing.planner import plan
from hpcsched.planning.packing.problem import PackProblem
from hpcsched.planning.packing.speeds import EPOCH_SAMPLES, PackMember, Speeds
from hpcsched.planning.packing.strategies import STRATEGIES, Strategy

GOALS_S = {10: 0.05, 100: 1.0, 1000: 2.0}
"""Most seconds that the median plan of so many members should take."""

BATCHES = tuple(range(20, 71, 5))
OPTIMIZERS = ("Adam", "SGD", "Adagrad", "Momentum")
RATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ACTIVATIONS = ("Sigmoid", "Leaky ReLU", "Tanh", "ReLU")
"""The paper's Table 3: 1,056 configurations."""

JOBS = 12
"""In a set: few enough to try all ways to pair them."""

PAIRS = ROOT / "profiles" / "packs" / "gavel-pairs.csv"
ELSEWHERE = {"k80": "p100", "p100": "v100", "v100": "p100"}
"""Whose measurements are used for `measured on another GPU`."""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    _planning(report, quick=options.quick)
    hours = _hours()
    for gpu in ("v100",) if options.quick else ("k80", "p100", "v100"):
        _all_pairs(report, gpu, hours[gpu])
        _pairing(report, gpu, hours, sets=5 if options.quick else 200)
    return report


# -- how long planning takes ---------------------------------------------------------------------------


def _planning(report: Report, *, quick: bool) -> None:
    for count in (10, 100) if quick else (10, 100, 1000):
        for what, steps in (("an epoch each", False), ("all with other numbers of steps", True)):
            taken = []
            for seed in range(2 if quick else 6):
                problem = _paper_space(count, devices=(1, 4)[seed % 2], seed=seed, steps=steps)
                began = time.perf_counter()
                plan(problem)
                taken.append(time.perf_counter() - began)
            report.results[f"plan_of_{count}{'_steps' if steps else ''}_s"] = taken
            report.row(
                f"a plan of packs for {count:,} members, {what}, with all strategies compared",
                f"median {ms(median(taken))}, max {ms(max(taken))}",
                goal="" if steps else f"at most {ms(GOALS_S[count])}",
                ok=None if steps else median(taken) <= GOALS_S[count],
            )


def _paper_space(count: int, *, devices: int, seed: int, steps: bool) -> PackProblem:
    """So many of the paper's configurations; a network's activation makes it another model."""
    rng = random.Random(seed)
    costs = []
    for activation, batch in product(ACTIVATIONS, BATCHES):
        separate_s = (2 + 0.05 * batch) * rng.uniform(0.9, 1.1) / 1000
        costs.append(
            PackCosts(
                model=activation,
                batch=batch,
                separate_s=separate_s,
                shared_s=0.3 * separate_s,
                points={n: separate_s * n ** rng.uniform(0.5, 0.95) for n in (1, 2, 4, 8)},
                memory_mib={1: 500 + 4 * batch, 2: 600 + 8 * batch},
                switch_s=0.05,
            )
        )
    configs = rng.sample(list(product(BATCHES, OPTIMIZERS, RATES, ACTIVATIONS)), count)
    members = tuple(
        PackMember(
            name=str(i),
            model=activation,
            batch=batch,
            config={"optimizer": optimizer, "lr": rate, "activation": activation},
            steps=rng.randint(100, 10_000) if steps else None,
        )
        for i, (batch, optimizer, rate, activation) in enumerate(configs)
    )
    axes = (
        DistanceAxis(name="batch", kind="numeric", values=BATCHES),
        DistanceAxis(name="optimizer"),
        DistanceAxis(name="lr", kind="numeric", values=RATES),
        DistanceAxis(name="activation"),
    )
    limits = PackLimits(capacity_mib=16_000)
    return PackProblem(
        members=members,
        speeds=Speeds(costs, epoch=60_000),
        limits=limits,
        devices=devices,
        axes=axes,
        seed=seed,
    )


# -- what pairing gains --------------------------------------------------------------------------------

Hours = dict[tuple[ModelBatch, ModelBatch], float | None]
"""Hours that a pair takes whose jobs take one alone each, by both orders; None: it does not fit."""


def _hours() -> dict[str, Hours]:
    found: dict[str, Hours] = defaultdict(dict)
    with PAIRS.open(newline="") as file:
        for row in csv.DictReader(file):
            one, other = (_key(row[f"model_{x}"], int(row[f"batch_{x}"])) for x in "ab")
            alone = [float(row[f"alone_{x}"]) for x in "ab"]
            packed = [float(row[f"packed_{x}"]) for x in "ab"]
            if min(alone) == 0:
                continue  # does not run on this GPU at all
            slow, fast = sorted(p / a for p, a in zip(packed, alone, strict=True))
            hours = 1 / fast + 1 - slow / fast if slow > 0 else None
            found[row["gpu"]][one, other] = found[row["gpu"]][other, one] = hours
    return found


def _key(model: str, batch: int) -> ModelBatch:
    """Gavel knows no batch of some: a number that no other has."""
    return ModelBatch(model, batch or {"A3C": 1, "CycleGAN": 2}[model])


def _all_pairs(report: Report, gpu: str, hours: Hours) -> None:
    once = {tuple(sorted(pair)): each for pair, each in hours.items()}
    fit = [each for each in once.values() if each is not None]
    same = [each for (a, b), each in once.items() if each is not None and a.model == b.model]
    report.results[f"{gpu}_pair_over_alone"] = [each / 2 for each in fit]
    lose = sum(each > 2 for each in fit)
    report.row(
        f"{gpu.upper()}: all {len(once)} pairs ({len(once) - len(fit)} do not fit)",
        f"median gain {median([1 - each / 2 for each in fit]):.0%}; {lose / len(fit):.0%} lose; of one model "
        f"{median([1 - each / 2 for each in same]):.0%}, {sum(x > 2 for x in same) / len(same):.0%} lose",
    )


def _pairing(report: Report, gpu: str, hours: dict[str, Hours], *, sets: int) -> None:
    keys = sorted({key for pair in hours[gpu] for key in pair})
    known = sorted({key for pair in hours[ELSEWHERE[gpu]] for key in pair} & set(keys))
    model = (DistanceAxis(name="model"),)
    ways: dict[str, tuple[Strategy, str, tuple[DistanceAxis, ...]]] = {
        "paired at random": (STRATEGIES["random"], gpu, ()),
        "paired by model": (STRATEGIES["knn"], gpu, model),
        "paired by batch": (STRATEGIES["batch"], gpu, ()),
        "paired as measured": (STRATEGIES["measured"], gpu, ()),
        "paired as measured on another GPU": (STRATEGIES["measured"], ELSEWHERE[gpu], ()),
    }
    gains: dict[str, list[float]] = defaultdict(list)
    losing: dict[str, int] = defaultdict(int)
    pairs: dict[str, int] = defaultdict(int)
    for seed in range(sets):
        drawn = random.Random(seed).choices(known, k=JOBS)
        members = tuple(
            PackMember(name=str(i), model=key.model, batch=key.batch) for i, key in enumerate(drawn)
        )
        for name, (strategy, judge, axes) in ways.items():
            speeds = _speeds(known, hours[judge])
            limits = PackLimits(most=2)
            packs = strategy(
                PackProblem(
                    members=members, speeds=speeds, limits=limits, axes=axes, threshold=0.0, seed=seed
                )
            )
            total = 0.0
            for pack in packs:
                each = hours[gpu][pack[0].key, pack[1].key] if len(pack) == 2 else None
                total += len(pack) if each is None else each
                if each is not None:
                    pairs[name] += 1
                    losing[name] += each > 2
            gains[name].append(1 - total / JOBS)
        gains["paired in the best of all ways"].append(1 - _least_hours(drawn, hours[gpu]) / JOBS)
    for name, found in gains.items():
        # Samples are not negative: what is kept is the time over that without packing.
        report.results[f"{gpu}_{name.replace(' ', '_')}_over_alone"] = [1 - gain for gain in found]
        lost = f", {losing[name] / pairs[name]:.0%} of its pairs lose" if pairs[name] else ""
        report.row(
            f"{gpu.upper()}, {JOBS} jobs {name}",
            f"saves {sum(found) / len(found):.1%} of the time in the mean, "
            f"{min(found):.1%} in the worst set{lost}",
        )
    pairs_of = zip(gains["paired as measured"], gains["paired in the best of all ways"], strict=True)
    longer = [(1 - mine) / (1 - most) - 1 for mine, most in pairs_of]
    report.results[f"{gpu}_paired_as_measured_over_best"] = [max(0.0, each) for each in longer]
    report.row(
        f"{gpu.upper()}, paired as measured: longer than the best of all ways to pair",
        f"{sum(longer) / len(longer):.2%} in the mean, {max(longer):.1%} in the worst set",
        goal="at most 1 % in the mean",
        ok=sum(longer) / len(longer) <= 0.01,
    )


def _speeds(keys: list[ModelBatch], hours: Hours) -> Speeds:
    """Costs by which an epoch takes each of them an hour alone, and pairs as long as was measured."""
    never = 20.0  # hours: of pairs that do not fit
    costs = [
        PackCosts(
            model=key.model,
            batch=key.batch,
            separate_s=key.batch / EPOCH_SAMPLES,
            points={2: (hours[key, key] or never) * key.batch / EPOCH_SAMPLES},
        )
        for key in keys
    ]
    pairs = [(one, other) for i, one in enumerate(keys) for other in keys[i + 1 :]]
    return Speeds(costs, factors={pair: (hours[pair] or never) / 2 for pair in pairs})


def _least_hours(jobs: list[ModelBatch], hours: Hours) -> float:
    """The least that any way to pair these jobs takes, or to leave some alone."""

    @cache
    def least(left: int) -> float:
        if not left:
            return 0.0
        first = left.bit_length() - 1
        left ^= 1 << first
        best = 1 + least(left)
        for i in range(first):
            if left >> i & 1:
                best = min(best, (hours[jobs[first], jobs[i]] or 2.0) + least(left ^ 1 << i))
        return best

    return least((1 << len(jobs)) - 1)


if __name__ == "__main__":
    main("planning of packs", measure)
