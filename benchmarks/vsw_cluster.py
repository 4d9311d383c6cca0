"""A whole training on a cluster, simulated from published measurements: JABAS against others (its Figure 10).

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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from common import ROOT, Report, main
from vsw_policies import POLICIES, Cluster, Course, Outcome, Step, simulate

from hpcsched.planning.vsw.configure import ClusterGpu, configure, scale
from hpcsched.planning.vsw.costs import iteration_s, sync_method
from hpcsched.planning.vsw.profile import VswProfile

DATA = Path(__file__).parent / "data"
PROFILE = ROOT / "profiles" / "vsw" / "resnet50-v100-p100.json"

TFLOPS = {"Tesla V100-PCIE-16GB": 14.13, "Tesla P100-PCIE-16GB": 9.52}
"""By which GPUs are paid (Eq. 8), relative to the V100."""

SCATTER = 0.03
"""For a row on how much it matters: what a single similarity scatters in such trainings is not published."""


# -- what was measured ---------------------------------------------------------------------------------


def read_course(app: str) -> Course:
    """What was measured. Where no gradient was left of the noise, S is taken from the epochs around."""
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
    return Course(
        app=app,
        size=float(batches[0] * table[0, -1, 0] / len(at)),
        epochs=len(at),
        batches=batches,
        steps=table[:, :, 0],
        noise=np.exp(noise),
    )


class Mixed:
    """The measured hosts of a profile, each so many times."""

    def __init__(self, copies: int) -> None:
        profile = VswProfile.parse(json.loads(PROFILE.read_text()), where=PROFILE.name)
        self._costs = profile.costs
        kinds = sorted({gpu.kind for gpu in profile.cluster}, key=TFLOPS.__getitem__)
        hosts = [
            tuple(
                ClusterGpu(kind=gpu.kind, host=f"{gpu.host}-{i}")
                for gpu in profile.cluster
                if gpu.kind == kind
            )
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

    def count(self, gpus: tuple[ClusterGpu, ...]) -> int:
        return len(gpus)

    def price(self, gpus: tuple[ClusterGpu, ...]) -> float:
        return sum(TFLOPS[gpu.kind] for gpu in gpus) / max(TFLOPS.values())

    def slowest(self, gpus: tuple[ClusterGpu, ...]) -> tuple[ClusterGpu, ...]:
        return (min(gpus, key=lambda gpu: TFLOPS[gpu.kind]),)

    def _equal(self, gpus: tuple[ClusterGpu, ...], batch: int) -> Step:
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

    def _best(self, gpus: tuple[ClusterGpu, ...], batch: int) -> Step:
        found = configure(self._costs, gpus, batch, local_batches=self._local_batches)
        return Step(batch=found.global_batch, seconds=found.iter_s, how=(found.local_batch, found.shares))

    def best_set(self, trajectory: Sequence[int]) -> tuple[ClusterGpu, ...]:
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


# -- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a cluster, the bounds of its global batch, and what the paper says of such clusters."""

    what: str
    app: str
    cluster: Callable[[], Cluster]
    bounds: tuple[int, int]
    paper: str


UNLIKE = (
    "paper, means of 3 clusters: 24.7, 31.3, 43.8% less time than SimiGrad; 31.4, 90, 41.1% cheaper than the "
    "cheapest other"
)
ALIKE = "paper, GNMT on 16 equal GPUs: 19% cheaper than Pollux-AS, the cheapest other, which is faster"


def _on_t4(what: str, app: str, bounds: tuple[int, int]) -> Scenario:
    return Scenario(what=f"{what}, 16 T4", app=app, cluster=lambda: Alike(app), bounds=bounds, paper=ALIKE)


SCENARIOS = {
    "mixed_8": Scenario(
        what="ResNet-50, 4 V100 and 4 P100",
        app="imagenet",
        cluster=lambda: Mixed(1),
        bounds=(256, 32768),
        paper=UNLIKE,
    ),
    "mixed_16": Scenario(
        what="ResNet-50, 8 V100 and 8 P100",
        app="imagenet",
        cluster=lambda: Mixed(2),
        bounds=(512, 32768),
        paper=UNLIKE,
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
        cluster, course = scenario.cluster(), read_course(scenario.app)
        _agreement(report, scenario, course)
        found = {
            (reading, policy): simulate(cluster, course, how, scenario.bounds, reading=reading, epochs=epochs)
            for reading in READINGS
            for policy, how in POLICIES.items()
        }
        for (reading, policy), out in found.items():
            key = f"{name}_{reading}_{policy.replace(',', '').replace(' ', '_')}"
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
        goal=scenario.paper,
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
                f"{reading}: {out.seconds / 3600:.3g} h, {out.gpus:.1f} GPUs, "
                f"batches up to {max(out.batches):.0f}, {out.reallocations} reallocations, "
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
