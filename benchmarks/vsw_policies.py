"""Policies by which one training uses a cluster, and the simulation of it: what `vsw_cluster.py` compares."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpcsched.planning.vsw.batching import METRICS, BatchRule
from hpcsched.planning.vsw.forecast import forecast, with_fluctuations

EVERY, RATE, THRESHOLD = 100, 0.1, 0.1
"""The rule of section 6.1 with the paper's settings (Table 4: for its convolutional networks)."""

UPPER, LOWER = 2 / 3, 1 / 2
"""Pollux-AS adds hosts above and down to these shares of an ideal speed-up (section 7.1)."""

RESTART_S = 30.0
"""Seconds without training when the GPUs change by a restart: what Pollux' own simulator takes."""

IN_PLACE_S = 0.06
"""Seconds beside one step when they change in place: the goal of `resize.py`, which CPU slots reach."""

CELLS = 20
"""Parts of an epoch of which batches are forecast."""

CHEAP = ("last", "damped")
"""Methods of the forecast: those that need numpy only, so that all machines say the same."""

CANDIDATES = 50
"""Global batches that Pollux compares, in geometric steps."""


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
            counted = [self.efficiency(each, batch) for each in noise.tolist()]
            made.append(float(np.dot(taken, counted)) * batch / self.size)
        return made


def similarity(noise: float, batch: float) -> float:
    """The mean cosine of the gradients of two halves of a batch."""
    return batch / (batch + 2 * noise)


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

    def count(self, gpus: Any) -> int:
        """How many they are."""

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


# -- policies ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a training runs.

    Args:
        batch: "similarity" (section 6.1), "goodput" (Pollux), or "fixed".
        gpus: "forecast" or "last" (section 6.3, by that trajectory), "goodput" (Pollux-AS), or "all".
        best: configured by the solver; else `equal`.
        in_place: its GPUs change without a restart.
    """

    batch: str
    gpus: str
    best: bool = False
    in_place: bool = False


POLICIES = {
    "JABAS": Policy(batch="similarity", gpus="forecast", best=True),
    "JABAS, GPUs changed in place": Policy(batch="similarity", gpus="forecast", best=True, in_place=True),
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
    ends: list[float] = []
    batches: list[int] = []
    cells: list[float] = []
    for epoch in range(epochs or course.epochs):
        before = gpus
        if policy.gpus in ("forecast", "last"):
            gpus = cluster.best_set(_expected(policy, rule, cells, wish))
        elif policy.batch == "goodput" and epoch:
            noise = course.noise_scale(epoch - 1, wish)
            if policy.gpus == "goodput":
                gpus = _scaled_up(cluster, course, gpus, wish, bounds[1], noise)
            wish = _goodput(cluster, course, gpus, wish, bounds[1], noise)[1]
        step = run(gpus, rule.rounded(wish))
        if epoch and gpus != before:
            out.reallocations += 1
            out.spend(IN_PLACE_S + step.seconds if policy.in_place else RESTART_S, cluster, gpus)
        while done < epoch + 1 - 1e-9:
            noise = course.noise_scale(done, step.batch)
            counts = 1.0 if reading == "passes" else course.efficiency(noise, step.batch)
            epochs_a_step = step.batch * counts / course.size
            steps = math.ceil((epoch + 1 - done) / epochs_a_step)
            if policy.batch == "similarity":
                steps = min(EVERY - since, steps)
            out.spend(steps * step.seconds, cluster, gpus)
            done, since = done + steps * epochs_a_step, since + steps
            ends.append(done)
            batches.append(step.batch)
            if policy.batch == "similarity" and since == EVERY:
                since = 0
                value = similarity(noise, step.batch) + (random.normal(0.0, scatter) if scatter else 0.0)
                wish = rule.next(wish, value)
                last, step = step, run(gpus, rule.rounded(wish))
                if policy.best and step.how != last.how:
                    out.reconfiguring_s += step.seconds
                    out.spend(step.seconds, cluster, gpus)
        middles = (epoch + (i + 0.5) / CELLS for i in range(CELLS))
        cells += [float(batches[bisect_left(ends, middle)]) for middle in middles]
        out.batches.append(sum(cells[-CELLS:]) / CELLS)
    return out


def _rule(cluster: Cluster, low: int, high: int) -> BatchRule:
    """The rule of section 6.1, for JABAS and SimiGrad alike."""
    return BatchRule(
        low=low,
        high=high,
        unit=2 * cluster.least,
        metric=METRICS["similarity"],
        target=THRESHOLD,
        every=EVERY,
        rate=RATE,
    )


def _expected(policy: Policy, rule: BatchRule, cells: Sequence[float], wish: float) -> list[int]:
    """The batches of the next epoch."""
    if policy.gpus == "last" or not cells:
        return [rule.rounded(wish)]
    course = forecast(cells, CELLS, low=rule.low, high=rule.high, methods=CHEAP).values
    values = with_fluctuations(course, cells)
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
