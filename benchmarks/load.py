"""What a run asks of a site's controller and its shared filesystem: counted on a real Slurm.

    python benchmarks/load.py [--json] [--quick] [--minutes 10] [--hours 4]

One batch job on the Slurm that `tests/slurm/up` starts, with a limit of --hours, runs 40 jobs of stand-ins of
five minutes each. For --minutes, after the first one, are counted: the commands of Slurm that it starts (by
programs of the same names before them in PATH), and by strace the calls about files below the run directory,
the bytes written there and the waits for the disk, of the agent and all its processes. Then the same for one
`status` and one `top` of a login node. Takes Slurm's programs (see tests/slurm) and strace.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from allocations import Cluster, slurm
from common import Report, Scratch, hpcsched, main, wait_for

JOBS, STEPS, GPUS = 40, 600, 6
RUNS = 300
"""Runs of a site at a time, for which the sums are made."""
SETTLE_S = 60.0
"""The start of a run is not what it asks for ever after."""
COMMANDS = ("squeue", "scontrol", "sbatch", "scancel", "sinfo", "srun", "sacct")
CALL = re.compile(r"^\d+ +(?P<at>\d+\.\d+) (?P<name>\w+)\((?P<rest>.*)\) += (?P<result>-?\d+)")
DATA = ("read", "write", "pread64", "pwrite64", "close")
MOST_QUESTIONS = 30
"""Goal: questions and comments of a run in an hour, with hours to go."""
MOST_CALLS = 30
"""Goal: calls about files in a second, of one run with 40 jobs."""

COUNTER = """\
#!/bin/sh
echo "$(date +%s.%N) {name} $*" >> {log}
exec {real} "$@"
"""


def measure(options: argparse.Namespace) -> Report:
    if shutil.which("strace") is None:
        raise RuntimeError("no strace here")
    report = Report()
    minutes = 0.5 if options.quick else options.minutes
    with Scratch.make() as scratch, slurm(scratch) as cluster:
        counters(cluster)
        run = scratch.folder / "run"
        began = submit(cluster, run, hours=options.hours)
        settled = began + (5.0 if options.quick else SETTLE_S)
        time.sleep(max(0.0, settled + 60 * minutes - time.time()))
        until = time.time()
        controller(report, scratch.folder / "asked", settled, until)
        filesystem(report, scratch.folder / "agent.trace", run, settled, until)
        for words in (("status",), ("top", "-n", "3")):
            login(report, cluster, run, words)
        cluster.ask("scancel", "--full", "--signal=KILL", "1", check=False)
    return report


def counters(cluster: Cluster) -> None:
    """Put programs before Slurm's in PATH that note who is called."""
    folder = cluster.folder / "counting"
    folder.mkdir()
    for name in COMMANDS:
        if real := shutil.which(name, path=cluster.env["PATH"]):
            (folder / name).write_text(COUNTER.format(name=name, log=cluster.folder / "asked", real=real))
            (folder / name).chmod(0o755)
    cluster.env["PATH"] = f"{folder}:{cluster.env['PATH']}"


def submit(cluster: Cluster, run: Path, *, hours: float) -> float:
    """Begin the run in a batch job; the time at which it has."""
    jobs = cluster.folder / "jobs.toml"
    one = '[[job]]\nname = "train-{number}"\nmodel = "quick"\nsteps = {steps}\ntrainer = "none:None"\n'
    body = "".join(one.format(number=number, steps=STEPS) for number in range(JOBS))
    jobs.write_text(f"schema = 1\n\n{body}")
    given = ("--devices", f"replay:{GPUS}@1", "--profiles", cluster.folder / "profiles.json")
    words = " ".join(map(str, hpcsched("run", jobs, "--dir", run, *given, "--policy", "exclusive")))
    counted = f"trace=%file,{','.join(DATA)},fsync,fdatasync"
    trace = f"strace -f -ttt -qq -y -s 0 -e {counted} -o {cluster.folder}/agent.trace"
    script = cluster.folder / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {trace} {words}\n")
    cluster.ask("scontrol", "update", "PartitionName=main", "MaxTime=UNLIMITED")
    limit = f"--time={round(60 * hours)}"
    wide = ("--partition=main", "--nodes=1", f"--gres=gpu:{GPUS}")
    cluster.ask("sbatch", f"--output={run}.out", limit, *wide, str(script))
    wait_for(lambda: (run / "status.json").exists(), "the run", deadline_s=60)
    return time.time()


