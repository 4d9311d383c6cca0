"""A whole training on a cluster, simulated from published measurements: JABAS against others, as its Figure 10.

    python benchmarks/vsw_cluster.py [--json] [--quick]

Steps. ResNet-50 on V100s and P100s: `configure` on the costs that the authors of JABAS measured
(profiles/vsw). On T4s, four models on 4 hosts of 4: the times that the authors of Pollux measured on each
set of GPUs, nothing in between but local batches (data/pollux-t4-placements.csv).

Gradients. The noise scale S (summed variance of a sample's gradient over the gradient's squared length, in
samples) was measured by the authors of Pollux in trainings with several global batches, at each epoch
(data/pollux-t4-noise.csv). Two halves of a batch B then have a mean cosine of B / (B + 2 S).

Progress. Two readings, each for all policies. `passes`: an epoch is a pass over the data, whatever the
batch; so the paper trains JABAS and SimiGrad, as their batches are to cost no accuracy. `progress`: a sample
counts (S + b) / (S + B) of one in a batch as small as the smallest measured, b, as Pollux has it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import ROOT, Report, main

from hpcsched.planning.batching import METRICS, Batching
from hpcsched.planning.forecast import forecast
from hpcsched.planning.vsw.configure import Gpu, configure, scale
from hpcsched.planning.vsw.costs import iteration_s, sync_method
from hpcsched.planning.vsw.profile import Profile

DATA = Path(__file__).parent / "data"
PROFILE = ROOT / "profiles" / "vsw" / "resnet50-v100-p100.json"

TFLOPS = {"Tesla V100-PCIE-16GB": 14.13, "Tesla P100-PCIE-16GB": 9.52}
"""By which GPUs are paid (Eq. 8), relative to the V100."""

EVERY, RATE, THRESHOLD = 100, 0.1, 0.1
"""The rule of section 6.1 with the paper's settings (Table 4: for all its convolutional networks)."""

UPPER, LOWER = 2 / 3, 1 / 2
"""Pollux-AS adds hosts above and down to these shares of an ideal speed-up (section 7.1)."""

REALLOCATION_S = 30.0
"""Seconds without training when the GPUs change, for every policy: what Pollux' own simulator takes."""

CELLS = 20
"""Parts of an epoch of which batches are forecast."""

CHEAP = ("last", "damped")
"""Methods of the forecast: those that need numpy only, so that all machines say the same."""

SCATTER = 0.03
"""For a row on how much it matters: what a single similarity scatters in such trainings is not published."""

CANDIDATES = 50
"""Global batches that Pollux compares, in geometric steps."""


# -- what was measured of trainings --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Course:
    """A model's training: the noise scales that were measured in it.

    Args:
        app: its name in the data.
        size: samples of an epoch.
        epochs: of the training.
        batches: global batches it was measured with, rising.
        steps: cumulative, by batch and epoch: all batches make the same progress in an epoch.
        noise: samples, by batch and epoch.
    """

    app: str
    size: float
    epochs: int
    batches: tuple[int, ...]
    steps: np.ndarray
    noise: np.ndarray

    @classmethod
    def read(cls, app: str) -> Course:
        """Of the data. Where no gradient was left of the noise, S is taken from the epochs around."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        with (DATA / "pollux-t4-noise.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                if row["app"] == app:
                    noise = float(row["noise"]) if row["noise"] else math.nan
                    found[int(row["batch"])].append((float(row["step"]), noise))
        table = np.array([found[batch] for batch in sorted(found)])
        noise = np.log(table[:, :, 1])
        at = np.arange(noise.shape[1])
        for each in noise:
            known = np.isfinite(each)
            each[:] = np.interp(at, at[known], each[known])
        batches = tuple(sorted(found))
        return cls(
            app=app,
            size=batches[0] * table[0, -1, 0] / len(at),
            epochs=len(at),
            batches=batches,
            steps=table[:, :, 0],
            noise=np.exp(noise),
        )

    def noise_scale(self, done: float, batch: float) -> float:
        """S in samples, after `done` epochs: between two measured batches by their logarithms, else that of
        the nearest."""
        column = np.log(self.noise[:, min(int(done), self.epochs - 1)])
        return math.exp(float(np.interp(math.log(batch), np.log(self.batches), column)))

    def efficiency(self, noise: float, batch: float) -> float:
        """What a sample counts in a batch: 1 in the smallest measured."""
        return (noise + self.batches[0]) / (noise + batch)

    def progress(self) -> list[float]:
        """Epochs that the whole training with each batch makes by these efficiencies: all should agree."""
        steps = np.diff(self.steps, prepend=0.0, axis=1)
        made = []
        for batch, taken, noise in zip(self.batches, steps, self.noise, strict=True):
            counted = [self.efficiency(each, batch) for each in noise]
            made.append(float(np.dot(taken, counted)) * batch / self.size)
        return made


def similarity(noise: float, batch: float) -> float:
    """The mean cosine of the gradients of two halves of a batch."""
    return batch / (batch + 2 * noise)


# -- what was measured of steps ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on some GPUs: samples, seconds, and how it is run."""

    batch: int
    seconds: float
    how: Hashable = None


