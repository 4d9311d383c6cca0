"""A real run of pretended trainings against the simulation of the same job sets.

    python benchmarks/replay_vs_simulate.py [--json] [--quick]

`hpcsched run --devices replay:6@20` starts real processes, sends real signals and waits for real exits; only
the training in them is pretended, 20 times faster than the clock. Every real delay counts 20-fold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import JOB_SETS, Report, Scratch, hpcsched, main

SPEED, QUICK_SPEED = 20, 400
GOAL = 0.03
DEADLINE_S = 120.0
OPTIONS = ("--profiles", "marble-summit", "--json")
POLICIES = {
    "": ("--policy-option", "promote=always"),
    "planner": ("--policy", "planner"),
}
PLANNED_S = {"set2": 540.0, "set3": 430.0}
"""The longest that the planner should take by the simulator; MARBLE takes 608 and 501 s."""


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    speed = QUICK_SPEED if options.quick else SPEED
    for file in JOB_SETS[:1] if options.quick else JOB_SETS:
        for policy in POLICIES:
            _compare(report, file, policy, speed)
    return report


def _compare(report: Report, file: Path, policy: str, speed: int) -> None:
    real, simulated = _both(file, POLICIES[policy], speed)
    name = file.stem
    off = real["makespan_s"] / simulated["makespan_s"] - 1
    lost = sum(job["steps"] - job["step"] for job in real["jobs"])
    repeated = sum(job["steps_repeated"] for job in real["jobs"])
    key = f"{name}_{policy}" if policy else name
    report.results[f"{key}_run_makespan_s"] = [real["makespan_s"]]
    report.results[f"{key}_simulated_makespan_s"] = [simulated["makespan_s"]]
    report.results[f"{key}_steps_lost"] = [lost]
    report.results[f"{key}_steps_repeated"] = [repeated]
    suspensions = sum(job["suspensions"] for job in real["jobs"])
    under = f" under {policy}" if policy else ""
    report.row(
        f"run on `replay:6@{speed}`{under}, job {name[:-1]} {name[-1]} ({suspensions} suspensions)",
        f"{real['makespan_s']:.1f} s, simulated {simulated['makespan_s']:.1f} s ({off:+.2%})",
        goal="simulated makespan within 3 %",
        ok=abs(off) <= GOAL,
    )
    if policy and name in PLANNED_S:
        report.row(
            f"... simulated under {policy}, job {name[:-1]} {name[-1]}",
            f"{simulated['makespan_s']:.1f} s",
            goal=f"at most {PLANNED_S[name]:.0f} s",
            ok=simulated["makespan_s"] <= PLANNED_S[name],
        )
    report.row(
        f"... steps lost, steps repeated, job {name[:-1]} {name[-1]}",
        f"{lost}, {repeated}",
        goal="0, 0",
        ok=(lost, repeated) == (0, 0),
    )


def _both(file: Path, policy: tuple[str, ...], speed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with Scratch.make() as scratch:
        devices = ("--devices", f"replay:6@{speed}", "--dir", scratch.folder / "run", "--quiet")
        real = scratch.json(hpcsched("run", file, *devices, *OPTIONS, *policy), deadline_s=DEADLINE_S)
        simulated = scratch.json(hpcsched("simulate", file, "--gpus", 6, *OPTIONS, *policy), deadline_s=60)
    return real, simulated


if __name__ == "__main__":
    main("run on replay devices against simulate", measure)
