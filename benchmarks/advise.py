"""What `hpcsched advise` takes, and how well it predicts: on a real Slurm that `tests/slurm/up` starts.

    python benchmarks/advise.py [--json] [--quick] [--speed] [--predictions]

--speed: the whole command for 100 jobs over 224 allocations; processor seconds, as the machine may be shared.

--predictions: stand-in jobs, faster than the clock, in the allocation that is recommended,
submitted by `script --advice`: once in one allocation, once with limits of three minutes, coming back by
requeue with the two minutes for which Slurm itself holds a job back. From the submission to the end of the
last batch job.

Neither of the two named: both, about 14 minutes. Predictions take Slurm's programs, see tests/slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

from allocations import Cluster, slurm
from common import JOB_SETS, Report, Scratch, hpcsched, main

from hpcsched import jobfile
from hpcsched.allocations.outcomes import Work
from hpcsched.allocations.tried import Asked, Trials
from hpcsched.batch.queue import Partition
from hpcsched.store.profiles import load_profiles

JOBS, QUICK_JOBS = 100, 3
MODELS = ("ResNet-50", "Inception-v3", "ResNet-101", "VGG-16")
SHAPES = ("--gpus", "1-8", "--nodes", "1-4", "--time", "2h,4h,8h,12h,24h,2d,4d")
SPEED_GOAL_S, PREDICTED_WITHIN = 10.0, 0.05
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one allocation": (5, ()),
    "limits of 3 minutes": (3, ("--time", "3m")),
}
"""How many times faster than the clock the stand-ins are, and further options."""
DEADLINE_S = 1500.0
POLL_S = 0.2
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    both = not (options.speed or options.predictions)
    with Scratch.make() as scratch:
        if options.speed or both:
            speed(report, scratch, QUICK_JOBS if options.quick else JOBS)
        if (options.predictions or both) and not options.quick:
            with slurm(scratch) as cluster:
                for name, (speed_up, more) in CASES.items():
                    predictions(report, cluster, name, speed_up, more)
    return report


def speed(report: Report, scratch: Scratch, count: int) -> None:
    """Processor seconds of the command, its start included."""
    drawn = random.Random(1)
    lines = ["schema = 1", "[defaults]", 'processes = "per-gpu"']
    for number in range(count):
        model, steps = drawn.choice(MODELS), drawn.randint(10_000, 100_000)
        lines += ["[[job]]", f'name = "j{number}"', f'model = "{model}"', f"steps = {steps}"]
        lines += ['command = ["python", "train.py"]']
    path = scratch.folder / "many.toml"
    path.write_text("\n".join(lines) + "\n")
    words = (
        "advise",
        path,
        "--profiles",
        "marble-summit",
        "--batch",
        "none",
        "--wait",
        30,
        "--json",
        *SHAPES,
    )
    before = os.times()
    page = scratch.json(hpcsched(*words), deadline_s=DEADLINE_S)
    after = os.times()
    took_s = after.children_user - before.children_user + after.children_system - before.children_system
    report.results["speed_processor_s"] = [took_s]
    report.row(
        f"`advise` for {count} jobs over 224 allocations",
        f"{took_s:.1f} s of processor time, {len(page['rows'])} rows",
        goal=f"at most {SPEED_GOAL_S:g} s",
        ok=took_s <= SPEED_GOAL_S,
    )
    every_s, tried = each_simulated(path)
    report.results["speed_each_simulated_processor_s"] = [every_s]
    report.row(
        "... where short limits wait so much less that none can be left out",
        f"{every_s:.1f} s of processor time, {tried} rows",
        goal=f"at most {SPEED_GOAL_S:g} s",
        ok=every_s <= SPEED_GOAL_S,
    )


def each_simulated(path: Path) -> tuple[float, int]:
    """Processor seconds of the trials alone, and how many end the work."""
    jobs = jobfile.load(path, workdir=path.parent).jobs
    work = Work(jobs=jobs, profiles=load_profiles("marble-summit"), policy="marble")
    limits = tuple(3600.0 * hours for hours in (2, 4, 8, 12, 24, 48, 96))
    asked = Asked(gpus=tuple(range(1, 9)), nodes=(1, 2, 3, 4), limits_s=limits)
    began = time.process_time()
    trials = Trials(work, [Partition(name="", hosts={8: 4})], asked)
    tried, _ = trials.tried(lambda shape: shape.limit_s**3, 0.0)
    return time.process_time() - began, len(tried)


def predictions(report: Report, cluster: Cluster, name: str, speed_up: int, more: tuple[str, ...]) -> None:
    """The end that is predicted, and the one that comes."""
    folder = cluster.folder / name.replace(" ", "-")
    folder.mkdir()
    advice, script = folder / "advice.json", folder / "job.sbatch"
    run = ("--devices", f"replay:6@{speed_up}", "--profiles", "marble-summit")
    words = ("--partition", "main", "--nodes", 1, "--gpus", 6, *run, *more)
    text = cluster.ask(*hpcsched("advise", JOB_SETS[1], *words, "--json"))
    advice.write_text(text)
    rundir = folder / "run"
    given = ("--advice", advice, "--dir", rundir, *run, "-o", script)
    cluster.ask(*hpcsched("script", "slurm", JOB_SETS[1], *given))
    page = json.loads(text)
    row = next(row for row in page["rows"] if row["number"] == page["recommended"])
    began = time.time()
    job = cluster.ask("sbatch", "--parsable", f"--output={folder}/run.out", str(script)).strip()
    while (state := cluster.states().get(job, "COMPLETED")) not in ENDED:
        if time.time() - began > DEADLINE_S:
            raise RuntimeError(f"job {job} is {state} after {DEADLINE_S:g} s")
        time.sleep(POLL_S)
    took_s = time.time() - began
    off = took_s / row["end_s"] - 1
    key = name.replace(" ", "_")
    report.results |= {f"{key}_predicted_s": [row["end_s"]], f"{key}_measured_s": [took_s]}
    report.row(
        f"a set of 3 jobs, {name} ({row['allocations']} in all)",
        f"{took_s:.0f} s from submission to the end, predicted {row['end_s']:.0f} s ({off:+.1%}); {state}",
        goal="within 5 %",
        ok=abs(off) <= PREDICTED_WITHIN and state == "COMPLETED",
    )


if __name__ == "__main__":
    main(__doc__.splitlines()[0], measure, "--speed", "--predictions")
