"""Trainings on CPU cores by the search, by Optimus and by the best fixed nodes, simulated as in NEARCHUS.

    python benchmarks/ps_simulated.py [--json] [--quick]

The five CNNs of the paper's section V, as `profiles.ps.nearchus` models them, on clusters A (100 cores) and
B (300). Alone (its Figures 7, 9, 12): the whole cluster is the budget, and there are as many steps as FA-BF
makes in HOURS. The trace (Figure 11): JOBS jobs, one an hour by a Poisson process, each drawn from a pool of
30, which are the POOL's budgets and lengths with each model; the same jobs on both clusters. Lengths are such
that at most 6 jobs wait on A under FA-BF, as in the paper.

All of it twice: with the paper's times, steady after 390 s (it says 5 to 8 minutes) and 30 s for a restart
(chosen: it does not say), and with what hpcsched takes by default.

What Optimus comes to depends on the 20 configurations that it has measured first. So it is there with those
of `planning.ps.whatif.optimus.sampled`, by which the models were calibrated, and with some drawn at random.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import fmean

from common import Report, main

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobSpec, JobState, Kind
from hpcsched.planning.ps.model import usage
from hpcsched.planning.ps.training import PsTraining
from hpcsched.planning.ps.whatif.best import NODE_CORES, best, best_fixed
from hpcsched.planning.ps.whatif.optimus import MAX_FIRST_SAMPLES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.fixed_nodes import Rule
from profiles.ps.nearchus import CLUSTERS, WORKLOADS, Cluster, workload

TIMES: dict[str, dict[str, float]] = {
    "paper's times": {"start_s": 30.0, "stable_s": 390.0, "build_s": 0.0, "change_s": 30.0},
    "hpcsched's times": {},
}
"""Of a training: what differs from the default. A restart in the paper's way stops all at once."""

HOURS = 4.0
"""Of a training alone, by FA-BF."""

POOL = ((20, 1.6), (40, 1.6), (60, 0.8), (60, 1.6), (80, 0.8), (100, 0.8))
"""Budgets in cores, and hours that FA-BF takes with them on cluster A."""

JOBS = 40
EVERY_S = 3600.0
"""From one job to the next, in the mean."""
SEEDS = 5
DRAWS = 5
"""How often Optimus's first configurations are drawn."""

GOAL_JCT = 0.64
"""Of Optimus's mean job completion time on cluster A (the paper: 35.6 % less)."""
GOAL_QUEUEING = 0.33
"""Of FA-BF's mean time in the queue there (the paper: 67.8 % less); on B hardly a job waits."""


@dataclass(frozen=True)
class Case:
    """A cluster with the models on it, and what is compared there, by name."""

    cluster: Cluster
    trainings: dict[str, PsTraining]
    rules: dict[str, Rule]

    @classmethod
    def of(cls, name: str, times: str, draws: int) -> Case:
        cluster = CLUSTERS[name]
        trainings = {
            model: PsTraining(model=workload(model, cluster), link=cluster.link, **TIMES[times])
            for model in WORKLOADS
        }
        cores = cluster.budget
        rules = {rule: Rule.of(rule, trainings, cores) for rule in ("dtconfig", "optimus", "fixed")}
        for seed in range(draws):
            drawn = _drawn(int(cores / NODE_CORES), seed)
            rules[f"optimus, drawn {seed}"] = Rule.of("optimus", trainings, cores, drawn)
        return cls(cluster, trainings, rules)

    def run(self, jobs: Sequence[JobSpec], rule: str) -> list[Job]:
        """The jobs on the whole cluster by a rule, all of them completed."""
        made, cores = self.rules[rule], int(self.cluster.budget)
        machine = Simulation(jobs, (), cpus=cores, trainings=made.trainings, make=made.make).run()
        done = list(machine.run.jobs.values())
        if any(job.state is not JobState.COMPLETED for job in done):
            raise RuntimeError(f"{rule}: a job did not complete")
        return done

    def rates(self, job: Job) -> list[float]:
        """Steps a second with one configuration after the other."""
        model = self.trainings[job.spec.model].model
        return [usage(model, attempt.seats, self.cluster.link).rate for attempt in job.attempts]


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    draws = 1 if options.quick else DRAWS
    for times in TIMES:
        for name in CLUSTERS:
            case = Case.of(name, times, draws)
            _alone(report, case, f"{name}, {times}", ["ResNet-50"] if options.quick else list(WORKLOADS))
    for times in TIMES:
        for name in CLUSTERS:
            case = Case.of(name, times, draws)
            _trace(
                report, case, f"{name}, {times}", 1 if options.quick else SEEDS, 8 if options.quick else JOBS
            )
    return report


# -- a training alone ----------------------------------------------------------------------------------


