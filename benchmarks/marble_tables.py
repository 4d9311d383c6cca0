"""The simulator against the MARBLE paper's tables: makespan and overhead of its three job sets.

    python benchmarks/marble_tables.py [--json] [--quick]

The profile `marble-summit` is fitted to the paper's figures (profiles/README.md says how), so this checks
that policy and simulator turn it into the paper's schedules, not that Summit was predicted blindly.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import JOB_SETS, Report, Scratch, hpcsched, main

PAPER_S = {"marble": (496, 608, 501), "exclusive": (958, 940, 707)}
PAPER_OVERHEAD = (0.132, None, 0.266)
GOAL = 0.01


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    for i, file in enumerate(JOB_SETS[:1] if options.quick else JOB_SETS):
        always, exclusive = _simulate(file, "marble,exclusive", "always")
        (pays,) = _simulate(file, "marble", "pays")
        name = file.stem
        for policy, found in (("marble", always), ("exclusive", exclusive)):
            paper_s, seconds = PAPER_S[policy][i], found["makespan_s"]
            off = seconds / paper_s - 1
            report.results[f"{name}_{policy}_makespan_s"] = [seconds]
            label = "`promote=always`" if policy == "marble" else "`exclusive`"
            report.row(
                f"simulate, job {name[:-1]} {name[-1]}, {label}",
                f"{seconds:.1f} s ({off:+.2%})",
                goal=f"{paper_s} s within 1 %",
                ok=abs(off) <= GOAL,
            )
        share, paper = always["overhead_share"], PAPER_OVERHEAD[i]
        report.results[f"{name}_overhead_share"] = [share]
        said = "not told" if paper is None else f"{paper:.1%}"
        report.row(f"... overhead share, job {name[:-1]} {name[-1]} (paper: {said})", f"{share:.1%}")
        report.results[f"{name}_pays_makespan_s"] = [pays["makespan_s"]]
        gain = 1 - pays["makespan_s"] / always["makespan_s"]
        report.row(
            f"... with `promote=pays` (our default), job {name[:-1]} {name[-1]}",
            f"{pays['makespan_s']:.1f} s ({gain:.1%} less than `always`)",
        )
    return report


def _simulate(file: object, policies: str, promote: str) -> list[Any]:
    command = hpcsched(
        *("simulate", file, "--gpus", 6, "--profiles", "marble-summit", "--json"),
        *("--policy", policies, "--policy-option", f"promote={promote}"),
    )
    with Scratch.make() as scratch:
        page = scratch.json(command, deadline_s=60)
    results: list[Any] = page.get("results", [page])
    return results


if __name__ == "__main__":
    main("simulate against the MARBLE paper", measure)
