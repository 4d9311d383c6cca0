"""How soon `hpcsched run` has its first job going, and how many no-op jobs a second it gets through.

    python benchmarks/throughput.py [--json] [--quick]

Beside it, on the same machine, the floor: `xargs -P8 -n1 true`, which starts the same processes and does
nothing else (no journal on disk, no output files, no pinning).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time

from common import Report, Scratch, hpcsched, main, median, ms

SLOTS = 8
SIZES, QUICK_SIZES = (1_000, 10_000), (80,)
STARTS, QUICK_STARTS = 10, 1
GOAL_START_S, GOAL_RATE = 1.0, 300.0


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    _first_start_s()  # leaves the byte code behind
    starts = [_first_start_s() for _ in range(QUICK_STARTS if options.quick else STARTS)]
    report.results["first_start_s"] = starts
    report.row(
        "start of `hpcsched run` to its first job's process",
        f"median {ms(median(starts))}, max {ms(max(starts))}",
        goal="at most 1 s",
        ok=median(starts) <= GOAL_START_S,
    )
    for count in QUICK_SIZES if options.quick else SIZES:
        _many(report, count)
    return report


def _many(report: Report, count: int) -> None:
    floor_s = _xargs_s(count)
    wall_s, ends = _noop_jobs(count)
    tenth = len(ends) // 10
    # Over the same number of ends each, so that the start of the first jobs is in neither.
    first, last = tenth / (ends[tenth] - ends[0]), tenth / (ends[-1] - ends[-1 - tenth])
    report.results |= {
        f"noop_{count}_wall_s": [wall_s],
        f"noop_{count}_ends_s": ends,
        f"xargs_{count}_wall_s": [floor_s],
    }
    rate = count / wall_s
    report.row(
        f"{count:,} no-op jobs at {SLOTS} slots",
        f"{rate:.0f} jobs/s over the whole process, {count / ends[-1]:.0f} jobs/s while it runs",
        goal="at least 300 jobs/s",
        ok=rate >= GOAL_RATE,
    )
    report.row(
        "... the last tenth against the first",
        f"{last:.0f} against {first:.0f} jobs/s ({last / first:.2f})",
        goal="no slowing down (at least 0.9)",
        ok=last / first >= 0.9,
    )
    report.row(
        f"... `xargs -P{SLOTS} -n1 true`, the floor",
        f"{count / floor_s:.0f}/s; {wall_s / floor_s:.1f} x the floor",
    )


def _first_start_s() -> float:
    with Scratch.make() as scratch:
        file, rundir = scratch.folder / "jobs.toml", scratch.folder / "run"
        file.write_text('schema = 1\n[[job]]\nname = "now"\ngpus = 1\ncommand = ["date", "+%s%N"]\n')
        command = hpcsched("run", file, "--dir", rundir, "--devices", f"cpu:{SLOTS}", "--quiet")
        before_ns = time.time_ns()
        scratch.run(command, deadline_s=30)
        return (int((rundir / "jobs" / "1" / "hpcsched-1.out").read_text()) - before_ns) / 1e9


def _noop_jobs(count: int) -> tuple[float, list[float]]:
    """Wall seconds of the whole process, and when each job ended on the run's clock, in order."""
    with Scratch.make() as scratch:
        file = scratch.folder / "jobs.toml"
        jobs = (f'[[job]]\nname = "n{i}"\ngpus = 1\ncommand = ["true"]\n' for i in range(count))
        file.write_text("schema = 1\n" + "".join(jobs))
        options = ("--dir", scratch.folder / "run", "--devices", f"cpu:{SLOTS}", "--quiet", "--json")
        start = time.perf_counter()
        page = scratch.json(hpcsched("run", file, *options), deadline_s=60 + count / 20)
        wall_s = time.perf_counter() - start
    ended = [job["end_s"] for job in page["jobs"] if job["state"] == "COMPLETED"]
    if len(ended) != count:
        raise RuntimeError(f"{count - len(ended)} of {count} no-op jobs did not complete")
    return wall_s, sorted(ended)


def _xargs_s(count: int) -> float:
    program = shutil.which("true") or "/bin/true"
    start = time.perf_counter()
    subprocess.run(
        ["xargs", f"-P{SLOTS}", "-n1", program], input=b"x\n" * count, check=True, timeout=60 + count / 20
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main("start-up and throughput of run", measure)
