"""Eight plain programs on two CPU slots: one a slot, with shares, and under task-spooler.

    python benchmarks/sharing.py [--json] [--quick]

Each program trains nothing, but uses its core as a training does that waits for its data: in each step of
0.1 s it multiplies matrices for a part of the time and sleeps for the rest. It knows nothing of hpcsched,
prints its steps, and starts anew when it is started again. How long each would take alone is measured first,
one after the other on a core of its own. Then all eight at once:

- `hpcsched run`, one a slot (`gpus = 1`), with measured shares (`gpus = "share"`), with a quarter of a slot
  each (`gpus = 0.25`);
- task-spooler (`tsp`), as many at a time as there are cores, and all at a time; where it is installed.

Makespan, and how many times longer than alone each takes from its own start to its end. One program more than
these wants ten times the memory that it asks for: who is ended by that?
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import Report, Scratch, hpcsched, main

CORES = 2
STEP_S = 0.1
BUSY = (0.15, 0.2, 0.25, 0.3, 0.15, 0.4, 0.2, 0.3)
STEPS = (600, 900, 450, 700, 1200, 500, 800, 650)
QUICK = 20
"""Of the steps one in so many, with `--quick`."""

PROGRAM = """
import json, os, sys, time
import numpy as np

name, steps, busy, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
held = bytearray(int(sys.argv[5]) << 20) if len(sys.argv) > 5 else None
x = np.random.rand(64, 64)
began = time.time()
for step in range(1, steps + 1):
    until = time.process_time() + busy * step_s
    while time.process_time() < until:
        x @ x
    time.sleep((1 - busy) * step_s)
    print("step", step, flush=True)
with open(name + ".json", "w") as file:
    json.dump([began, time.time()], file)