def controller(report: Report, log: Path, since: float, until: float) -> None:
    asked = Counter[str]()
    for line in log.read_text().splitlines() if log.exists() else ():
        at, name, *words = line.split()
        if since <= float(at) < until and name != "sbatch":
            verb = words[0] if name == "scontrol" and words else ""
            verb = words[1] if verb.startswith("--") and len(words) > 1 else verb
            asked[f"{name} {verb}".strip()] += 1
    hours = (until - since) / 3600
    for name, count in sorted(asked.items()):
        report.row(f"{name}, of one run", f"{count / hours:.0f} an hour")
    total = sum(asked.values()) / hours
    report.results["questions_an_hour"] = [total]
    shown = f"{total:.0f} an hour; {RUNS} runs: {RUNS * total / 3600:.2f} a second"
    report.row(
        "questions to the controller, of one run",
        shown,
        goal=f"<= {MOST_QUESTIONS} an hour",
        ok=total <= MOST_QUESTIONS,
    )


def filesystem(report: Report, trace: Path, run: Path, since: float, until: float) -> None:
    names, written, synced = calls(trace.open(errors="replace"), run, since, until)
    seconds = until - since
    about = sum(names.values()) / seconds
    report.results["file_calls_a_second"] = [about]
    shown = f"{about:.1f} a second; {RUNS} runs: {RUNS * about:.0f}"
    report.row(
        "calls about files below the run directory",
        shown,
        goal=f"<= {MOST_CALLS} a second",
        ok=about <= MOST_CALLS,
    )
    for name, count in names.most_common(6):
        report.row(f"  of these {name}", f"{count / seconds:.2f} a second")
    report.row("waits for the disk (fsync)", f"{synced / seconds:.2f} a second")
    mib = written / 2**20 * 3600 / seconds
    report.results["written_mib_an_hour"] = [mib]
    report.row(
        "written below the run directory",
        f"{mib:.1f} MiB an hour; {RUNS} runs: {RUNS * mib / 3600:.2f} MiB/s",
    )


def calls(lines: Iterable[str], run: Path, since: float, until: float) -> tuple[Counter[str], int, int]:
    """By name the calls about files below the run directory, the bytes written there, and the waits."""
    names, written, synced = Counter[str](), 0, 0
    for line in lines:
        found = CALL.match(line)
        if found is None or str(run) not in found["rest"] or not since <= float(found["at"]) < until:
            continue
        if found["name"] in ("write", "pwrite64"):
            written += max(0, int(found["result"]))
        elif found["name"] in ("fsync", "fdatasync"):
            synced += 1
        elif found["name"] not in DATA:
            names[found["name"]] += 1
    return names, written, synced


def login(report: Report, cluster: Cluster, run: Path, words: tuple[str, ...]) -> None:
    """One command as it is typed on a login node."""
    log, trace = cluster.folder / "asked", cluster.folder / f"{words[0]}.trace"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    traced = ("strace", "-f", "-ttt", "-qq", "-y", "-s", "0", "-e", "trace=%file,read", "-o", str(trace))
    subprocess.run(
        (*traced, *hpcsched("--dir", run, *words)), env=cluster.env, check=True, capture_output=True
    )
    after = len(log.read_text().splitlines()) if log.exists() else 0
    names, _, _ = calls(trace.open(errors="replace"), run, 0.0, float("inf"))
    shown = f"{after - before} questions to the controller, {sum(names.values())} calls about files"
    report.row(f"`{' '.join(words)}` of a run with {JOBS} jobs", shown)


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="how long is counted")
    parser.add_argument("--hours", type=float, default=4.0, help="the time limit of the batch job")


if __name__ == "__main__":
    main(__doc__ or "", measure, options_of=options_of)
