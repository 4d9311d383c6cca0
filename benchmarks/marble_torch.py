"""The MARBLE paper's job sets with real PyTorch processes: what share of the time is suspend and resume?

    python benchmarks/marble_torch.py [--json] [--quick]

`hpcsched run --devices cpu:6` with the paper's rule (`promote=always`); every rank is a process with gloo.
Each step computes a little and then waits, so that a job has the speed of its network on as many GPUs of a
Summit node, times 4: a set takes two to three minutes. State is as large as that of the networks (with
momentum), divided by 12: 16 to 92 MB. Suspends, resumes and resizes are real, and not sped up: beside jobs 4
times as fast, they weigh 4 times as much.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from common import JOB_SETS, ROOT, Report, Scratch, hpcsched, main

SPEED, QUICK_SPEED = 4.0, 60.0
STATE_MB = {"ResNet-50": 17.0, "Inception-v3": 16.0, "ResNet-101": 30.0, "VGG-16": 92.0}
"""Parameters and momentum of the networks, in float32, divided by 12."""
GOAL = 0.01
DEADLINE_S = 500.0


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    speed = QUICK_SPEED if options.quick else SPEED
    for file in JOB_SETS[:1] if options.quick else JOB_SETS:
        with Scratch.make() as scratch:
            scratch.env["PYTHONPATH"] = str(Path(__file__).parent)
            result = _run(scratch, file, speed)
        _sum_up(report, file.stem, result)
    return report


def _run(scratch: Scratch, file: Path, speed: float) -> dict[str, Any]:
    page = json.loads((ROOT / "profiles" / "marble-summit.json").read_text())
    fast: dict[str, dict[str, float]] = {}
    profiles = []
    for profile in page["profiles"]:
        model, rates = profile["model"], profile["throughput"]
        fast[model] = {count: rate * speed for count, rate in rates.items()}
        profiles.append({"model": model, "device": "cpu", "throughput": fast[model], "source": "measured"})
    known = scratch.folder / "profiles.json"
    known.write_text(json.dumps({"schema": 1, "profiles": profiles}))
    jobs = ["schema = 1"]
    for job in tomllib.loads(file.read_text())["job"]:
        model = job["model"]
        args = {"state_mb": STATE_MB[model], "rates": fast[model]}
        rates = ", ".join(f'"{count}" = {rate}' for count, rate in fast[model].items())
        jobs += [
            "[[job]]",
            f'name = "{job["name"]}"',
            f'model = "{model}"',
            f"steps = {job['steps']}",
            'trainer = "marble_training:Paced"',
            f"args = {{ state_mb = {args['state_mb']}, rates = {{ {rates} }} }}",
        ]
    path = scratch.folder / "jobs.toml"
    path.write_text("\n".join(jobs))
    place = ("--devices", "cpu:6", "--dir", scratch.folder / "run")
    paper = ("--policy", "marble", "--policy-option", "promote=always")
    command = hpcsched("run", path, *place, *paper, "--profiles", known, "--json", "--quiet")
    return dict(scratch.json(command, deadline_s=DEADLINE_S))


def _sum_up(report: Report, name: str, result: dict[str, Any]) -> None:
    jobs = result["jobs"]
    ran_s = sum(a["end_s"] - a["start_s"] for job in jobs for a in job["attempts"])
    switch_s = sum(job["switch_s"] for job in jobs)
    resizes = sum(a["ended"] == "resized" for job in jobs for a in job["attempts"])
    suspensions = sum(job["suspensions"] for job in jobs)
    off = sum(job["steps"] - job["step"] for job in jobs) + sum(job["steps_repeated"] for job in jobs)
    share = switch_s / ran_s
    report.results |= {
        f"{name}_makespan_s": [result["makespan_s"]],
        f"{name}_switch_s": [switch_s],
        f"{name}_ran_s": [ran_s],
        f"{name}_resizes": [float(resizes)],
        f"{name}_suspensions": [float(suspensions)],
        f"{name}_steps_lost_or_repeated": [float(off)],
    }
    report.row(
        f"{name}: suspend, resume and resize, of the time the jobs ran",
        f"{share:.2%} ({resizes} resizes, {suspensions} suspensions; makespan {result['makespan_s']:.0f} s)",
        goal="<= 1 % (the paper: 13.2 to 26.6 %)",
        ok=share <= GOAL,
    )
    report.row(f"{name}: steps lost or repeated", str(off), goal="0", ok=off == 0)


if __name__ == "__main__":
    main(__doc__ or "", measure)
