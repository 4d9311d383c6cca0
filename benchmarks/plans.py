"""How long the planner takes for a plan, by the number of jobs: CPU seconds of the first plan of a job set.

    python benchmarks/plans.py [--json] [--quick]

The sets are those of `hpcsched.testing.families`, cut to 10, 30, 100 and 1,100 jobs that all wait; of 1,100 a
plan covers 1,000. Under goal=makespan the stages of the configuration LP are in it, for up to 40 jobs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Report, main, median, ms

from hpcsched.sim.engine import Simulation
from hpcsched.testing.families import random_set

SIZES = {10: (20, 0.010), 30: (12, None), 100: (12, 0.100), 1100: (5, 0.200)}
"""Jobs: how many sets, and the most seconds that the median plan should take."""

REPEATS = 3
"""Plans of each set, of which the median counts."""

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "goal=makespan": {"goal": "makespan"}}


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    for size, (sets, goal_s) in list(SIZES.items())[: 1 if options.quick else None]:
        for label, policy in OPTIONS.items():
            samples = [_plan_s(seed, size, policy) for seed in range(2 if options.quick else sets)]
            report.results[f"plan_of_{size}_{label}_s"] = samples
            goal = f"at most {ms(goal_s)}" if goal_s and not policy else ""
            report.row(
                f"a plan for {size:,} jobs, {label} ({len(samples)} sets)",
                f"median {ms(median(samples))}, max {ms(max(samples))}",
                goal=goal,
                ok=median(samples) <= goal_s if goal_s and not policy else None,
            )
    return report


def _plan_s(seed: int, size: int, policy: dict[str, Any]) -> float:
    """CPU seconds of the plan that is made when all jobs of a set have been submitted."""
    jobs = _jobs(seed, size)
    simulation = Simulation(
        jobs.jobs[:size], jobs.profiles, gpus=jobs.gpus, policy="planner", options=policy, stories=False
    )
    make_plan, taken = simulation.machine.make_plan, []

    def timed() -> Any:
        for _ in range(REPEATS):
            begun = time.process_time()
            plan = make_plan()
            taken.append(time.process_time() - begun)
        return plan

    simulation.machine.make_plan = timed  # type: ignore[method-assign]
    simulation.run(until=0.0)
    return median(taken[:REPEATS])


def _jobs(seed: int, size: int) -> Any:
    """A set of at least so many jobs."""
    draw = seed
    while len(jobs := random_set(draw, most_jobs=2 * size, sizes="uniform").jobs) < size:
        draw += 1000
    assert len(jobs) >= size
    return random_set(draw, most_jobs=2 * size, sizes="uniform")


if __name__ == "__main__":
    main("time of a plan", measure)
