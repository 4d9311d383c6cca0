"""Trainings on CPU cores by the search, by Optimus and by the best fixed nodes, simulated as in NEARCHUS.

    python benchmarks/ps_simulated.py [--json] [--quick]

The five CNNs of the paper's section V, as `planning.ps.calibrated` models them, on clusters A (100 cores) and
B (300). Alone (its Figures 7, 9, 12): the whole cluster is the budget, and there are as many steps as FA-BF
makes in HOURS. The trace (Figure 11): JOBS jobs, one an hour by a Poisson process, each drawn from a pool of
30, which are the POOL's budgets and lengths with each model; the same jobs on both clusters.

All of it twice: a decision every 390 s and 30 s for a restart, which are about what the paper has (it says 5 to
8 minutes; of a restart it does not say how long it takes), and with what hpcsched takes by default.

What Optimus comes to depends on the 20 configurations that it has measured first. So it is there with those of
`planning.ps.optimus.sampled`, by which the models were calibrated, and with some drawn at random.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from common import Report, main

from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, Kind
from hpcsched.planning.ps.calibrated import CLUSTERS, WORKLOADS, Cluster, workload
from hpcsched.planning.ps.model import usage
from hpcsched.planning.ps.optimus import SAMPLES
from hpcsched.planning.ps.search import NODE_CPUS, best, best_fixed
from hpcsched.planning.ps.training import Training
from hpcsched.sim.engine import Simulation
from hpcsched.sim.fixed_nodes import Rule

TIMES = {
    "paper": {"start_s": 30.0, "stable_s": 390.0, "build_s": 0.0, "change_s": 30.0},
    "hpcsched": {},
}
"""Of a training: what differs from the default. A restart in the paper's way stops all at once."""

HOURS = 4.0
"""Of a training alone, by FA-BF."""

POOL = ((20, 1.5), (30, 2.5), (40, 2.0), (50, 1.0), (60, 1.5), (80, 1.0))
"""Budgets in cores, and hours that FA-BF takes with them on cluster A."""

JOBS = 40
EVERY_S = 3600.0
DRAWS = 5

GOAL_JCT = 0.64
"""Of Optimus's mean job completion time (the paper: 35.6 % less)."""
GOAL_QUEUEING = 0.33
"""Of FA-BF's mean time in the queue (the paper: 67.8 % less)."""


@dataclass(frozen=True)
class Case:
    """A cluster with the models on it, and what is compared there, by name."""

    cluster: Cluster
    trainings: dict[str, Training]
    rules: dict[str, Rule]

    @classmethod
    def of(cls, name: str, times: str, draws: int) -> Case:
        cluster = CLUSTERS[name]
        trainings = {
            model: Training(model=workload(model, cluster), link=cluster.link, **TIMES[times])
            for model in WORKLOADS
        }
        cores = cluster.budget
        rules = {rule: Rule.of(rule, trainings, cores) for rule in ("dtconfig", "optimus", "fixed")}
        for seed in range(draws):
            rules[f"optimus {seed}"] = Rule.of("optimus", trainings, cores, _drawn(int(cores / NODE_CPUS), seed))
        return cls(cluster, trainings, rules)

    def run(self, jobs: Sequence[JobSpec], rule: str) -> Machine:
        """The jobs on the whole cluster by a rule."""
        made = self.rules[rule]
        cores = int(self.cluster.budget)
        return Simulation(jobs, (), cpus=cores, trainings=made.trainings, make=made.make).run()

    def rate(self, model: str, seats: Sequence[object]) -> float:
        return usage(self.trainings[model].model, seats, self.cluster.link).rate


def _drawn(nodes: int, seed: int) -> list[tuple[int, int]]:
    every = [(servers, size - servers) for size in range(2, nodes + 1) for servers in range(1, size)]
    return random.Random(seed).sample(every, SAMPLES)


def _job(name: str, model: str, cpus: int, steps: int, submit_at: float = 0.0) -> JobSpec:
    return JobSpec(
        name=name,
        kind=Kind.TRAINER,
        model=model,
        trainer="job:Job",
        steps=steps,
        gpus_min=0,
        gpus_max=0,
        strategy={"kind": "ps", "cpus": cpus},
        submit_at=submit_at,
    )
