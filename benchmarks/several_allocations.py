"""One run over allocations that overlap, whose head moves: a queue to its end, and heads that are killed.

    python benchmarks/several_allocations.py [--json] [--quick] [--queue] [--kills] [--scale X] [--seed N]

All hosts are names on this machine, their devices CPU slots, and jobs sleep instead of training: each writes
down every step, with its time, and saves every few steps. Agents, node agents, signals, files and the
connections between them are real.

--queue: 40 jobs on three allocations of 200 s, which begin after 0, 60 and 150 s. The first is `hpcsched run
--joinable` (its end is that of a stand-in for Slurm's `squeue`), the others `hpcsched join --time`. What
still lives in an allocation when its time is up is killed, as a batch system does it. Against `hpcsched
simulate` with the same jobs and allocations.

--kills: twenty runs over two or three allocations. At a random moment (drawn by its number and --seed) every
process in the head's allocation is killed.

Neither of the two named: both, about 20 minutes. --scale: allocations of the queue shorter by this
factor, and less work; with less than 0.6 none outlasts another by as much as a head needs to move there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
from common import Report, Scratch, hpcsched, main, median, percentile, wait_for

from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.policy import make_policy
from hpcsched.store import journal

STARTS_S, LASTS_S = (0.0, 60.0, 150.0), 200.0
HOSTS, SLOTS = 2, 2
"""Hosts of each allocation of the queue, and CPU slots of each host."""
JOBS, GPU_SECONDS, STEP_S = 40, 1500.0, 0.2
"""The queue; so much work takes about 270 s there, of the 290 s in which jobs may run."""
MARGIN_S = 60.0
"""What a run keeps before the end of an allocation, by default, and all simulated runs do."""
GOAL = 0.05
KILLS, QUICK_KILLS = 20, 2
KILL_STEP_S, SAVED_EVERY = 0.1, 20
GAP_GOAL_S = 2.0
SIDE_BY_SIDE = 5
"""Runs whose heads are killed that go on at the same time: their programs sleep."""
ENDS_WITHIN_S = 300.0
"""A run whose head was killed is given up so long after that."""
DEAD_AFTER_S = 2.0
"""Time from the look at the clock until all processes are killed, at most."""
QUICK_SCALE = 0.6

PROGRAM = """\
import json, os, signal, sys, time
args = json.loads(os.environ["HPCSCHED_ARGS"])
folder, attempt = os.environ["HPCSCHED_JOB_DIR"], os.environ["HPCSCHED_ATTEMPT"]
agent, steps = os.environ["HPCSCHED_NOTIFY_PID"], int(os.environ["HPCSCHED_STEPS"])
asked = []
for number in (signal.SIGTSTP, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.append(1))
step, state = 0, os.path.join(folder, "STATE.json")
if os.environ["HPCSCHED_RESUME"] == "1":
    step = json.load(open(state))["step"]