def _alone(report: Report, case: Case, where: str, models: Sequence[str]) -> None:
    key = _key(where)
    cluster, shorter = case.cluster, []
    for model in models:
        own, cores = case.trainings[model].model, int(cluster.budget)
        steps = int(best_fixed(own, cores, cluster.link).usage.rate * HOURS * 3600)
        most = best(own, cores, cluster.link, most_workers=max(36, cores // 4)).usage.rate
        hours, rates, changes, ends = {}, {}, {}, {}
        for rule in case.rules:
            (job,) = case.run([_job("alone", model, cores, steps)], rule)
            hours[rule] = (job.ended_s or 0.0) / 3600
            rates[rule], ends[rule] = max(case.rates(job)), case.rates(job)[-1] / most
            changes[rule] = len(job.attempts) - 1
        for rule in ("dtconfig", "optimus", "fixed"):
            report.results.setdefault(f"{key}_alone_{rule}_jct_h", []).append(hours[rule])
            report.results.setdefault(f"{key}_alone_{rule}_best_steps_per_s", []).append(rates[rule])
            report.results.setdefault(f"{key}_alone_{rule}_changes", []).append(changes[rule])
        drawn = [rule for rule in case.rules if "drawn" in rule]
        report.results.setdefault(f"{key}_alone_drawn_jct_h", []).extend(hours[rule] for rule in drawn)
        report.results.setdefault(f"{key}_alone_end_over_best", []).append(ends["dtconfig"])
        shorter.append(1 - hours["dtconfig"] / hours["optimus"])
        three = ("dtconfig", "optimus", "fixed")
        speeds = " / ".join(f"{rates[rule]:.3g}" for rule in three)
        faster = ", ".join(f"{rates['dtconfig'] / rates[rule] - 1:+.1%}" for rule in three[1:])
        report.row(
            f"{where}: {model} alone, best speed: search / Optimus / FA-BF",
            f"{speeds} steps/s ({faster}); it ends with {ends['dtconfig']:.2f} of the best there is",
        )
        report.row(
            "... JCT; changes",
            f"{' / '.join(f'{hours[rule]:.2f}' for rule in three)} h ({-shorter[-1]:+.1%} of Optimus's, when "
            f"drawn {_range(hours[rule] for rule in drawn)} h); "
            f"{' / '.join(str(changes[rule]) for rule in three)}",
        )
    report.row(f"{where}: alone, less JCT than Optimus, all models", f"{_range(shorter, '.1%')}")


# -- the trace -----------------------------------------------------------------------------------------


def _trace(report: Report, case: Case, where: str, seeds: int, count: int) -> None:
    key = _key(where)
    found: dict[str, dict[str, list[float]]] = {}
    waiting = []
    for seed in range(seeds):
        jobs = _arrivals(seed, count)
        for rule in case.rules:
            done = case.run(jobs, rule)
            means = {
                "jct": fmean((job.ended_s or 0.0) - job.submit_s for job in done) / 3600,
                "queueing": fmean((job.started_s or 0.0) - job.submit_s for job in done) / 3600,
            }
            means["run"] = means["jct"] - means["queueing"]
            for what, hours in means.items():
                found.setdefault(rule, {}).setdefault(what, []).append(hours)
            if rule == "fixed":
                waiting.append(_most_waiting(done))
    for rule, means in found.items():
        for what, hours in means.items():
            name = "drawn" if "drawn" in rule else rule
            report.results.setdefault(f"{key}_trace_{name}_{what}_h", []).extend(hours)
    report.results[f"{key}_trace_most_waiting"] = waiting
    drawn = [rule for rule in found if "drawn" in rule]
    constrained = case.cluster == CLUSTERS["A"]
    for what, words in (
        ("jct", "mean JCT"),
        ("queueing", "mean time in the queue"),
        ("run", "mean run time"),
    ):
        hours = {rule: fmean(means[what]) for rule, means in found.items()}
        mine = hours["dtconfig"]
        report.row(
            f"{where}: trace, {words}: search / Optimus / FA-BF",
            f"{mine:.2f} / {hours['optimus']:.2f} / {hours['fixed']:.2f} h; Optimus drawn: "
            f"{_range(hours[rule] for rule in drawn)} h",
        )
        if what == "jct":
            of = [mine / hours[rule] for rule in ("optimus", *drawn)]
            report.row(
                "... of Optimus's",
                f"{of[0]:.2f} (drawn: {_range(of[1:])}); of FA-BF's {mine / hours['fixed']:.2f}",
                goal=f"at most {GOAL_JCT}" if constrained else "",
                ok=of[0] <= GOAL_JCT if constrained else None,
            )
        if what == "queueing" and constrained:
            of_fixed = mine / hours["fixed"] if hours["fixed"] else 0.0
            report.row(
                f"... of FA-BF's, where at most {_range(waiting, 'd')} waited",
                f"{of_fixed:.2f}",
                goal=f"at most {GOAL_QUEUEING}",
                ok=of_fixed <= GOAL_QUEUEING,
            )


def _arrivals(seed: int, count: int) -> list[JobSpec]:
    """The jobs of a trace; their lengths are those of cluster A."""
    rng, at, jobs = random.Random(seed), 0.0, []
    pool = [(model, cpus, hours) for model in WORKLOADS for cpus, hours in POOL]
    for i in range(count):
        at += rng.expovariate(1 / EVERY_S)
        model, cpus, hours = rng.choice(pool)
        jobs.append(_job(f"j{i}", model, cpus, int(_fixed_rate(model, cpus) * hours * 3600), at))
    return jobs


@cache
def _fixed_rate(model: str, cpus: int) -> float:
    return best_fixed(workload(model, CLUSTERS["A"]), cpus, CLUSTERS["A"].link).usage.rate


def _most_waiting(jobs: Sequence[Job]) -> int:
    """The most of them that were in the queue at a time."""
    moves = [(job.submit_s, 1) for job in jobs] + [(job.started_s or 0.0, -1) for job in jobs]
    return max(accumulate(move for _, move in sorted(moves)))


def _drawn(nodes: int, seed: int) -> list[tuple[int, int]]:
    """Configurations of so many nodes at most, as many as `sampled` has."""
    every = [(servers, size - servers) for size in range(2, nodes + 1) for servers in range(1, size)]
    return random.Random(seed).sample(every, MAX_FIRST_SAMPLES)


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


def _key(where: str) -> str:
    return where.removesuffix("'s times").replace(", ", "_")


def _range(values: Iterable[float], form: str = ".2f") -> str:
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main("trainings on CPU cores, simulated", measure)
