"""How well the batch sizes of an epoch are forecast from those of the epochs before, and how long it takes.

    python benchmarks/vsw_forecast.py [--json] [--quick]

Each trajectory has 20 values an epoch; every epoch from the third on is forecast from all before it. The
error is the mean absolute percentage error over an epoch's values, then over epochs, then over trajectories.
All that a trajectory is drawn from has a fixed seed; the method's few constants were chosen on other seeds
(100 and more) of the suite, and the trajectories of `measured` played no part in that.

The suite: `exponential` 128 to 6,000 with fluctuation (periodic; a sine, a saw or a sine whose phase
wanders, 0.5 to 4 epochs long, 18 %) and noise (6 %); `plateau`, growth up to a bound; `falling`; `slow`, a
flat start and then growth; `staircase`, the rule of section 6.1 at work (10 % up or down by a noisy
similarity of gradients, around a target that grows and wanders).

`measured`, apart from the suite: the same rule, around gradient noise scales measured in four trainings.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
from common import Report, main, median, ms

from hpcsched.planning.vsw.forecast import METHODS, forecast

Array = npt.NDArray[np.float64]

CELLS = 20
"""Values of an epoch."""

LOW, HIGH = 128.0, 8192.0
SEEDS = {"staircase": 12, "measured": 12}
"""Trajectories of a family, 6 of the others: those by the rule differ most."""

GAIN = 0.10
"""The goal: so much less error than the last value repeated, over the suite."""

ERROR = 0.15
"""The goal: at most so much error, over the suite."""

WORSE = 0.02
"""A family's error may be above that of the last value by this share of it, which is noise."""

CALL_S = 1.0

CHEAP = ("last", "damped")

NOISE_SCALES = {
    "ResNet-18 on CIFAR-10": """
        2.77 5.08 9.31 13.2 15.4 18.6 22.2 24.8 27.3 31.6 33.8 34.4 40.9 41.7 46.2 47 52.1 58.9 59.8
        63.5 74.1 72.6 87 90.1 95.5 111 118 140 127 163 199 199 248 256 267 310 288 323 343 417 444
        443 511 550 639 622 528 455 467 500""",
    "DeepSpeech2 on CMU-ARCTIC": """
        1.47 7.53 16.5 29 40.8 54.9 74.7 101 153 189 221 272 440 690 1020 854 1280 1310 1800 1380
        2430 5010 2670 3920 3640 3530 5520 44200 3940 6970 3440 2810 2780 3450 6410 2350 3260 2150
        2850 3440""",
    "ResNet-50 on ImageNet": """
        13.4 25.6 30.3 34.9 37.7 39.5 41.3 42.3 43.5 44.3 45.1 45.6 45.7 46.4 47.5 230 212 196 179
        175 164 162 154 151 149 153 151 151 153 151 517 476 459 449 466 458 448 445 454 452 451 446
        444 442 444""",
    "YOLOv3 on PASCAL-VOC": """
        19.9 28.1 39.2 41.8 47.4 47.4 49 49.5 53.3 63.8 58 60.9 72.4 71.4 82 81.3 116 110 180 170
        233 255 444 521 771""",
}
"""Variance over squared norm of the gradient after every second epoch, the median of all batch sizes.

Measured by the authors of Pollux (OSDI 2021): github.com/petuum/adaptdl, branch osdi21-artifact, commit
c793c7089bd3, simulator/traces; Apache-2.0. Rounded. ResNet-50's two jumps are where its learning rate falls.
"""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    methods: dict[str, tuple[str, ...] | None] = {"chosen": None, "chosen of the cheap": CHEAP}
    needs = {"gpr": ("sklearn",), "smoothing": ("statsmodels",), "ensemble": ("sklearn", "statsmodels")}
    for name in METHODS:
        if all(map(find_spec, needs.get(name, ()))):
            methods[name] = (name,)
    errors: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        samples = _errors(
            family, methods, seeds=1 if options.quick else SEEDS.get(family, 6), quick=options.quick
        )
        for name, each in samples.items():
            report.results[f"{family}_{name.replace(' ', '_')}_error"] = each
        errors[family] = {name: sum(each) / len(each) for name, each in samples.items()}
        found, last = errors[family]["chosen"], errors[family]["last"]
        report.row(
            f"forecast of an epoch, `{family}`",
            _words(errors[family]),
            goal=f"at most {WORSE:.0%} above the last value's",
            ok=found <= (1 + WORSE) * last,
        )
    suite = {
        name: sum(errors[family][name] for family in FAMILIES if family != "measured") / (len(FAMILIES) - 1)
        for name in methods
    }
    for name, what in (("chosen", "all methods"), ("chosen of the cheap", "only numpy")):
        gain = 1 - suite[name] / suite["last"]
        report.row(
            f"forecast of an epoch, mean of the five families, {what}",
            f"{suite[name]:.1%} error, {gain:.0%} less than the last value repeated",
            goal=f"at most {ERROR:.0%}, at least {GAIN:.0%} less",
            ok=suite[name] <= ERROR and gain >= GAIN,
        )
    report.row("the same, each method", _words(suite))
    _times(report, quick=options.quick)
    return report


