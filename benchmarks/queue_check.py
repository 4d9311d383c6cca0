"""The simulated queue against a real Slurm that `tests/slurm/up` starts: who starts when.

    python benchmarks/queue_check.py [--json] [--quick] [--only NAME]

Each case is a handful of jobs that sleep, submitted one after the other to two nodes of six pretended GPUs;
one second of the model is one second there. The simulator is then given the same jobs at the same seconds.
About fifteen minutes; --quick: two cases of half a minute. `gains.py` rests on this simulator.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random

from allocations import Cluster as RealSlurm
from allocations import slurm
from common import Report, Scratch, main, median, percentile

from hpcsched.allocations.backfill import Queue, Settings
from hpcsched.allocations.cluster import BatchJob, Cluster

THERE = Cluster(nodes=2, gpus=6, shards=2)
AS_THERE = Settings(interval_s=1.0)
"""What `tests/slurm/up` writes into SchedulerParameters, and Slurm's defaults."""
NEAR_S, NEAR = 3.0, 0.05
"""A start is as simulated if it is within 3 s, or 5 % of the time since the first job came: Slurm tells times
in whole seconds, and from a job's end to the next one's start most of a second passes."""
PATIENCE_S = 420.0
M = 60.0


@dataclass(frozen=True)
class Case:
    """Some jobs, and what they show."""

    name: str
    shows: str
    jobs: tuple[BatchJob, ...]


def job(
    name: str, runs_s: float, limit_min: int, gpus: int = 1, nodes: int = 1, at: float = 0.0, **more: object
) -> BatchJob:
    return BatchJob(
        name=name, submit_s=at, runs_s=runs_s, limit_s=limit_min * M, gpus=gpus, nodes=nodes, **more
    )  # type: ignore[arg-type]


def array(
    name: str, tasks: int, runs_s: float, limit_min: int, gpus: int, at_once: int = 0
) -> list[BatchJob]:
    return [job(f"{name}{n}", runs_s, limit_min, gpus, array=name, at_once=at_once) for n in range(tasks)]


def cases() -> list[Case]:
    full = [job("a", 30, 2, 5), job("b", 30, 3, 6)]
    found = [
        Case("hole", "a hole is filled by a short job, not by a long one; an early end lets the next start",
             (*full, job("big", 10, 1, 6), job("long", 10, 4), job("short", 10, 1))),
        Case("exact", "a job whose limit is as long as the hole does not go in; one of a minute less does",
             (job("a", 45, 2, 5), job("b", 45, 9, 6), job("big", 5, 1, 6), job("equal", 5, 2),
              job("less", 5, 1))),
        Case("whole node", "a job that waits for two GPUs reserves its whole node",
             (job("a", 40, 2, 5), job("b", 60, 5, 6), job("waits", 20, 3, 2), job("small", 10, 3))),
        Case("two nodes", "both nodes are reserved for a job that needs both",
             (job("a", 25, 1, 6), job("b", 45, 3, 1), job("both", 10, 1, 6, 2), job("fits", 20, 2, 5),
              job("late", 10, 4, 2))),
        Case("array", "tasks of an array go in order, and those after it wait for them",
             (*array("t", 6, 15, 1, 4), job("after", 10, 1, 4), job("gap", 10, 1, 2))),
        Case("array %", "with %2 two tasks run, and others pass",
             (*array("t", 6, 12, 1, 1, at_once=2), job("other", 20, 2, 6), job("another", 10, 1, 4))),
        Case("limit", "a job is ended at its limit",
             (job("endless", 200, 1, 6, 2), job("next", 5, 1))),
        Case("shards", "two jobs on a GPU; a GPU that is shared is given to nobody whole",
             (*[job(f"s{n}", 25, 2, shards=1) for n in range(3)], job("b", 25, 2, 5), job("c", 25, 2, 6),
              job("d", 10, 1, 1), job("s3", 10, 1, shards=1))),
        Case("follow", "a job that is submitted when another ends waits behind all that came before",
             (job("first", 10, 1, 6, 2, follow=job("second", 10, 1, 6, 2)), job("other", 10, 2, 6),
              job("third", 10, 1, 6))),
    ]  # fmt: skip
    return [
        *found,
        *mine(),
        *(Case(f"mixed {seed}", "jobs drawn by a seed", mixed(seed)) for seed in (1, 2, 3)),
    ]