log = os.open(os.path.join(folder, "done.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def note(what):
    os.write(log, f"{what} {attempt} {step} {time.time():.4f} {agent} {os.getpid()}\\n".encode())
def save():
    with open(f"{state}.{attempt}", "w") as file:
        json.dump({"step": step, "attempt": int(attempt)}, file)
    os.replace(f"{state}.{attempt}", state)
    note("saved")
progress = int(os.environ["HPCSCHED_PROGRESS_FD"])
os.set_blocking(progress, False)
note("began")
open(os.path.join(folder, "ready." + attempt), "w").close()
due = time.monotonic()
while step < steps:
    due = max(due + args["step_s"], time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
    step += 1
    note("step")
    try:
        os.write(progress, (json.dumps({"step": step, "t": time.time()}) + "\\n").encode())
    except OSError:
        pass
    if asked:
        save()
        sys.exit(75)
    if step % args["saved_every"] == 0:
        save()
save()
"""
"""A step every `step_s`, written down; saves every few steps, and when it is asked to leave."""

SQUEUE = '#!/bin/sh\necho "77|RUNNING|{end}"\n'
SCONTROL = '#!/bin/sh\necho "JobId=77 JobName=x JobState=RUNNING Reason=None Restarts=0"\n'


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    if options.queue or not options.kills:
        with Scratch.make() as scratch:
            queue(report, Site(scratch), scale, options.seed)
    if options.kills or not options.queue:
        kills(report, options.count or (QUICK_KILLS if options.quick else KILLS), options.seed)
    return report


# --- allocations ------------------------------------------------------------------------------------


@dataclass
class Allocation:
    """`hpcsched run` or `hpcsched join`, and what they have started."""

    name: str
    child: subprocess.Popen[bytes]
    told: Path
    end: float = float("inf")
    """Unix time."""
    late: int = 0
    """Processes that were left at its end, and killed."""
    known: set[psutil.Process] = field(default_factory=set)

    def look(self) -> set[psutil.Process]:
        """Its processes that live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.child.pid)
            self.known |= {root, *root.children(recursive=True)}
        for process in list(self.known):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.known |= set(process.children(recursive=True))
        # What has lost its parent is told by a variable.
        mark = f"ALLOCATION_OF_BENCH={self.name}"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    self.known.add(process)
        self.known = {p for p in self.known if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
        return self.known

    def kill(self) -> int:
        """Kill all that lives here, at once; how many processes that were."""
        there = self.look()
        # The agent first: it is not to see its node agent die before it.
        for process in sorted(there, key=lambda process: process.pid != self.child.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(there)

    def over(self) -> bool:
        """Whether its command has ended; its time being up ends it."""
        if time.time() >= self.end and self.child.poll() is None:
            self.late = self.kill()
            self.child.wait(10)
        return self.child.poll() is not None


class Site:
    """A run's folder, its program, and a stand-in for Slurm."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch, self.folder, self.run = scratch, scratch.folder, scratch.folder / "run"
        # Unlike names of other runs of this program: processes are found by them.
        self.mark = f"{os.getpid()}.{scratch.folder.name}"
        self.allocations: list[Allocation] = []
        scratch.env = {k: v for k, v in scratch.env.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        scratch.env["XDG_STATE_HOME"] = str(self.folder / "state")
        (self.folder / "work.py").write_text(PROGRAM)

    def slurm(self, lasts_s: float, hosts: Sequence[str]) -> dict[str, str]:
        """The variables of a batch job on these hosts that ends in so many seconds."""
        folder = self.folder / "slurm"
        folder.mkdir()
        end = datetime.fromtimestamp(time.time() + lasts_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        for name, text in (("squeue", SQUEUE.format(end=end)), ("scontrol", SCONTROL)):
            path = folder / name
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": ",".join(hosts),
            "SLURMD_NODENAME": hosts[0],
            "SLURM_JOB_CPUS_PER_NODE": f"2(x{len(hosts)})",
            "HPCSCHED_PYSLURM": "off",
        }

    def jobs(self, lengths: Sequence[int], step_s: float, saved_every: int) -> Path:
        """A job file: so many steps each, a device each."""
        tables = ["schema = 1"]
        tables += [
            f'[[job]]\nname = "job{i}"\nmodel = "sleeps"\nsteps = {steps}\ngpus = 1\nprocesses = "one"\n'
            f'command = ["{sys.executable}", "-I", "-S", "{self.folder}/work.py"]\n'
            f"args = {{ step_s = {step_s}, saved_every = {saved_every} }}"
            for i, steps in enumerate(lengths, 1)
        ]
        path = self.folder / "jobs.toml"
        path.write_text("\n\n".join(tables) + "\n")
        costs = {"start_s": 0.2, "resume_s": 0.2, "suspend_s": 0.2}
        profile = {"model": "sleeps", "device": "any", "throughput": {"1": 1 / step_s}, **costs}
        self.profiles.write_text(json.dumps({"schema": 1, "profiles": [profile]}))
        return path

    @property
    def profiles(self) -> Path:
        return self.folder / "profiles.json"

    def start(self, *words: object, env: dict[str, str] | None = None, lasts_s: float = 0.0) -> Allocation:
        """One more allocation, with the command that is first in it."""
        name = f"{self.mark}.{len(self.allocations)}"
        told = self.folder / f"allocation-{len(self.allocations)}.log"
        with told.open("wb") as out:
            child = subprocess.Popen(
                hpcsched(*words),
                cwd=self.folder,
                env=self.scratch.env | (env or {}) | {"ALLOCATION_OF_BENCH": name},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        end = time.time() + lasts_s if lasts_s else float("inf")
        self.allocations.append(Allocation(name, child, told, end))
        return self.allocations[-1]

    def join(self, hosts: Sequence[str], devices: str, *words: object, lasts_s: float = 0.0) -> Allocation:
        """One more allocation whose hosts join the run."""
        where = ("--batch", "none", "--hosts", ",".join(hosts), "--launcher", "local", "--devices", devices)
        limit = ("--time", f"{lasts_s:g}s") if lasts_s else ()
        return self.start("join", "--dir", self.run, *where, *limit, *words, lasts_s=lasts_s)

    def going_on(self) -> int:
        """How many allocations go on; ends those whose time is up."""
        return sum(not allocation.over() for allocation in self.allocations)

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Kill what is left at the end of the block."""
        try:
            yield
        finally:
            for allocation in self.allocations:
                allocation.kill()
                allocation.child.wait(10)

    def keep(self, name: str) -> None:
        """Put the run's folder where it outlasts us, if that is wanted."""
        if place := os.environ.get("HPCSCHED_BENCH_KEEP"):
            shutil.copytree(self.folder, Path(place, name), dirs_exist_ok=True)


# --- what programs have written down ------------------------------------------------------------------


class Entry(NamedTuple):
    """A line of a program: it "began", did a "step" or "saved" one."""

    what: str
    attempt: int
    step: int
    at: float
    agent: int
    pid: int


def entries(run: Path, job_id: int) -> list[Entry]:
    log, found = run / "jobs" / str(job_id) / "done.log", list[Entry]()
    for line in log.read_text().splitlines() if log.exists() else ():
        what, attempt, step, at, agent, pid = line.split()
        found.append(Entry(what, int(attempt), int(step), float(at), int(agent), int(pid)))
    return found


def steps_of(noted: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in noted if entry.what == "step"]


def replayed(run: Path) -> Machine:
    machine = Machine(make_policy)
    for event, _ in journal.read(run / "journal.jsonl"):
        machine.handle(event)
    return machine


def states(run: Path) -> list[str]:
    try:
        return [job["state"] for job in json.loads((run / "status.json").read_bytes())["jobs"]]
    except (FileNotFoundError, json.JSONDecodeError):
        return []


# --- a queue ------------------------------------------------------------------------------------------


def queue(report: Report, site: Site, scale: float, seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.uniform(1, 8) for _ in range(JOBS)]
    lasts_s = LASTS_S * scale
    work = GPU_SECONDS * (lasts_s - MARGIN_S) / (LASTS_S - MARGIN_S)
    lengths = [max(5, round(work * w / sum(weights) / STEP_S)) for w in weights]
    jobs = site.jobs(lengths, STEP_S, saved_every=25)
    simulated = _simulated(site, jobs, scale)
    began = time.time()
    with site.ended():
        _allocate(site, jobs, scale)
        wait_for(lambda: not site.going_on(), "all over", deadline_s=3 * lasts_s)
    machine = replayed(site.run)
    noted = {job_id: entries(site.run, job_id) for job_id in range(1, JOBS + 1)}
    done = {job_id: Counter(e.step for e in steps_of(all_of)) for job_id, all_of in noted.items()}
    repeated = sum(n - 1 for counts in done.values() for n in counts.values())
    missing = sum(n - len(done[i]) for i, n in enumerate(lengths, 1))
    complete = sum(job.state is JobState.COMPLETED for job in machine.run.jobs.values())
    by_journal = sum(job.steps_repeated or 0 for job in machine.run.jobs.values())
    makespan = max(e.at for all_of in noted.values() for e in all_of) - began
    off = makespan / simulated - 1
    heads = len(machine.run.lives)
    late = sum(a.late for a in site.allocations)
    report.results |= {
        "queue_scale": [scale],
        "queue_lengths": [float(n) for n in lengths],
        "queue_makespan_s": [makespan],
        "queue_simulated_s": [simulated],
        "queue_steps_repeated": [float(repeated)],
        "queue_steps_missing": [float(missing)],
        "queue_completed": [float(complete)],
        "queue_heads": [float(heads)],
        "queue_killed_at_ends": [float(a.late) for a in site.allocations],
        "queue_exit_codes": [float(a.child.returncode) for a in site.allocations],
    }
    report.row(
        f"{JOBS} jobs over three allocations of {lasts_s:.0f} s: makespan",
        f"{makespan:.1f} s, simulated {simulated:.1f} s ({off:+.1%}); {complete} of {JOBS} completed",
        goal="simulated makespan within 5 %",
        ok=abs(off) <= GOAL and complete == JOBS,
    )
    report.row(
        f"... of {sum(lengths)} steps, by the programs' own records",
        f"{missing} missing, {repeated} done more than once (by the journal {by_journal})",
        goal="0, 0",
        ok=not missing and not repeated,
    )
    report.row(
        "... heads, one after the other; processes that an allocation's end found",
        f"{heads}; {late}",
        goal="more than 1; 0",
        ok=heads > 1 and not late,
    )
    site.keep("queue")


def _simulated(site: Site, jobs: Path, scale: float) -> float:
    lasts = LASTS_S * scale
    blocks = [word for s in STARTS_S for word in ("--allocation", f"{HOSTS}x{SLOTS}@{s * scale:g}+{lasts:g}")]
    words = ("simulate", jobs, *blocks, "--profiles", site.profiles, "--json")
    page = site.scratch.json(hpcsched(*words), deadline_s=60)
    if unfinished := [job["name"] for job in page["jobs"] if job["state"] != "COMPLETED"]:
        raise RuntimeError(f"simulated, jobs {unfinished} do not end in these allocations")
    return float(page["makespan_s"])


def _allocate(site: Site, jobs: Path, scale: float) -> None:
    """Start the three allocations, each at its time."""
    began, lasts_s, devices = time.time(), LASTS_S * scale, f"cpu:{SLOTS}"
    for number, start_s in enumerate(STARTS_S):
        hosts = [f"{'abc'[number]}{i}" for i in range(1, HOSTS + 1)]
        while time.time() < began + start_s * scale:
            site.going_on()
            time.sleep(0.1)
        if number:
            site.join(hosts, devices, lasts_s=lasts_s)
            continue
        own = ("--devices", devices, "--launcher", "local", "--joinable")
        words = ("run", jobs, "--dir", site.run, "--profiles", site.profiles, *own)
        site.start(*words, env=site.slurm(lasts_s, hosts), lasts_s=lasts_s)


# --- heads that are killed ------------------------------------------------------------------------------


@dataclass
class Killed:
    """What became of one run whose head was killed."""

    number: int
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Of each job on a host that lived: the longest time between two steps, from the kill on."""
    follows_s: float | None = None
    """Time to the first event of the next head."""
    again_s: list[float] = field(default_factory=list)
    """Of each job on a host that died: time to its next step."""
    lost_steps: int = 0


def kills(report: Report, count: int, seed: int) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = list(pool.map(lambda number: _in_a_folder(number, seed), range(1, count + 1)))
    report.results["kills_wall_s"] = [time.monotonic() - began]
    for case in found:
        for complaint in case.wrong:
            print(f"kill {case.number}: {complaint}", file=sys.stderr)
    good = sum(not case.wrong for case in found)
    gaps = [gap for case in found for gap in case.gaps_s]
    follows = [case.follows_s for case in found if case.follows_s is not None]
    again = [seconds for case in found for seconds in case.again_s]
    report.results |= {
        "kills_gaps_s": gaps,
        "kills_follows_s": follows,
        "kills_again_s": again,
        "kills_steps_lost": [float(case.lost_steps) for case in found],
        "kills_good": [float(not case.wrong) for case in found],
    }
    report.row(
        f"{count} heads killed with all of their allocation: all jobs end, only what no checkpoint had is "
        "trained again, and on hosts that live nothing",
        f"{good} of {count}; {sum(case.lost_steps for case in found)} steps trained again",
        goal=f"{count} of {count}",
        ok=good == count,
    )
    if gaps:
        report.row(
            f"... longest time between two steps of a job on another host (a step: {KILL_STEP_S:g} s)",
            f"median {median(gaps):.2f} s, p95 {percentile(gaps, 0.95):.2f} s, max {max(gaps):.2f} s "
            f"({len(gaps)} jobs)",
            goal=f"at most {GAP_GOAL_S:g} s",
            ok=max(gaps) <= GAP_GOAL_S,
        )
    if follows:
        report.row(
            "... the next head leads after", f"median {median(follows):.1f} s, max {max(follows):.1f} s"
        )
    if again:
        what = "... jobs of the hosts that died train again after"
        report.row(what, f"median {median(again):.1f} s, max {max(again):.1f} s")


def _in_a_folder(number: int, seed: int) -> Killed:
    with Scratch.make() as scratch:
        site = Site(scratch)
        try:
            return one_kill(site, number, random.Random(f"{seed}/{number}"))
        finally:
            site.keep(f"kill{number:02}")


def one_kill(site: Site, number: int, draw: random.Random) -> Killed:
    """One run over two or three allocations of one host with two slots, and its head's end."""
    case, guests = Killed(number), draw.choice((1, 2))
    lengths = [draw.randint(150, 350) for _ in range(3 * (guests + 1))]
    jobs = site.jobs(lengths, KILL_STEP_S, SAVED_EVERY)
    own = ("--batch", "none", "--hosts", "h0", "--launcher", "local", "--devices", "cpu:2", "--joinable")
    words = ("run", jobs, "--dir", site.run, "--profiles", site.profiles, *own)
    with site.ended():
        head = site.start(*words)
        wait_for(lambda: states(site.run).count("RUNNING") >= 2, "first jobs", deadline_s=60)
        for i in range(guests):
            site.join([f"g{i}"], "cpu:2")
        running = 2 * (guests + 1)
        wait_for(lambda: states(site.run).count("RUNNING") >= running, "all hosts", deadline_s=60)
        time.sleep(draw.uniform(0.0, 12.0))
        killed, theirs = time.time(), {process.pid for process in head.look()}
        head.kill()
        wait_for(lambda: head.child.poll() is not None, "the head is dead", deadline_s=10)
        try:
            wait_for(lambda: not site.going_on(), "all over", deadline_s=ENDS_WITHIN_S)
        except RuntimeError:
            counts = dict(Counter(states(site.run)))
            case.wrong.append(f"not over {ENDS_WITHIN_S:g} s after the kill: {counts}")
    codes = [allocation.child.returncode for allocation in site.allocations[1:]]
    if any(codes):
        case.wrong.append(f"exit codes of the guests: {codes}")
    _judge(case, site, lengths, killed, theirs)
    return case


def _judge(case: Killed, site: Site, lengths: Sequence[int], killed: float, theirs: set[int]) -> None:
    machine = replayed(site.run)
    lives = [life.wall for life in machine.run.lives if life.wall > killed]
    case.follows_s = lives[0] - killed if lives else None
    for job_id, total in enumerate(lengths, 1):
        noted = entries(site.run, job_id)
        steps = steps_of(noted)
        state = machine.run.jobs[job_id].state
        if state is not JobState.COMPLETED:
            case.wrong.append(f"job {job_id} is {state}")
        elif missing := sorted(set(range(1, total + 1)) - {e.step for e in steps}):
            case.wrong.append(f"job {job_id}: steps {missing[:5]} were never trained")
        before = [e for e in steps if e.at <= killed]
        after = [e for e in steps if e.at > killed]
        died = bool(before) and before[-1].agent in theirs
        newest = max((e.at for e in noted if e.at <= killed and e.what == "saved"), default=0.0)
        saved = next((e.step for e in noted if e.at == newest and e.what == "saved"), 0)
        if died and before[-1].step < total:
            # A step or two more may be done between the look at the clock and the kill.
            after = [e for e in after if e.agent not in theirs]
            if after:
                case.again_s.append(after[0].at - killed)
                case.lost_steps += max(0, before[-1].step - after[0].step + 1)
                if after[0].step <= saved:
                    case.wrong.append(f"job {job_id} goes on at {after[0].step}, had saved {saved}")
        elif before and after:
            times = [before[-1].at, *(e.at for e in after)]
            case.gaps_s.append(max(b - a for a, b in pairwise(times)))
        if any(e.at > killed + DEAD_AFTER_S and e.agent in theirs for e in noted):
            case.wrong.append(f"job {job_id} was not killed with its host: the benchmark is wrong")
        lived = Counter(e.step for e in steps if e.agent not in theirs)
        if twice := [step for step, n in lived.items() if n > 1]:
            case.wrong.append(f"job {job_id}: steps {twice[:5]} ({len(twice)}) trained twice on living hosts")


def own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, metavar="X", help="length of the queue's allocations (1)")
    parser.add_argument("--count", type=int, metavar="N", help=f"so many kills ({KILLS})")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws lengths and moments (1)")


if __name__ == "__main__":
    main("one run over several allocations", measure, "--queue", "--kills", options_of=own_options)