class Cluster(Protocol):
    """GPUs, and what steps take on them. A set of GPUs is whatever the cluster calls one.

    `hosts`: sets that grow by a host each, slowest first; the last is all GPUs. `least`: the smallest local
    batch.
    """

    least: int
    hosts: Sequence[Any]

    def count(self, gpus: Any) -> int: ...
    def price(self, gpus: Any) -> float:
        """What a second costs, in seconds of the dearest GPU."""

    def slowest(self, gpus: Any) -> Any:
        """The set of only the slowest of these GPUs."""

    def equal(self, gpus: Any, batch: int) -> Step:
        """The same local batch on each GPU, the largest that fits into every memory, and accumulation."""

    def best(self, gpus: Any, batch: int) -> Step:
        """The fastest configuration."""

    def best_set(self, trajectory: Sequence[int]) -> Any:
        """The GPUs on which an epoch with these batches, in equal parts, is done first."""


class Mixed:
    """The measured hosts of a profile, each so many times."""

    def __init__(self, copies: int) -> None:
        profile = Profile.parse(json.loads(PROFILE.read_text()), where=PROFILE.name)
        self._costs = profile.costs
        kinds = sorted({gpu.kind for gpu in profile.cluster}, key=TFLOPS.__getitem__)
        hosts = [
            tuple(Gpu(kind=gpu.kind, host=f"{gpu.host}-{i}") for gpu in profile.cluster if gpu.kind == kind)
            for kind in kinds
            for i in range(copies)
        ]
        self.hosts = [sum(hosts[: n + 1], ()) for n in range(len(hosts))]
        self.least = min(profile.local_batches)
        most = min(max(own.speeds) for own in profile.costs.gpus.values())
        self._local_batches = tuple(range(self.least, most + 1, 16))
        self._sync = sync_method(profile.costs.buckets)
        self.best = cache(self._best)
        self.equal = cache(self._equal)

    def count(self, gpus: tuple[Gpu, ...]) -> int:
        return len(gpus)

    def price(self, gpus: tuple[Gpu, ...]) -> float:
        return sum(TFLOPS[gpu.kind] for gpu in gpus) / max(TFLOPS.values())

    def slowest(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        return (min(gpus, key=lambda gpu: TFLOPS[gpu.kind]),)

    def _equal(self, gpus: tuple[Gpu, ...], batch: int) -> Step:
        local_batch, rounds = _split(batch / len(gpus), self.least, self._local_batches[-1])
        seconds = max(
            iteration_s(
                self._costs,
                kind,
                local_batch=local_batch,
                workers=rounds,
                at_once=1,
                gpus=len(gpus),
                one_host=len({gpu.host for gpu in gpus}) == 1,
                sync=self._sync,
            )
            for kind in {gpu.kind for gpu in gpus}
        )
        return Step(batch=local_batch * rounds * len(gpus), seconds=seconds)

    def _best(self, gpus: tuple[Gpu, ...], batch: int) -> Step:
        found = configure(self._costs, gpus, batch, local_batches=self._local_batches)
        return Step(batch=found.global_batch, seconds=found.iter_s, how=(found.local_batch, found.shares))

    def best_set(self, trajectory: Sequence[int]) -> tuple[Gpu, ...]:
        parts = [(batch, 1.0) for batch in trajectory]
        every = self.hosts[-1]
        found = scale(self._costs, every, parts, local_batches=self._local_batches)
        return tuple(every[i] for i in min(found, key=lambda each: each.epoch_s).gpus)


class Alike:
    """4 hosts of 4 T4: a set is the GPUs on each host, as digits."""

    def __init__(self, app: str) -> None:
        self._times: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        with (DATA / "pollux-t4-placements.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                if row["app"] == app:
                    times_s = float(row["step_s"]), float(row["sync_s"])
                    self._times[row["placement"]][int(row["local_batch"])] = times_s
        self.hosts = ["4", "44", "444", "4444"]
        self.least = min(self._times["1"])
        self.best = cache(self._best)

    def count(self, gpus: str) -> int:
        return sum(map(int, gpus))

    def price(self, gpus: str) -> float:
        return self.count(gpus)

    def slowest(self, gpus: str) -> str:
        return "1"

    def equal(self, gpus: str, batch: int) -> Step:
        known = self._times[gpus]
        local_batch, rounds = _split(batch / self.count(gpus), self.least, max(known))
        return self._step(gpus, local_batch, rounds)

    def _best(self, gpus: str, batch: int) -> Step:
        """In as many rounds, of those that local batches allow, as are fastest."""
        each, most = batch / self.count(gpus), max(self._times[gpus])
        rounds = range(max(1, math.ceil(each / most)), max(1, int(each / self.least)) + 1)
        steps = [self._step(gpus, max(self.least, round(each / n)), n) for n in rounds]
        return max(steps, key=lambda step: step.batch / step.seconds)

    def _step(self, gpus: str, local_batch: int, rounds: int) -> Step:
        known = self._times[gpus]
        sizes = sorted(known)
        step_s, sync_s = (
            float(np.interp(local_batch, sizes, [known[size][i] for size in sizes])) for i in range(2)
        )
        return Step(
            batch=local_batch * rounds * self.count(gpus),
            seconds=step_s + (rounds - 1) * (step_s - sync_s),
            how=(local_batch, rounds),
        )

    def best_set(self, trajectory: Sequence[int]) -> str:
        """Of the even sets that can run all of it, as halves of gradients need two GPUs alike on a host."""
        smallest = min(trajectory)
        sets = [gpus for gpus in self._times if gpus != "1" and self.count(gpus) * self.least <= smallest]

        def epoch_s(gpus: str) -> float:
            steps = (self.best(gpus, batch) for batch in trajectory)
            return sum(step.seconds / step.batch for step in steps)

        return min(sets, key=epoch_s)


def _split(each: float, least: int, most: int) -> tuple[int, int]:
    """The local batch and the rounds in which each GPU does its share of a batch, as few as can be."""
    rounds = max(1, math.ceil(each / most))
    return max(least, round(each / rounds)), rounds


# -- policies ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a training runs.

    Args:
        batch: "similarity" (section 6.1), "goodput" (Pollux), or "fixed".
        gpus: "forecast" or "last" (section 6.3, by that trajectory), "goodput" (Pollux-AS), or "all".
        best: configured by the solver; else `equal`.
    """

    batch: str
    gpus: str
    best: bool = False


POLICIES = {
    "JABAS": Policy(batch="similarity", gpus="forecast", best=True),
    "JABAS without forecast": Policy(batch="similarity", gpus="last", best=True),
    "JABAS on all GPUs": Policy(batch="similarity", gpus="all", best=True),
    "SimiGrad": Policy(batch="similarity", gpus="all"),
    "Pollux": Policy(batch="goodput", gpus="all"),
    "Pollux-AS": Policy(batch="goodput", gpus="goodput"),
    "smallest batch": Policy(batch="fixed", gpus="all"),
}


@dataclass(kw_only=True)
class Outcome:
    """A whole training: time, cost in seconds of the dearest GPU, GPU seconds, changes, batches by epoch."""

    seconds: float = 0.0
    cost: float = 0.0
    gpu_s: float = 0.0
    reallocations: int = 0
    reconfiguring_s: float = 0.0
    batches: list[float] = field(default_factory=list)

    @property
    def gpus(self) -> float:
        return self.gpu_s / self.seconds

    def spend(self, seconds: float, cluster: Cluster, gpus: Any) -> None:
        self.seconds += seconds
        self.cost += seconds * cluster.price(gpus)
        self.gpu_s += seconds * cluster.count(gpus)


def simulate(
    cluster: Cluster,
    course: Course,
    policy: Policy,
    bounds: tuple[int, int],
    *,
    reading: str,
    epochs: int | None = None,
    scatter: float = 0.0,
) -> Outcome:
    """Train so many epochs (None: all) by a policy.

    A change of the solver's configuration costs a step.

    Args:
        bounds: of the global batch; the smallest must do for all GPUs.
        reading: "passes" or "progress".
        scatter: standard deviation of one measured similarity around its mean.
    """
    gpus = cluster.hosts[0] if policy.gpus == "goodput" else cluster.hosts[-1]
    rule = _rule(cluster, *bounds)
    run = cluster.best if policy.best else cluster.equal
    random = np.random.default_rng(0)
    out, wish, done, since = Outcome(), float(bounds[0]), 0.0, 0
    course_of_batches: list[tuple[float, int]] = []
    cells: list[float] = []
    for epoch in range(epochs or course.epochs):
        held = gpus
        if policy.gpus in ("forecast", "last"):
            gpus = cluster.best_set(_expected(policy, rule, cells, wish))
        elif policy.batch == "goodput" and epoch:
            noise = course.noise_scale(epoch - 1, wish)
            if policy.gpus == "goodput":
                gpus = _scaled_up(cluster, course, gpus, wish, bounds[1], noise)
            wish = _goodput(cluster, course, gpus, wish, bounds[1], noise)[1]
        if epoch and gpus != held:
            out.reallocations += 1
            out.spend(REALLOCATION_S, cluster, gpus)
        step = run(gpus, rule.rounded(wish))
        while done < epoch + 1 - 1e-9:
            noise = course.noise_scale(done, step.batch)
            counts = 1.0 if reading == "passes" else course.efficiency(noise, step.batch)
            epochs_a_step = step.batch * counts / course.size
            steps = math.ceil((epoch + 1 - done) / epochs_a_step)
            if policy.batch == "similarity":
                steps = min(EVERY - since, steps)
            out.spend(steps * step.seconds, cluster, gpus)
            done, since = done + steps * epochs_a_step, since + steps
            course_of_batches.append((done, step.batch))
            if policy.batch == "similarity" and since == EVERY:
                since = 0
                value = similarity(noise, step.batch) + (random.normal(0.0, scatter) if scatter else 0.0)
                wish = rule.next(wish, value)
                before, step = step, run(gpus, rule.rounded(wish))
                if policy.best and step.how != before.how:
                    out.reconfiguring_s += step.seconds
                    out.spend(step.seconds, cluster, gpus)
        ends = [end for end, _ in course_of_batches]
        for i in range(CELLS):
            place = bisect_left(ends, epoch + (i + 0.5) / CELLS)
            cells.append(float(course_of_batches[place][1]))
        out.batches.append(sum(cells[-CELLS:]) / CELLS)
    return out


def _rule(cluster: Cluster, low: int, high: int) -> Batching:
    return Batching(
        low=low,
        high=high,
        unit=2 * cluster.least,
        metric=METRICS["similarity"],
        target=THRESHOLD,
        every=EVERY,
        rate=RATE,
    )


def _expected(policy: Policy, rule: Batching, cells: Sequence[float], wish: float) -> list[int]:
    """The batches of the next epoch."""
    if policy.gpus == "last" or not cells:
        return [rule.rounded(wish)]
    values = forecast(cells, CELLS, low=rule.low, high=rule.high, methods=CHEAP).values
    return [rule.rounded(value) for value in values]


def _goodput(
    cluster: Cluster, course: Course, gpus: Any, low: float, high: int, noise: float
) -> tuple[float, float]:
    """The most progress a second on these GPUs by any batch from `low` on, and that batch."""
    found = []
    for batch in np.geomspace(low, high, CANDIDATES):
        step = cluster.equal(gpus, round(batch))
        found.append((step.batch / step.seconds * course.efficiency(noise, step.batch), float(batch)))
    return max(found)


def _scaled_up(cluster: Cluster, course: Course, gpus: Any, low: float, high: int, noise: float) -> Any:
    """With more hosts, one after the other, as long as the goodput comes near enough to ideal scaling.

    Ideal is the goodput on one GPU, the slowest, times their number.
    """

    def share(some: Any) -> float:
        alone = _goodput(cluster, course, cluster.slowest(some), course.batches[0], high, noise)[0]
        return _goodput(cluster, course, some, low, high, noise)[0] / alone / cluster.count(some)

    place = cluster.hosts.index(gpus)
    if share(gpus) > UPPER:
        while place + 1 < len(cluster.hosts) and share(cluster.hosts[place + 1]) >= LOWER:
            place += 1
    return cluster.hosts[place]


# -- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a cluster, and the bounds of its global batch."""

    what: str
    app: str
    cluster: Callable[[], Cluster]
    bounds: tuple[int, int]


def _on_t4(what: str, app: str, bounds: tuple[int, int]) -> Scenario:
    return Scenario(what=f"{what}, 16 T4", app=app, cluster=lambda: Alike(app), bounds=bounds)


SCENARIOS = {
    "mixed_8": Scenario(
        what="ResNet-50, 4 V100 and 4 P100", app="imagenet", cluster=lambda: Mixed(1), bounds=(256, 32768)
    ),
    "mixed_16": Scenario(
        what="ResNet-50, 8 V100 and 8 P100", app="imagenet", cluster=lambda: Mixed(2), bounds=(512, 32768)
    ),
    "t4_imagenet": _on_t4("ResNet-50", "imagenet", (320, 12800)),
    "t4_cifar10": _on_t4("ResNet-18 on CIFAR-10", "cifar10", (512, 4096)),
    "t4_deepspeech2": _on_t4("DeepSpeech2", "deepspeech2", (160, 640)),
    "t4_yolov3": _on_t4("YOLOv3", "yolov3", (64, 512)),
}
"""Upper bounds are Table 4's or the largest batch measured, lower ones Table 4's or the smallest measured
local batch on each GPU, whichever is more."""

READINGS = ("passes", "progress")
OTHERS = ("SimiGrad", "Pollux", "Pollux-AS")
"""Those that the paper compares with."""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    names = ("mixed_8", "t4_cifar10") if options.quick else tuple(SCENARIOS)
    epochs = 3 if options.quick else None
    for name in names:
        scenario = SCENARIOS[name]
        cluster, course = scenario.cluster(), Course.read(scenario.app)
        _agreement(report, scenario, course)
        found = {
            (reading, policy): simulate(cluster, course, how, scenario.bounds, reading=reading, epochs=epochs)
            for reading in READINGS
            for policy, how in POLICIES.items()
        }
        for (reading, policy), out in found.items():
            key = f"{name}_{reading}_{policy.replace(' ', '_')}"
            report.results[f"{key}_s"] = [out.seconds]
            report.results[f"{key}_cost"] = [out.cost]
            report.results[f"{key}_gpus"] = [out.gpus]
        _as_the_paper(report, scenario, found)
        for policy in POLICIES:
            _policy(report, scenario, found, policy)
        if name in ("mixed_8", "t4_cifar10"):
            _scattered(report, name, cluster, course, found, epochs)
    return report


Found = dict[tuple[str, str], Outcome]
"""Outcomes by reading and policy."""


def _agreement(report: Report, scenario: Scenario, course: Course) -> None:
    """Whether the noise scales, as they are read here, make one training of all that were measured."""
    made = [each / course.epochs for each in course.progress()]
    what = f"{course.app}: progress in the epochs measured, by their noise scales, by batch"
    if all(row.what != what for row in report.rows):
        report.results[f"{course.app}_progress"] = made
        report.row(
            what,
            f"{min(made):.3f} to {max(made):.3f} of that with the smallest",
            goal="within 5 %",
            ok=max(abs(each - 1) for each in made) <= 0.05,
        )


def _as_the_paper(report: Report, scenario: Scenario, found: Found) -> None:
    """JABAS and SimiGrad train as many passes; Pollux makes the same progress."""
    ours = found["passes", "JABAS"]
    others = {name: found["passes" if name == "SimiGrad" else "progress", name] for name in OTHERS}
    fastest = min(others, key=lambda name: others[name].seconds)
    cheapest = min(others, key=lambda name: others[name].cost)
    report.row(
        f"{scenario.what}: JABAS as the paper compares (Pollux by progress, else passes)",
        f"{_less(ours.seconds, others['SimiGrad'].seconds)} time than SimiGrad, "
        f"{_less(ours.seconds, others[fastest].seconds)} than the fastest of the others ({fastest}); "
        f"{_less(ours.cost, others[cheapest].cost)} cost than the cheapest ({cheapest})",
    )


def _less(ours: float, other: float) -> str:
    change = ours / other - 1
    return f"{abs(change):.1%} {'less' if change <= 0 else 'more'}"


def _policy(report: Report, scenario: Scenario, found: Found, policy: str) -> None:
    parts = []
    for reading in READINGS:
        out, ours = found[reading, policy], found[reading, "JABAS"]
        if out is ours:
            parts.append(
                f"{reading}: {out.seconds / 3600:.3g} h, {out.gpus:.1f} GPUs, batches {out.batches[0]:.0f} to "
                f"{max(out.batches):.0f}, {out.reallocations} reallocations, "
                f"{out.reconfiguring_s / out.seconds:.1%} of the time for configurations"
            )
        else:
            parts.append(
                f"{reading}: {out.seconds / ours.seconds:.2f}x time, {out.cost / ours.cost:.2f}x cost, "
                f"{out.gpus:.1f} GPUs"
            )
    report.row(f"{scenario.what}: {policy}", "; ".join(parts))


def _scattered(
    report: Report, name: str, cluster: Cluster, course: Course, found: Found, epochs: int | None
) -> None:
    scenario = SCENARIOS[name]
    parts = []
    for policy in ("JABAS", "SimiGrad"):
        out = simulate(
            cluster,
            course,
            POLICIES[policy],
            scenario.bounds,
            reading="passes",
            epochs=epochs,
            scatter=SCATTER,
        )
        report.results[f"{name}_scattered_{policy}_s"] = [out.seconds]
        parts.append(f"{policy} {out.seconds / found['passes', policy].seconds:.3f}x its time without")
    report.row(f"{scenario.what}: similarities that scatter by {SCATTER} (assumed), passes", ", ".join(parts))


if __name__ == "__main__":
    main("whole trainings on a cluster, JABAS against others", measure)
