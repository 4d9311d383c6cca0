"""What an agent costs while it only waits: one long rigid job runs, 100 jobs wait behind it.

    python benchmarks/idle_agent.py [--json] [--quick]

CPU time from /proc/PID/stat over windows of 4 s, all threads; memory from smaps_rollup (RSS, and PSS, in
which pages shared with others count in part).
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from common import Report, Scratch, hpcsched, main, median, wait_for

WINDOWS, WINDOW_S, SETTLE_S = 6, 4.0, 3.0
QUICK_WINDOWS, QUICK_WINDOW_S, QUICK_SETTLE_S = 2, 0.2, 0.0
WAITING = 100
GOAL_SHARE, GOAL_MIB = 0.01, 80


def measure(options: argparse.Namespace) -> Report:
    quick = options.quick
    count, window_s, settle_s = (
        (QUICK_WINDOWS, QUICK_WINDOW_S, QUICK_SETTLE_S) if quick else (WINDOWS, WINDOW_S, SETTLE_S)
    )
    with Scratch.make() as scratch:
        file, rundir = scratch.folder / "jobs.toml", scratch.folder / "run"
        file.write_text(_jobs())
        command = hpcsched("run", file, "--dir", rundir, "--devices", "cpu:2", "--quiet")
        with scratch.start(command) as agent:
            started = rundir / "jobs" / "1" / "hpcsched-1.out"
            wait_for(lambda: agent.poll() is not None or _said(started), "first job", deadline_s=30)
            time.sleep(settle_s)
            if agent.poll() is not None:
                raise RuntimeError(f"the agent ended: {scratch.errors}")
            windows = [_window(agent.pid, window_s) for _ in range(count)]
            memory = {key: _memory_mib(agent.pid, key) for key in ("Rss", "Pss")}
    shares = [cpu_s / wall_s for cpu_s, wall_s in windows]
    whole = sum(cpu_s for cpu_s, _ in windows) / sum(wall_s for _, wall_s in windows)
    report = Report()
    report.results["window_cpu_s"] = [cpu_s for cpu_s, _ in windows]
    report.results["window_wall_s"] = [wall_s for _, wall_s in windows]
    report.results["rss_mib"], report.results["pss_mib"] = [memory["Rss"]], [memory["Pss"]]
    report.row(
        f"CPU of an idle agent (1 job running, {WAITING} waiting)",
        f"{whole:.2%} of a core (median window {median(shares):.2%})",
        goal="at most 1 %",
        ok=whole <= GOAL_SHARE,
    )
    report.row(
        "... its memory",
        f"RSS {memory['Rss']:.1f} MiB, PSS {memory['Pss']:.1f} MiB",
        goal="at most 80 MiB",
        ok=memory["Rss"] <= GOAL_MIB,
    )
    return report


def _jobs() -> str:
    # Bounded, so that it does not outlive a benchmark that was killed for long.
    first = '[[job]]\nname = "long"\ngpus = 2\ncommand = ["sh", "-c", "echo here; exec sleep 90"]\n'
    rest = (f'[[job]]\nname = "w{i}"\ngpus = 2\ncommand = ["true"]\n' for i in range(WAITING))
    return "schema = 1\n" + first + "".join(rest)


def _said(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _window(pid: int, seconds: float) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of a process from now on for about so long."""
    wall, cpu = time.perf_counter(), _cpu_s(pid)
    time.sleep(seconds)
    return _cpu_s(pid) - cpu, time.perf_counter() - wall


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int, key: str) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/smaps_rollup has no {key}")
    return int(found[1]) / 1024


if __name__ == "__main__":
    main("an idle agent's CPU and memory", measure)