def _words(errors: dict[str, float]) -> str:
    chosen, last = errors["chosen"], errors["last"]
    rest = ", ".join(f"{name} {error:.1%}" for name, error in errors.items() if name != "chosen")
    return f"{chosen:.1%} error ({chosen / last - 1:+.0%} to `last`); {rest}"


def _errors(
    family: str, methods: dict[str, tuple[str, ...] | None], *, seeds: int, quick: bool
) -> dict[str, list[float]]:
    """Each method's mean error by trajectory."""
    samples: dict[str, list[float]] = defaultdict(list)
    for seed in range(seeds):
        values = trajectory(family, seed)
        found: dict[str, list[float]] = defaultdict(list)
        for origin in range(2 * CELLS, len(values) - CELLS + 1, CELLS * (5 if quick else 1)):
            actual = values[origin : origin + CELLS]
            for name, chosen_from in methods.items():
                said = forecast(values[:origin].tolist(), CELLS, low=LOW, high=HIGH, methods=chosen_from)
                found[name].append(float(np.mean(np.abs(np.array(said.values) - actual) / actual)))
        for name, each in found.items():
            samples[name].append(sum(each) / len(each))
    return samples


def _times(report: Report, *, quick: bool) -> None:
    """Of one call, with 400 values of history; what is imported late is imported by now."""
    values = 128 * np.exp(np.linspace(0, 3.8, 400) + np.random.default_rng(0).normal(0, 0.06, 400))
    for name, methods in (("all methods", None), ("only numpy", CHEAP)):
        taken = []
        for i in range(2 if quick else 20):
            history = (values * (1 + i / 100)).tolist()
            began = time.perf_counter()
            forecast(history, CELLS, low=LOW, high=HIGH, methods=methods)
            taken.append(time.perf_counter() - began)
        report.results[f"forecast_{name.replace(' ', '_')}_s"] = taken
        report.row(
            f"a forecast of {CELLS} values from 400, {name}",
            f"median {ms(median(taken))}, max {ms(max(taken))}",
            goal=f"at most {ms(CALL_S)}",
            ok=max(taken) <= CALL_S,
        )


# -- trajectories --------------------------------------------------------------------------------------


