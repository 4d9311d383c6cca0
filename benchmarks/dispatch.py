"""No-op jobs at 8 slots side by side with HyperQueue, task-spooler and the floor, in turn, several times.

    python benchmarks/dispatch.py [--json] [--quick] [--hyperqueue PYTHON] [--jobs N] [--rounds N]

Every program is timed from its start to its end, as a user waits for it; the rounds take them in turn, so
that each pair has had the same minutes of the machine. `--hyperqueue`: a Python that has the package
`hyperqueue` (its server and worker are in it); task-spooler is `tsp` in PATH. What is not there is left
out, and said.

All folders are removed after the last round: ext4 passes over inodes that were removed in the last minutes
one by one whenever a file is made, and whose turn comes later would pay for what earlier ones left (measured:
each round of hpcsched was slower than the one before, by 40 % after five).

Processor time is that of all of a program's processes but the jobs' own: on a busy machine it says more
than the clock. "Without guards": the same hpcsched with what `_GUARDS` names switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import Report, Scratch, main, median, spread
from throughput import SLOTS

JOBS, QUICK_JOBS = 10_000, 80
ROUNDS, QUICK_ROUNDS = 5, 1
GOAL_RATIO, GOAL_GUARDS = 0.9, 0.02

_RUN = """
import atexit, json, resource, sys
def say():
    me, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    with open({use!r}, "w") as file:
        json.dump([me.ru_utime + me.ru_stime, children.ru_utime + children.ru_stime], file)
atexit.register(say)
{guards}
from hpcsched.cli.main import main
main()
"""

_GUARDS = """
from hpcsched import submission
from hpcsched.agent import admission, effects, requested_jobs
from hpcsched.launch import local, workers
submission.checked = lambda spec, *, where: spec
admission.jobfile.check_names = lambda *args, **named: None
admission.Admission._check_fits = admission.Admission._check_memory = lambda *args, **named: None
requested_jobs._check_environments = lambda *args: None
effects.remove_attempt_files = lambda *args, **named: None
workers.LocalWorkers.remove_attempt_files = lambda self: None
local.refuse_other_gpus = lambda *args: None
local.descriptor_identities = lambda descriptors: {}
local.let_read = lambda *args: None
"""
"""The guards of a dispatch: what is checked of a job that its job file has been checked for already, what is
looked for in folders that are new, and what a program recognises its descriptors by."""

_HYPERQUEUE = """
import json, os, resource, sys
os.environ["TQDM_DISABLE"] = "1"
from hyperqueue.cluster import LocalCluster, WorkerConfig
from hyperqueue.job import Job
count, slots, folder, use = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.chdir(folder)
with LocalCluster(folder + "/server", WorkerConfig(cores=slots)) as cluster:
    client, job = cluster.client(), Job()
    for _ in range(count):
        job.program(["true"])
    if not client.wait_for_jobs([client.submit(job)]):
        sys.exit("tasks have failed")
me, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
with open(use, "w") as file:
    json.dump([me.ru_utime + me.ru_stime, children.ru_utime + children.ru_stime], file)