"""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    with Scratch.make() as scratch:
        scratch.env |= {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TS_SOCKET": f"{scratch.folder}/ts",
        }
        (scratch.folder / "program.py").write_text(PROGRAM)
        steps = [count // QUICK if options.quick else count for count in STEPS]
        alone = _alone(scratch, steps)
        report.results["alone_s"] = alone
        report.row("one after the other on one core", f"{sum(alone):.0f} s")
        ways = [("hpcsched, one a slot", 1), ('hpcsched, "share"', "share"), ("hpcsched, 0.25", 0.25)]
        spans = {}
        for words, gpus in ways:
            spans[words] = _row(report, words, alone, _hpcsched(scratch, steps, gpus))
        if shutil.which("tsp"):
            for words, slots in ((f"tsp -S {CORES}", CORES), ("tsp -S 8, all at a time", len(STEPS))):
                spans[words] = _row(report, words, alone, _spooler(scratch, steps, slots))
        one_a_slot = spans["hpcsched, one a slot"]
        for words in ('hpcsched, "share"', "hpcsched, 0.25"):
            gain = one_a_slot / spans[words]
            report.row(f"{words} against one a slot", f"{gain:.2f}x", goal="> 1x", ok=gain > 1)
        states, goal, ok = _greedy(scratch, steps)
        report.row("who is ended by one that takes too much", states, goal=goal, ok=ok)
    return report


def _argv(number: int, steps: list[int], *more: object) -> list[str]:
    name = f"p{number}"
    words = [sys.executable, "program.py", name, steps[number], BUSY[number], STEP_S, *more]
    return [str(word) for word in words]


def _alone(scratch: Scratch, steps: list[int]) -> list[float]:
    """Seconds of a tenth of the steps of each program by itself, times ten."""
    taken = []
    for number in range(len(steps)):
        few = [max(1, count // 10) for count in steps]
        subprocess.run(
            ["taskset", "-c", "0", *_argv(number, few)], cwd=scratch.folder, env=scratch.env, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        began, ended = _times(scratch, number)
        taken.append((ended - began) / few[number] * steps[number])
    return taken


def _times(scratch: Scratch, number: int) -> tuple[float, float]:
    file = scratch.folder / f"p{number}.json"
    began, ended = json.loads(file.read_text())
    file.unlink()
    return began, ended


def _row(report: Report, words: str, alone: list[float], found: tuple[float, list[float]]) -> float:
    makespan_s, took = found
    slower = [each / own for each, own in zip(took, alone, strict=True)]
    report.results[f"{words}: makespan_s"] = [makespan_s]
    report.results[f"{words}: took_s"] = took
    worst = max(slower)
    shares = "share" in words or "0.25" in words
    report.row(
        words,
        f"makespan {makespan_s:.0f} s, a program at most {worst:.2f} times as long as alone",
        goal="nobody 2 times slower" if shares else "",
        ok=worst <= 2 if shares else None,
    )
    return makespan_s


def _jobs(steps: list[int], gpus: object, *more: str) -> str:
    lines = ["schema = 1"]
    for number, count in enumerate(steps):
        lines += [
            "[[job]]", f'name = "p{number}"', f'model = "m{number}"',
            f"command = {json.dumps(_argv(number, steps))}",
            f"gpus = {json.dumps(gpus)}", f"steps = {count}", "restartable = true",
            f'checkpoints = "none-{number}-*"', "progress_pattern = 'step (\\d+)'",
        ]  # fmt: skip
    return "\n".join([*lines, *more, ""])


def _hpcsched(scratch: Scratch, steps: list[int], gpus: object) -> tuple[float, list[float]]:
    (scratch.folder / "jobs.toml").write_text(_jobs(steps, gpus))
    run = scratch.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    began = time.time()
    scratch.run(hpcsched("run", "jobs.toml", "--dir", run, "--devices", f"cpu:{CORES}"), deadline_s=3600)
    return _since(scratch, began, len(steps))


def _spooler(scratch: Scratch, steps: list[int], slots: int) -> tuple[float, list[float]]:
    def tsp(*words: object) -> None:
        subprocess.run(
            ["tsp", *map(str, words)],
            cwd=scratch.folder,
            env=scratch.env,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    tsp("-S", slots)
    began = time.time()
    for number in range(len(steps)):
        tsp("-n", *_argv(number, steps))
    tsp("-n", "true")
    while not all((scratch.folder / f"p{number}.json").exists() for number in range(len(steps))):
        time.sleep(0.05)
    found = _since(scratch, began, len(steps))
    tsp("-K")
    return found


def _since(scratch: Scratch, began: float, programs: int) -> tuple[float, list[float]]:
    times = [_times(scratch, number) for number in range(programs)]
    return max(ended for _, ended in times) - began, [ended - start for start, ended in times]


def _greedy(scratch: Scratch, steps: list[int]) -> tuple[str, str, bool]:
    """Two neighbours, and one that asks for 200M and takes 2G."""
    steps = [max(10, count // 10) for count in steps]
    argv = [*_argv(2, steps)[:2], "greedy", "1000", "0.1", str(STEP_S), "2000"]
    lines = [
        "[[job]]", 'name = "greedy"', f"command = {json.dumps(argv)}", "gpus = 0.25", 'memory = "200M"',
        "retries = 0",
    ]  # fmt: skip
    (scratch.folder / "jobs.toml").write_text(_jobs(steps[:2], 0.25, *lines))
    run = scratch.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = hpcsched("run", "jobs.toml", "--dir", run, "--devices", "cpu:1")
    subprocess.run(
        command, cwd=scratch.folder, env=scratch.env, check=False, capture_output=True, timeout=600
    )
    page = json.loads((run / "status.json").read_text())
    states = {job["name"]: job["state"] for job in page["jobs"]}
    ok = states == {"p0": "COMPLETED", "p1": "COMPLETED", "greedy": "OUT_OF_MEMORY"}
    return ", ".join(f"{name} {state}" for name, state in states.items()), "itself alone", ok


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    main(__doc__.splitlines()[0], measure)