def trajectory(family: str, seed: int) -> Array:
    """Batch sizes of a whole training, 10 to 50 epochs."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(family)])
    return np.clip(FAMILIES[family](rng, seed), LOW, HIGH)


def _length(rng: np.random.Generator) -> int:
    return CELLS * int(rng.integers(10, 31))


def _noise(rng: np.random.Generator, cells: int) -> Array:
    return rng.normal(0, 0.06, cells)


def _wave(rng: np.random.Generator, cells: int) -> Array:
    period = CELLS * math.exp(rng.uniform(math.log(0.5), math.log(4)))
    shape = rng.integers(3)
    turns = np.arange(cells) / period + rng.uniform()
    if shape == 1:
        return 0.18 * (2 * (turns % 1) - 1)
    if shape == 2:
        turns = turns + np.cumsum(rng.normal(0, 0.03, cells))
    return 0.18 * np.sin(2 * math.pi * turns)


def _exponential(rng: np.random.Generator, seed: int) -> Array:
    cells = _length(rng)
    trend = math.log(6000 / 128) * np.linspace(0, 1, cells)
    return 128 * np.exp(trend + _wave(rng, cells) + _noise(rng, cells))


def _plateau(rng: np.random.Generator, seed: int) -> Array:
    cells = _length(rng)
    reached = rng.uniform(0.3, 0.7)
    top = rng.uniform(2000, HIGH)
    trend = math.log(top / 128) * np.minimum(0, np.linspace(0, 1, cells) / reached - 1)
    return top * np.exp(trend + _wave(rng, cells) * rng.uniform(0, 0.5) + _noise(rng, cells))


def _falling(rng: np.random.Generator, seed: int) -> Array:
    cells = _length(rng)
    first, last = rng.uniform(3000, 8000), rng.uniform(200, 1000)
    trend = math.log(last / first) * np.linspace(0, 1, cells)
    return first * np.exp(trend + _wave(rng, cells) + _noise(rng, cells))


def _slow(rng: np.random.Generator, seed: int) -> Array:
    cells = _length(rng)
    wait = rng.uniform(0.3, 0.7)
    trend = math.log(6000 / 256) * np.maximum(0, (np.linspace(0, 1, cells) - wait) / (1 - wait))
    return 256 * np.exp(trend + _wave(rng, cells) * 0.5 + _noise(rng, cells))


def _staircase(rng: np.random.Generator, seed: int) -> Array:
    cells = _length(rng)
    epoch = 256 * 100 * rng.uniform(30, 80)
    last = rng.uniform(2000, 10000)
    return _by_rule(rng, cells, epoch, lambda progress: 256 * (last / 256) ** progress)


def _measured(rng: np.random.Generator, seed: int) -> Array:
    """Around a measured noise scale: the batch that it would have in its last tenth is drawn."""
    scales = np.array(list(NOISE_SCALES.values())[seed % len(NOISE_SCALES)].split(), dtype=np.float64)
    epoch = 256 * 100 * rng.uniform(30, 80)
    factor = rng.uniform(2000, 10000) / float(np.median(scales[-len(scales) // 10 :]))
    at = np.linspace(0, 1, len(scales))
    return _by_rule(
        rng,
        CELLS * len(scales),
        epoch,
        lambda progress: factor * math.exp(np.interp(progress, at, np.log(scales))),
    )


def _by_rule(rng: np.random.Generator, cells: int, epoch: float, target: Callable[[float], float]) -> Array:
    """The rule of section 6.1: every 100 steps 10 % up where the similarity is below 0.1, else 10 % down.

    The similarity of the gradients of two halves of a batch B is B / (B + S), S a noise scale by which it is
    0.1 at the `target` of that progress, which wanders, plus the noise of one measurement. `epoch` samples.
    """
    every, threshold, rate = 100, 0.1, 0.1
    accuracy = rng.uniform(0.01, 0.04)
    batch, done, wander = 256.0, 0.0, 0.0
    values: list[float] = []
    while len(values) < cells:
        wander = 0.97 * wander + rng.normal(0, 0.03)
        aim = target(done / (epoch * cells / CELLS)) * math.exp(wander)
        similarity = batch / (batch + aim * (1 - threshold) / threshold) + rng.normal(0, accuracy)
        if similarity < threshold:
            batch = max(batch + 1, float(int(batch * (1 + rate))))
        else:
            batch = min(batch - 1, float(int(batch * (1 - rate))))
        batch = min(max(batch, LOW), HIGH)
        done += every * batch
        while len(values) < cells and (len(values) + 1) * epoch / CELLS <= done:
            values.append(batch)
    return np.array(values)


FAMILIES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "exponential": _exponential,
    "plateau": _plateau,
    "falling": _falling,
    "slow": _slow,
    "staircase": _staircase,
    "measured": _measured,
}


if __name__ == "__main__":
    main("forecasts of batch sizes", measure)