"""


@dataclass
class Taken:
    """What each round of one program has taken, in seconds a job."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def measure(options: argparse.Namespace) -> Report:
    count = options.jobs or (QUICK_JOBS if options.quick else JOBS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    programs: dict[str, Callable[[Scratch, int], tuple[float, float | None]]] = {
        "hpcsched": lambda scratch, n: _hpcsched(scratch, n, guards=True),
        "without guards": lambda scratch, n: _hpcsched(scratch, n, guards=False),
    }
    absent = []
    if _imports(options.hyperqueue, "hyperqueue"):
        programs["HyperQueue"] = lambda scratch, n: _hyperqueue(scratch, n, options.hyperqueue)
    else:
        absent.append("HyperQueue")
    if shutil.which("tsp"):
        programs["task-spooler"] = _spooler
    else:
        absent.append("task-spooler")
    programs["xargs"] = _xargs
    taken = {name: Taken() for name in programs}
    with contextlib.ExitStack() as folders:
        programs["hpcsched"](folders.enter_context(Scratch.make()), QUICK_JOBS)  # leaves the byte code behind
        for number in range(rounds):
            order = list(programs) if number % 2 == 0 else list(programs)[::-1]
            for name in order:
                wall_s, cpu_s = programs[name](folders.enter_context(Scratch.make()), count)
                taken[name].wall_s.append(wall_s / count)
                if cpu_s is not None:
                    taken[name].cpu_s.append(cpu_s / count)
    return _report(taken, absent, count)


def _report(taken: dict[str, Taken], absent: list[str], count: int) -> Report:
    report = Report()
    ours = taken["hpcsched"]
    for name, one in taken.items():
        key = name.lower().replace(" ", "_").replace("-", "_")
        report.results[f"{key}_wall_s"] = one.wall_s
        if one.cpu_s:
            report.results[f"{key}_cpu_s"] = one.cpu_s
        cpu = f"; {median(one.cpu_s) * 1e3:.2f} ms of processor time each" if one.cpu_s else ""
        rate = spread([1 / wall_s for wall_s in one.wall_s], "{:.0f}")
        report.row(f"{count:,} no-op jobs at {SLOTS} slots, {name}", f"{rate} jobs/s{cpu}")
    for peer, least in (("HyperQueue", GOAL_RATIO), ("task-spooler", None), ("xargs", None)):
        if peer not in taken:
            continue
        pairs = zip(ours.wall_s, taken[peer].wall_s, strict=True)
        ratios = report.results[f"ratio_to_{peer.lower().replace('-', '_')}"] = [b / a for a, b in pairs]
        report.row(
            f"... hpcsched's rate over that of {peer}, pair by pair",
            spread(ratios, "{:.2f}"),
            goal="" if least is None else f"at least {least:g}",
            ok=None if least is None else median(ratios) >= least,
        )
    pairs = zip(ours.cpu_s, taken["without guards"].cpu_s, strict=True)
    ratios = report.results["guards_cpu_ratio"] = [with_ / without for with_, without in pairs]
    report.row(
        "... processor time that the guards take, pair by pair",
        spread([ratio - 1 for ratio in ratios], "{:+.1%}"),
        goal=f"at most {GOAL_GUARDS:.0%}",
        ok=median(ratios) <= 1 + GOAL_GUARDS,
    )
    for peer in absent:
        report.row(f"... {peer}", "not measured: it is not here")
    return report


def _hpcsched(scratch: Scratch, count: int, *, guards: bool) -> tuple[float, float]:
    file, use = scratch.folder / "jobs.toml", scratch.folder / "use"
    jobs = (f'[[job]]\nname = "n{i}"\ngpus = 1\ncommand = ["true"]\n' for i in range(count))
    file.write_text("schema = 1\n" + "".join(jobs))
    text = _RUN.format(use=str(use), guards="" if guards else _GUARDS)
    options = ["--dir", scratch.folder / "run", "--devices", f"cpu:{SLOTS}", "--quiet", "--json"]
    command = [sys.executable, "-c", text, "run", str(file), *map(str, options)]
    start = time.perf_counter()
    page = scratch.json(command, deadline_s=120 + count / 10)
    wall_s = time.perf_counter() - start
    if any(job["state"] != "COMPLETED" for job in page["jobs"]) or len(page["jobs"]) != count:
        raise RuntimeError("not all jobs have completed")
    return wall_s, json.loads(use.read_text())[0]


def _hyperqueue(scratch: Scratch, count: int, python: str) -> tuple[float, float]:
    folder, use = scratch.folder / "hq", scratch.folder / "use"
    folder.mkdir()
    command = [python, "-c", _HYPERQUEUE, str(count), str(SLOTS), str(folder), str(use)]
    start = time.perf_counter()
    scratch.run(command, deadline_s=120 + count / 10)
    wall_s = time.perf_counter() - start
    return wall_s, json.loads(use.read_text())[0]


def _spooler(scratch: Scratch, count: int) -> tuple[float, None]:
    """A daemon of our own, which all of them go through; its processor time is not known."""
    scratch.env |= {"TS_SOCKET": str(scratch.folder / "tsp"), "TMPDIR": str(scratch.folder)}
    enqueue = f"tsp -S {SLOTS}; for i in $(seq {count}); do tsp -n true >/dev/null; done; tsp -w"
    count_done = "tsp -l | grep -c finished"
    start = time.perf_counter()
    scratch.run(["sh", "-c", f"export TS_MAXFINISHED={count}; {enqueue}"], deadline_s=120 + count / 10)
    end = time.monotonic() + 60
    while int(scratch.run(["sh", "-c", count_done], deadline_s=30)) < count:
        if time.monotonic() > end:
            raise RuntimeError("task-spooler has not run all jobs")
        time.sleep(0.02)
    wall_s = time.perf_counter() - start
    scratch.run(["tsp", "-K"], deadline_s=30)
    return wall_s, None


def _xargs(scratch: Scratch, count: int) -> tuple[float, None]:
    program = shutil.which("true") or "/bin/true"
    start = time.perf_counter()
    subprocess.run(
        ["xargs", f"-P{SLOTS}", "-n1", program],
        input=b"x\n" * count,
        check=True,
        timeout=60 + count / 20,
        env=scratch.env,
    )
    return time.perf_counter() - start, None


def _imports(python: str, package: str) -> bool:
    ask = [python, "-c", f"import {package}"]
    return subprocess.run(ask, capture_output=True, check=False).returncode == 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hyperqueue", default=sys.executable, metavar="PYTHON", help="has `hyperqueue`")
    parser.add_argument("--jobs", type=int, metavar="N", help=f"jobs in a round ({JOBS})")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, each of all programs ({ROUNDS})")


if __name__ == "__main__":
    main("no-op jobs, side by side with other programs", measure, options_of=_options)
