"""What a run costs that has had many jobs: memory of the agent, its files, and what commands take.

    python benchmarks/growth.py [--json] [--quick] [--jobs 10000]

An agent on two CPU slots takes no-op jobs by its inbox, one command each, and its RSS is read after each
thousand that are over: the slope over the last three quarters is what a finished job costs it for good; and
its processor time, of which a job must not take more as there have been more. Then `status` and others, each
the median of 5, at 1,000, at 10,000 and at as many as there are; and 50 `status` at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from common import Report, Scratch, hpcsched, main, median, ms, percentile, wait_for

from hpcsched.agent.inbox import Command, send
from hpcsched.core.model import JobSpec, Kind
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import read_brief

JOBS, QUICK_JOBS = 10_000, 60
AHEAD = 200
"""Jobs that wait or run at any time."""
SAMPLES, AT_ONCE = 5, 50
GOAL_BYTES = 512
"""Goal: memory for good of a job that is over."""
MORE = 1.25
"""Goal: no more than so many times the processor time of the first jobs."""
DEADLINE_S = 3600.0


def measure(options: argparse.Namespace) -> Report:
    report, jobs = Report(), QUICK_JOBS if options.quick else options.jobs
    marks = [jobs // 3, 2 * jobs // 3, jobs] if options.quick else range(1000, jobs + 1, 1000)
    asked = {marks[-1]} | ({1000, 10_000} & {*marks})
    with Scratch.make() as scratch:
        rundir = RunDir(scratch.folder / "run")
        command = hpcsched("run", "--stay", "--dir", rundir.root, "--devices", "cpu:2", "--quiet")
        with scratch.start(command) as agent:
            wait_for(lambda: agent.poll() is not None or rundir.status.exists(), "the run", deadline_s=60)
            began, over, rss, used = time.monotonic(), [0], [rss_of(agent.pid)], [cpu_s_of(agent.pid)]
            sender = _Sender(rundir, jobs)
            for mark in marks:
                sender.until(mark)
                if agent.poll() is not None:
                    raise RuntimeError(f"the agent ended: {scratch.errors}")
                over.append(mark)
                rss.append(rss_of(agent.pid))
                used.append(cpu_s_of(agent.pid))
                if mark in asked:
                    _commands(report, scratch, rundir, mark, quick=options.quick)
            report.results["jobs_per_s"] = [jobs / (time.monotonic() - began)]
    settled = len(over) // 4  # tables grow by doubling, and answers are kept for a minute
    slope = slope_of(over[settled:], rss[settled:])
    report.results["over"], report.results["rss_bytes"] = [float(n) for n in over], rss
    report.results["bytes_a_job"] = [max(0.0, slope)]
    report.row(
        f"memory of the agent for a job that is over, {jobs} jobs by the inbox",
        f"{slope:.0f} bytes; RSS {rss[0] / 2**20:.1f} to {rss[-1] / 2**20:.1f} MiB",
        goal=f"at most {GOAL_BYTES} bytes",
        ok=None if options.quick else slope <= GOAL_BYTES,
    )
    each = [(b - a) / (n - m) for (a, b), (m, n) in zip(pairwise(used), pairwise(over), strict=True)]
    report.results["cpu_s_a_job"] = each
    tenth = max(1, len(each) // 10)
    first, last = median(each[:tenth]), median(each[-tenth:])
    report.row(
        "processor time of the agent for a job, the first tenth of them and the last",
        f"{ms(first)}, {ms(last)}: {last / first if first else 0:.2f}x",
        goal=f"at most {MORE}x",
        ok=None if options.quick else last <= MORE * first,
    )
    return report


class _Sender:
    """Sends no-op jobs, and has only so many wait at a time."""

    def __init__(self, rundir: RunDir, jobs: int) -> None:
        self._rundir, self._jobs, self._sent = rundir, jobs, 0

    def until(self, mark: int) -> None:
        """Send until so many are over."""
        wait_for(lambda: self._over_after_sending() >= mark, f"{mark} jobs", deadline_s=DEADLINE_S)

    def _over_after_sending(self) -> int:
        over = read_brief(self._rundir).done
        while self._sent < min(self._jobs, over + AHEAD):
            self._sent += 1
            name = f"job-{self._sent}"
            spec = JobSpec(name=name, kind=Kind.COMMAND, model=name, command=("true",), workdir="/tmp")
            send(self._rundir, Command(command="submit", jobs=[spec], workdir="/tmp"))
        time.sleep(0.1)
        return over


def _commands(report: Report, scratch: Scratch, rundir: RunDir, jobs: int, *, quick: bool) -> None:
    size = sum(path.stat().st_size for path in rundir.root.glob("*") if path.is_file())
    snapshot = rundir.status.stat().st_size
    report.results[f"jobs_{jobs}_snapshot_bytes"] = [float(snapshot)]
    report.row(f"{jobs} jobs: status.json", f"{snapshot / 1000:.0f} kB; all files {size / 1000:.0f} kB")
    middle = jobs // 2
    asked = {
        "status": ("status",),
        "status of one": ("status", f"{middle}"),
        "status of all": ("status", "--states", "all"),
        "status as JSON": ("status", "--json"),
        "explain": ("explain", f"{middle}"),
    }
    for what, words in asked.items():
        taken = [_taken(scratch, rundir, words) for _ in range(1 if quick else SAMPLES)]
        name = what.replace(" ", "_")
        report.results[f"jobs_{jobs}_{name}_s"] = [wall for wall, _ in taken]
        report.results[f"jobs_{jobs}_{name}_peak_mib"] = [peak for _, peak in taken]
        middle_s, peak = median([wall for wall, _ in taken]), max(peak for _, peak in taken)
        report.row(f"{jobs} jobs: {what}", f"{ms(middle_s)}, {peak:.0f} MiB")
    walls = _at_once(scratch, rundir, 4 if quick else AT_ONCE)
    report.results[f"jobs_{jobs}_at_once_s"] = walls
    shown = f"median {ms(median(walls))}, the last {ms(percentile(walls, 1.0))}"
    report.row(f"{jobs} jobs: {len(walls)} `status` at once", shown)


_MEASURED = """\
import json, resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
wall_s = time.perf_counter() - began
print(json.dumps([wall_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def _taken(scratch: Scratch, rundir: RunDir, words: Sequence[str]) -> tuple[float, float]:
    """Seconds and MiB of one command."""
    command = hpcsched(*words, "--dir", rundir.root)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command], env=scratch.env, check=True, capture_output=True
    )
    wall, peak = json.loads(done.stdout)
    return wall, peak


def _at_once(scratch: Scratch, rundir: RunDir, number: int) -> list[float]:
    """Seconds that each of so many `status` takes that begin together."""
    walls: list[float] = []

    def one() -> None:
        began = time.perf_counter()
        subprocess.run(
            hpcsched("status", "--dir", rundir.root), env=scratch.env, check=True, capture_output=True
        )
        walls.append(time.perf_counter() - began)

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(walls) < number:
        raise RuntimeError(f"{number - len(walls)} of {number} `status` have failed")
    return walls


def cpu_s_of(pid: int) -> float:
    """Processor time of a process until now, without that of its children."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def rss_of(pid: int) -> float:
    """Bytes of a process that lie in memory and are its own, or may be."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/status has no VmRSS")
    return int(found[1]) * 1024.0


def slope_of(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line of least squares."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many jobs, a multiple of 1,000")


if __name__ == "__main__":
    main("what a run costs that has had many jobs", measure, options_of=options_of)