def mine() -> list[Case]:
    """Twelve trainings of 20 s that come into the same queue in three ways."""
    others = list(mixed(4))
    at, trainings = 20.0, [job(f"t{n}", 20, 1, at=20.0) for n in range(12)]
    block = job("block", 62, 2, 4, at=at)
    two = [job(f"block{n}", 62, 2, 2, at=at) for n in range(2)]
    return [
        Case(f"mine, {how}", "twelve trainings of 20 s in a queue of others", in_time([*others, *own]))
        for how, own in (
            ("an `sbatch` each", trainings),
            ("a block of 4 GPUs", [block]),
            ("two of 2 GPUs", two),
        )
    ]


def in_time(jobs: Sequence[BatchJob]) -> tuple[BatchJob, ...]:
    return tuple(sorted(jobs, key=lambda one: one.submit_s))


def mixed(seed: int, count: int = 30) -> tuple[BatchJob, ...]:
    """Jobs of all sizes that come over a minute and end long before their limits, as people's do."""
    draw = Random(seed)
    jobs = []
    for n in range(count):
        runs_s = draw.uniform(4, 40)
        limit_min = max(1, round(runs_s / M * draw.uniform(1, 8) + 0.5))
        gpus, nodes = draw.choice(((1, 1), (1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (4, 2), (6, 2)))
        jobs.append(job(f"j{n}", runs_s, limit_min, gpus, nodes, at=round(draw.uniform(0, 60), 1)))
    return in_time(jobs)


# --- a real one -------------------------------------------------------------------------------------


def really(there: RealSlurm, case: Case) -> dict[str, tuple[float, float]]:
    """When each job was submitted and started there, in seconds since the full minute before the first came.

    Reservations begin and end at full minutes, there too.
    """
    first = time.time()
    began = first - first % M
    ids: dict[str, str] = {}
    submitted: dict[str, float] = {}
    done: set[str] = set()
    to_follow = {one.name: one.follow for one in case.jobs if one.follow}
    for one in case.jobs:
        time.sleep(max(0.0, first + one.submit_s - time.time()))
        if one.name in ids:
            continue
        tasks = [task for task in case.jobs if one.array and task.array == one.array] or [one]
        number = sbatch(there, one, len(tasks))
        for index, task in enumerate(tasks):
            ids[task.name] = f"{number}_{index}" if one.array else number
            submitted[task.name] = time.time() - began
    deadline = time.monotonic() + PATIENCE_S
    while True:
        rows = there.ask("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        states = dict(row.split() for row in rows)
        for name, follow in list(to_follow.items()):
            if follow and states.get(ids[name]) not in ("PENDING", "RUNNING"):
                del to_follow[name]
                ids[follow.name] = sbatch(there, follow, 1)
                submitted[follow.name] = time.time() - began
                states[ids[follow.name]] = "PENDING"
        waiting = {name for name, number in ids.items() if states.get(number) == "PENDING"}
        done = {name for name, number in ids.items() if states.get(number) not in ("PENDING", "RUNNING")}
        if not waiting and not to_follow:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"{case.name}: {sorted(waiting)} have not started; {len(done)} are done")
        time.sleep(0.3)
    found = {}
    for name, number in ids.items():
        start = datetime.fromisoformat(there.facts(number)["StartTime"])
        found[name] = submitted[name], start.timestamp() - began
    there.ask("scancel", "--user", str(os.getuid()), check=False)
    while there.ask("squeue", "--noheader", "--format=%i"):
        time.sleep(0.2)
    return found


def sbatch(there: RealSlurm, one: BatchJob, tasks: int) -> str:
    what = f"--gres=shard:{one.shards}" if one.shards else f"--gres=gpu:{one.gpus}"
    words = ["sbatch", "--parsable", f"--time={round(one.limit_s / M)}", f"--nodes={one.nodes}", what]
    words += ["--ntasks-per-node=1", "--output=/dev/null", "--partition=main", f"--job-name={one.name}"]
    if one.array:
        words.append(f"--array=0-{tasks - 1}" + (f"%{one.at_once}" if one.at_once else ""))
    return there.ask(*words, f"--wrap=exec sleep {one.runs_s}").strip().partition(";")[0]


# --- against the model ------------------------------------------------------------------------------


def simulated(case: Case, there: dict[str, tuple[float, float]]) -> dict[str, float]:
    """When each job would start, had it come at that second."""
    queue = Queue(THERE, AS_THERE)
    queue.submit(*(replace(one, submit_s=there[one.name][0]) for one in case.jobs))
    queue.run()
    return {name: ran.start_s for name, ran in queue.ran.items()}


def in_order(first: Sequence[float], second: Sequence[float]) -> tuple[int, int]:
    """Pairs of jobs of which one starts clearly before the other; and how many are so in `second` too."""
    places = range(len(first))
    pairs = [(a, b) for a in places for b in places if first[a] + NEAR_S < first[b]]
    return len(pairs), sum(second[a] < second[b] + NEAR_S for a, b in pairs)


def compare(report: Report, there: RealSlurm, chosen: Sequence[Case]) -> None:
    for case in chosen:
        seen = really(there, case)
        model = simulated(case, seen)
        key = key_of(case)
        report.results |= {
            f"{key}_submitted_s": [came_s for came_s, _ in seen.values()],
            f"{key}_real_s": [start_s for _, start_s in seen.values()],
            f"{key}_simulated_s": [model[name] for name in seen],
        }
        first_s = min(came_s for came_s, _ in seen.values())
        for name, (_, start_s) in seen.items():
            if not alike(start_s, model[name], first_s):
                words = f"{name} started after {start_s:.0f} s, simulated {model[name]:.1f} s"
                print(f"{case.name}: {words}", file=sys.stderr)


def alike(real_s: float, model_s: float, first_s: float) -> bool:
    return abs(real_s - model_s) <= max(NEAR_S, NEAR * (real_s - first_s))


def key_of(case: Case) -> str:
    return case.name.replace(" ", "_").replace("%", "limited")


def tell(report: Report, chosen: Sequence[Case]) -> None:
    """A line for each case, and one for all."""
    gaps_s: list[float] = []
    for case in chosen:
        came, real, model = (
            report.results[f"{key_of(case)}_{what}_s"] for what in ("submitted", "real", "simulated")
        )
        gaps = [abs(one - other) for one, other in zip(real, model, strict=True)]
        near = sum(alike(one, other, min(came)) for one, other in zip(real, model, strict=True))
        pairs, same = in_order(real, model)
        waits = [sum(starts) / len(starts) - sum(came) / len(came) for starts in (real, model)]
        gaps_s += gaps
        report.row(
            f"{case.name}: {case.shows}",
            f"{near} of {len(gaps)} jobs, {max(gaps):.0f} s apart at most; order of {same} of {pairs} pairs; "
            f"mean wait {waits[0]:.1f} s there, {waits[1]:.1f} s simulated",
            goal=f"all within {NEAR_S:g} s or {NEAR:.0%}",
            ok=near == len(gaps),
        )
    report.row(
        f"all {len(gaps_s)} jobs: start, there against simulated",
        f"median {median(gaps_s):.1f} s apart, 90 % {percentile(gaps_s, 0.9):.1f} s, all {max(gaps_s):.0f} s",
    )


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    os.environ["SLURM_TEST_SHARDS"] = str(THERE.shards)
    chosen = [case for case in cases() if not options.only or options.only in case.name]
    if options.quick:
        chosen = [case for case in cases() if case.name in ("hole", "array %")]
    with Scratch.make() as scratch, slurm(scratch) as there:
        compare(report, there, chosen)
    tell(report, chosen)
    return report


if __name__ == "__main__":
    main(
        "The simulated queue against a real Slurm.",
        measure,
        options_of=lambda parser: parser.add_argument(
            "--only", default="", metavar="NAME", help="cases so named"
        ),
    )
