"""How large a simulation may be: seconds, events per second and peak memory, by the number of jobs.

    python benchmarks/simulator_scale.py [TRACE.csv] [--json] [--quick]

Simulated are 64 hosts of 8 GPUs under marble, without stories: the jobs of a CSV trace, where one is given,
and 10,000, 100,000 and 1,000,000 jobs made up like those of Microsoft's Philly cluster (Jeon et al., ATC
2019): nearly all on one GPU, durations over four orders of magnitude, about 90 % of the GPUs asked for. Each
simulation has a process of its own; the peak is that of its resident memory, and includes making or reading
the jobs. Takes about three minutes and 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import Report, main

from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile
from hpcsched.sim.engine import Simulation
from hpcsched.sim.workloads import read_trace

HOSTS, GPUS = 64, 8
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (1_000, 2_000)
SEED = 20171009
LOAD = 0.9
MEDIAN_S, SIGMA, LONGEST_S = 1556.0, 1.9, 60 * 86400.0
COUNTS = {1: 0.948, 2: 0.016, 4: 0.023, 8: 0.011, 16: 0.002}
"""GPUs asked for, and by which share of the jobs."""

TRACE_GOAL_S = 20.0
MEMORY_GOAL_MIB = 1024
GROWTH_GOAL = 2.0
"""Seconds per job at the largest size, over those at the smallest."""


def philly_like(count: int, seed: int) -> tuple[list[JobSpec], Profile]:
    """So many jobs of fixed size; one step takes a second."""
    rng = random.Random(seed)
    counts, shares = list(COUNTS), list(COUNTS.values())
    mean_s = MEDIAN_S * math.exp(SIGMA**2 / 2)
    between_s = mean_s * sum(n * share for n, share in COUNTS.items()) / (HOSTS * GPUS * LOAD)
    at, jobs = 0.0, []
    for i in range(count):
        at += rng.expovariate(1 / between_s)
        gpus = rng.choices(counts, shares)[0]
        nodes = math.ceil(gpus / GPUS)
        job = JobSpec(
            name=f"job-{i}",
            kind=Kind.REPLAY,
            model="philly-like",
            steps=max(1, round(min(LONGEST_S, rng.lognormvariate(math.log(MEDIAN_S), SIGMA)))),
            gpus_min=gpus // nodes,
            gpus_max=gpus // nodes,
            nodes=nodes,
            submit_at=at,
        )
        jobs.append(job)
    return jobs, Profile(model="philly-like", device="", throughput={1: 1.0}, start_s=0.0)


def simulate(jobs: Sequence[JobSpec], profiles: Sequence[Profile]) -> dict[str, float]:
    """What simulating these jobs takes, and what this process has taken at most."""
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    simulation = Simulation(jobs, profiles, gpus=GPUS, nodes=HOSTS, stories=False, watch=count)
    start = time.perf_counter()
    machine = simulation.run()
    taken_s = time.perf_counter() - start
    if not machine.run.finished:
        raise RuntimeError(f"{machine.run.unfinished} jobs did not end")
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return {
        "jobs": len(machine.run.jobs),
        "events": events,
        "taken_s": taken_s,
        "peak_mib": int(peak[1]) / 1024 if peak else math.nan,
    }


def one(what: str) -> dict[str, float]:
    """A simulation of a trace, or of so many made up jobs, in this process."""
    if what.isdecimal():
        jobs, profile = philly_like(int(what), SEED)
        return simulate(jobs, [profile])
    workload = read_trace(Path(what), gpus=GPUS, hosts=HOSTS)
    return {**simulate(workload.jobs, workload.profiles), "left_out": workload.left_out}


def apart(what: str) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", what]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def measure(options: argparse.Namespace, trace: str | None) -> Report:
    report = Report()
    if trace:
        found = apart(trace)
        _keep(report, "trace", found)
        label = f"{Path(trace).name}: {found['jobs']:,.0f} jobs, {found['left_out']:.0f} left out"
        report.row(
            label, _words(found), goal=f"at most {TRACE_GOAL_S:.0f} s", ok=found["taken_s"] <= TRACE_GOAL_S
        )
    sizes = QUICK_SIZES if options.quick else SIZES
    per_job: list[float] = []
    for size in sizes:
        found = apart(str(size))
        _keep(report, f"jobs_{size}", found)
        per_job.append(found["taken_s"] / size)
        fits = found["peak_mib"] <= MEMORY_GOAL_MIB
        label = f"{size:,} jobs made up from seed {SEED}"
        report.row(label, _words(found), goal=f"at most {MEMORY_GOAL_MIB} MiB", ok=fits)
    growth = per_job[-1] / per_job[0]
    report.results["growth"] = [growth]
    report.row(
        f"time per job with {sizes[-1]:,} jobs, over that with {sizes[0]:,}",
        f"{growth:.2f}",
        goal=f"linear: at most {GROWTH_GOAL:g}",
        ok=growth <= GROWTH_GOAL,
    )
    return report


def _keep(report: Report, name: str, found: dict[str, float]) -> None:
    report.results |= {f"{name}_{key}": [value] for key, value in found.items()}


def _words(found: dict[str, float]) -> str:
    taken_s, jobs = found["taken_s"], found["jobs"]
    return (
        f"{taken_s:.1f} s, {taken_s / jobs * 1e6:.0f} µs a job, {found['events'] / taken_s:,.0f} events/s, "
        f"peak {found['peak_mib']:,.0f} MiB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])))
    else:
        # The first argument that is no switch; `main` knows the others.
        given = [i for i, text in enumerate(sys.argv) if i and not text.startswith("-")][:1]
        file = sys.argv.pop(given[0]) if given else None
        main(
            "Size of simulations; an argument TRACE.csv has that trace simulated too.",
            lambda options: measure(options, file),
        )
