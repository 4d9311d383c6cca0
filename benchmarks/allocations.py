"""How well runs end with their allocation, and come back: on a real Slurm that `tests/slurm/up` starts.

    python benchmarks/allocations.py [--json] [--quick] [--ends] [--requeues]

--ends: twenty allocations of one minute, each with a set of its own, drawn by its number: jobs that run,
start, save slowly, are about to be promoted, wait, are held or suspended by the user, know nothing of
hpcsched, or ignore every signal. Four allocations go on side by side. Each program writes down every step it
has done, and that is compared with what was saved.

--requeues: a set whose work takes three allocations of two minutes is submitted once, and comes back by
requeue with the delay that Slurm itself puts in.

Neither of the two named: both, about 13 minutes. Takes Slurm's programs, see tests/slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common import ROOT, Report, Scratch, hpcsched, main, median, percentile

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.policy import make_policy
from hpcsched.store import journal

ALLOCATIONS, QUICK_ALLOCATIONS = 20, 1
END_RESERVE_S = 12.0
"""--margin of the short allocations: the default is as long as they are."""
REQUEUE_RESERVE_S = 15.0
SLACK_S = 10.0
"""Goal: at most so much more than the planned margin is left unused."""
LIVES, LIFE_S, SLOTS = 3, 120.0, 2
PERIOD_S = 1.0
NEAR_THE_END = 1000.0
GOING_ON = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"})

PROGRAM = """\
import json, os, signal, sys, time
args = json.loads(os.environ["HPCSCHED_ARGS"])
folder, attempt = os.environ["HPCSCHED_JOB_DIR"], os.environ["HPCSCHED_ATTEMPT"]
steps, devices = int(os.environ["HPCSCHED_STEPS"]), os.environ["HPCSCHED_DEVICES"].count(",") + 1
kind, asked = args["kind"], []
if kind == "stubborn":
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif kind != "plain":
    signal.signal(signal.SIGTSTP, lambda *_: asked.append(1))
time.sleep(args.get("start_s", 0.2))  # SIGTERM ends what has not begun
step, state = 0, os.path.join(folder, "STATE.json")
if kind != "plain":
    if os.environ["HPCSCHED_RESUME"] == "1":
        step = json.load(open(state))["step"]
    if kind != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    open(os.path.join(folder, "ready." + attempt), "w").close()
def save():
    time.sleep(args.get("save_s", 0.3))
    with open(state + ".tmp", "w") as file:
        json.dump({"step": step, "attempt": int(attempt)}, file)
        file.flush(); os.fsync(file.fileno())
    os.replace(state + ".tmp", state)
log, progress = open(os.path.join(folder, "done.log"), "a"), int(os.environ["HPCSCHED_PROGRESS_FD"])
while step < steps:
    time.sleep(args["step_s"] / devices ** 0.8)
    step += 1
    print(attempt, step, file=log, flush=True)
    if kind != "plain":
        try:
            os.write(progress, (json.dumps({"step": step, "t": time.time()}) + "\\n").encode())
        except OSError:
            pass
        if asked:
            save()
            sys.exit(75)
save()
"""
"""Does a step every `step_s`, writes each down, and saves when asked; `kind` says what it does not do."""

# By model: what the profile tells of saving, and what it takes in truth. `unknown` has no profile.
MODELS = {"quick": (0.3, 0.3), "slow": (4.0, 4.0), "unknown": (None, 2.5)}
KINDS = (
    "runs",
    "runs",
    "slow",
    "slow",
    "unknown",
    "starts",
    "starts",
    "plain",
    "stubborn",
    "short",
    "arrives",
)


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    both = not (options.ends or options.requeues)
    with Scratch.make() as scratch, slurm(scratch) as cluster:
        if options.ends or both:
            ends(report, cluster, QUICK_ALLOCATIONS if options.quick else ALLOCATIONS)
        if (options.requeues or both) and not options.quick:
            requeues(report, cluster)
    return report


# --- Slurm ------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A Slurm of our own, and a folder with the program and the profiles."""

    scratch: Scratch
    env: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.scratch.folder

    def ask(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, rundir: Path, jobs: Path, *options: str, run: Sequence[object]) -> str:
        script = rundir.with_suffix(".sh")
        words = " ".join(map(str, hpcsched("run", jobs, "--dir", rundir, *run)))
        script.write_text(f"#!/bin/bash\nexec {words}\n")
        output = f"--output={rundir}.out"
        common = ("--parsable", "--open-mode=append", "--partition=short", output)
        return self.ask("sbatch", *common, *options, str(script)).strip()

    def states(self) -> dict[str, str]:
        """Slurm's word on each job it still knows."""
        rows = self.ask("squeue", "--noheader", "--states=all", "--format=%A %T").splitlines()
        return dict(row.split() for row in rows)  # type: ignore[misc]

    def facts(self, job: str) -> dict[str, str]:
        shown = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S+)", shown))


@contextmanager
def slurm(scratch: Scratch) -> Iterator[Cluster]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if shutil.which("slurmctld", path=path) is None:
        raise RuntimeError("no Slurm here: install slurmctld, slurmd, slurm-client and munge")
    folder = scratch.folder / "slurm"
    theirs = re.compile(r"SLURM_(?!TEST_)|SBATCH_|SRUN_")
    inherited = {k: v for k, v in scratch.env.items() if not theirs.match(k)}
    env = {**inherited, "PATH": f"{Path(sys.executable).parent}:{path}"}
    env |= {"XDG_STATE_HOME": str(scratch.folder / "state"), "HPCSCHED_TEST_SLURM_DIR": str(folder)}
    tools = ROOT / "tests" / "slurm"
    try:
        up = subprocess.run(
            (sys.executable, str(tools / "up")), env=env, capture_output=True, text=True, timeout=120
        )
        if up.returncode:
            raise RuntimeError(f"Slurm does not start here: {up.stderr.strip()}")
        env["SLURM_CONF"] = f"{up.stdout.strip()}/slurm.conf"
        (scratch.folder / "work.py").write_text(PROGRAM)
        (scratch.folder / "profiles.json").write_text(json.dumps({"schema": 1, "profiles": profiles()}))
        yield Cluster(scratch, env)
    finally:
        subprocess.run((sys.executable, str(tools / "down"), str(folder)), env=env, capture_output=True)


def profiles() -> list[dict[str, Any]]:
    throughput = {str(n): round(2 * n**0.8, 3) for n in (1, 2, 3, 4)}
    costs = {"start_s": 0.5, "resume_s": 0.5}
    return [
        {"model": name, "device": "any", "throughput": throughput, "suspend_s": known, **costs}
        for name, (known, _) in MODELS.items()
        if known is not None
    ]


# --- what a journal tells ---------------------------------------------------------------------------


@dataclass
class Ended:
    """One life of a run: seconds of its clock, which is real time here."""

    began_wall: float
    deadline: float
    drained: float = 0.0
    margin: float = 0.0
    cause: str = ""
    left: float = 0.0
    states: list[str] = field(default_factory=list)
    active: int = 0

    @property
    def unused(self) -> float:
        return self.deadline - self.left


def lives(path: Path) -> tuple[list[Ended], Machine]:
    """Every life on record, and the state they led to."""
    machine, found = Machine(make_policy), list[Ended]()
    for event, _ in journal.read(path):
        states, active = [state_of(job) for job in machine.run.jobs.values()], len(machine.run.active)
        before, draining = len(machine.run.lives), machine.deadline.draining
        margin = machine.deadline.margin_s() if machine.run.lives else 0.0
        machine.handle(event)
        if len(machine.run.lives) > before:
            found.append(Ended(began_wall=machine.run.lives[-1].wall, deadline=machine.deadline.at or 0.0))
            draining = False
        last = found[-1]
        last.left, last.deadline = event.at, machine.deadline.at or 0.0
        if machine.deadline.draining and not draining:
            last.drained, last.margin, last.cause = event.at, margin, machine.deadline.cause
            last.states, last.active = states, active
    return found, machine


def state_of(job: Job) -> str:
    """As `status` has it, but a job whose program cannot be suspended yet (or ever) is told apart."""
    if job.state is JobState.RUNNING and not job.ready:
        return "not ready"
    return "being promoted" if job.target else str(job.state.lower())


def done_steps(folder: Path) -> list[int]:
    """The steps a program has written down, in order."""
    log = folder / "done.log"
    return [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []


def saved_step(folder: Path) -> int:
    state = folder / "STATE.json"
    return int(json.loads(state.read_text())["step"]) if state.exists() else 0


# --- twenty ends ------------------------------------------------------------------------------------


@dataclass
class Case:
    """One allocation of the twenty."""

    number: int
    rundir: Path
    kinds: dict[str, str]
    acts: list[tuple[float, str, str]]
    hurry_s: float = 0.0
    """So long before saving should begin the act that is due NEAR_THE_END is done."""
    job: str = ""
    started: float | None = None
    facts: dict[str, str] = field(default_factory=dict)


def a_set(cluster: Cluster, number: int) -> Case:
    """A set drawn by the number: one job that outlasts the allocation, and others of any kind."""
    draw = random.Random(number)
    kinds = ["runs", *(draw.choice(KINDS) for _ in range(draw.randint(1, 6)))]
    tables, named = ["schema = 1"], dict[str, str]()
    for index, kind in enumerate(kinds):
        name = f"{kind}{index}"
        named[name] = kind
        model = {"slow": "slow", "unknown": "unknown"}.get(kind, "quick")
        args: dict[str, Any] = {"kind": kind, "step_s": 0.5, "save_s": MODELS[model][1]}
        if kind == "starts":
            args["start_s"] = draw.uniform(5, 60)
        steps = draw.randint(10, 95) if kind == "short" else 5000
        lines = [
            "[[job]]",
            f'name = "{name}"',
            f'model = "{model}"',
            f"steps = {steps}",
            f'command = ["{sys.executable}", "-S", "{cluster.folder}/work.py"]',
            'processes = "one"',
            f"args = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in args.items())} }}",
        ]
        if not index or kind in ("plain", "stubborn", "short") or draw.random() < 0.5:
            lines.append("gpus = 1")
        if kind == "arrives":
            lines.append(f"submit_at = {draw.uniform(5, 30):.1f}")
        tables.append("\n".join(lines))
    rundir = cluster.folder / f"end{number:02}"
    rundir.with_suffix(".toml").write_text("\n\n".join(tables) + "\n")
    acts = []
    if draw.random() < 0.4:
        acts.append((draw.uniform(3, 15), "warn", ""))
    if draw.random() < 0.6:
        what = draw.choice(("suspend", "suspend", "hold"))
        acts.append((draw.uniform(3, 45), what, draw.choice(list(named))))
    slow = [name for name, kind in named.items() if kind in ("slow", "unknown")]
    if slow:
        acts.append((NEAR_THE_END, "suspend", draw.choice(slow)))
    return Case(number, rundir, named, sorted(acts), hurry_s=draw.uniform(0.5, 3))


def ends(report: Report, cluster: Cluster, count: int) -> None:
    cases = [a_set(cluster, number) for number in range(1, count + 1)]
    began = time.monotonic()
    for case in cases:
        run = ("--devices", "cpu:4", "--profiles", cluster.folder / "profiles.json")
        run += ("--policy-option", "promote=always", "--margin", END_RESERVE_S)
        case.job = cluster.submit(
            case.rundir, case.rundir.with_suffix(".toml"), "--time=1", "--gres=gpu:3", "-c6", run=run
        )
    deadline = began + 90 + 75.0 * (len(cases) / 4 + 1)
    while waiting := [case for case in cases if not case.facts]:
        states = cluster.states()
        for case in waiting:
            if states.get(case.job) in GOING_ON:
                act(cluster, case)
            else:  # at once: Slurm forgets an ended job after some minutes
                case.facts = cluster.facts(case.job)
        if time.monotonic() > deadline:
            raise RuntimeError(f"batch jobs {[case.job for case in waiting]} have not ended")
        time.sleep(0.25)
    took = time.monotonic() - began
    verdicts = [judge(case, report.results) for case in cases]
    good = sum(not verdict for verdict in verdicts)
    for case, verdict in zip(cases, verdicts, strict=True):
        for complaint in verdict:
            print(f"allocation {case.number}: {complaint}", file=sys.stderr)
        if verdict:
            print(tail(case), file=sys.stderr)
            keep(case)
    results = report.results
    report.row(
        f"{len(cases)} allocations of 1 minute with random jobs: all saved before the end",
        f"{good} of {len(cases)}, {sum(results['ends_jobs_saved']):.0f} jobs saved, "
        f"{sum(results['ends_steps_lost']):.0f} steps lost",
        goal=f"{len(cases)} of {len(cases)}",
        ok=good == len(cases),
    )
    unused, margins = results["ends_unused_s"], results["ends_margin_s"]
    beyond = [u - m for u, m in zip(unused, margins, strict=True)]
    report.row(
        "... time left unused, beyond the margin that was planned",
        f"at most {max(beyond):.1f} s (unused: median {median(unused):.1f} s, least {min(unused):.1f} s, "
        f"most {max(unused):.1f} s; margin: {min(margins):.1f} to {max(margins):.1f} s)",
        goal=f"at most {SLACK_S:g} s",
        ok=max(beyond) <= SLACK_S,
    )
    seen = Counter[str]()
    for name, numbers in results.items():
        if name.startswith("ends_at_drain_"):
            seen[name.removeprefix("ends_at_drain_").replace("_", " ")] += round(sum(numbers))
    report.row(
        "... states of the jobs when saving began",
        ", ".join(f"{number} {state}" for state, number in seen.most_common()),
    )
    late = results["ends_saving_late_s"]
    report.row(
        "... saving begins after the planned moment by",
        f"median {median(late):.2f} s, p95 {percentile(late, 0.95):.2f} s, max {max(late):.2f} s",
    )
    report.row("... all allocations, four side by side, took", f"{took:.0f} s")
    results["ends_wall_s"] = [took]


def act(cluster: Cluster, case: Case) -> None:
    """What a user or the batch system does meanwhile: a warning far too early, a suspended or held job."""
    if not case.acts or not (case.rundir / "status.json").exists():
        return
    case.started = case.started or time.monotonic()
    due = case.acts[0][0]
    if due == NEAR_THE_END:
        due = saving_begins(case) - time.time() - case.hurry_s + time.monotonic() - case.started
    if time.monotonic() < case.started + due:
        return
    _, what, name = case.acts.pop(0)
    if what == "warn":
        cluster.ask("scancel", "--batch", "--signal=USR2", case.job, check=False)
    else:
        words = [*hpcsched(what, name, "--dir", case.rundir)]
        subprocess.run(words, env=cluster.env, capture_output=True, timeout=30)


def saving_begins(case: Case) -> float:
    """The Unix time at which saving is going to begin, as far as can be told from outside."""
    page = json.loads((case.rundir / "status.json").read_text())
    active = [job["model"] for job in page["jobs"] if job["gpus"]]
    longest = max((MODELS[model][0] or 5.0 for model in active), default=0.0)
    end = datetime.fromisoformat(page["run"]["allocation"]["deadline"]).timestamp()
    return end - END_RESERVE_S - longest * len(active)


def judge(case: Case, results: dict[str, list[float]]) -> list[str]:
    """What is wrong with how an allocation ended; its numbers go into `results`."""
    wrong: list[str] = []
    facts = case.facts
    if facts["JobState"] == "TIMEOUT" or facts["ExitCode"] != "75:0":
        wrong.append(f"Slurm: {facts['JobState']}, exit code {facts['ExitCode']}")
    found, machine = lives(case.rundir / "journal.jsonl")
    life = found[-1]
    saved = lost = 0
    for job in machine.run.jobs.values():
        kind, folder = case.kinds[job.spec.name], case.rundir / "jobs" / str(job.id)
        last = max(done_steps(folder), default=0)
        if job.state in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING):
            wrong.append(f"{job.spec.name} is {job.state} at the end")
        if kind in ("plain", "stubborn"):  # they do not save: nothing to compare
            continue
        step = last if job.state is JobState.COMPLETED else saved_step(folder)
        saved += job.state is JobState.SUSPENDED
        lost += last - step
        on_record = job.saved_step or 0 if job.state is JobState.SUSPENDED else step
        if not last == step == on_record:
            wrong.append(f"{job.spec.name}: did {last} steps, saved {step}, on record {job.saved_step}")
    if life.cause != "deadline":
        wrong.append(f"saving began for another reason than the deadline: {life.cause or 'it did not begin'}")
    if life.unused <= 0:
        wrong.append(f"left {-life.unused:.1f} s after the end")
    page = json.loads((case.rundir / "status.json").read_text())
    if page["run"]["state"] != "STOPPED":
        wrong.append(f"the run is {page['run']['state']}")
    numbers = {
        "ends_unused_s": life.unused,
        "ends_margin_s": life.margin,
        "ends_saving_late_s": max(0.0, life.drained - (life.deadline - life.margin)),
        "ends_jobs": len(machine.run.jobs),
        "ends_jobs_active": life.active,
        "ends_jobs_saved": saved,
        "ends_steps_lost": lost,
        "ends_all_saved": float(not wrong),
    }
    for state, number in Counter(life.states).items():
        results.setdefault(f"ends_at_drain_{state.replace(' ', '_')}", []).append(number)
    for name, number in numbers.items():
        results.setdefault(name, []).append(number)
    return wrong


def tail(case: Case) -> str:
    output = case.rundir.with_suffix(".out")
    text = output.read_text(errors="replace") if output.exists() else "(no output)"
    return "\n".join(text.splitlines()[-30:])


def keep(case: Case) -> None:
    """Put what is left of an allocation that went wrong where it outlasts us."""
    if place := os.environ.get("HPCSCHED_BENCH_KEEP"):
        shutil.copytree(case.rundir, Path(place, case.rundir.name), dirs_exist_ok=True)
        for suffix in (".out", ".toml"):
            shutil.copy(case.rundir.with_suffix(suffix), place)


# --- coming back ------------------------------------------------------------------------------------


def requeues(report: Report, cluster: Cluster) -> None:
    """Four programs, two at a time, whose work takes a little more than two of three lives' time."""
    usable = LIFE_S - REQUEUE_RESERVE_S - 5
    seconds, step_s, count = usable * 2.5 * SLOTS / 4, 0.5, 4
    steps = round(seconds / step_s)
    tables = ["schema = 1"]
    args = f'{{ kind = "runs", step_s = {step_s}, save_s = 1.0 }}'
    tables += [
        f'[[job]]\nname = "job{n}"\nmodel = "quick"\nsteps = {steps}\ngpus = 1\nprocesses = "one"\n'
        f'command = ["{sys.executable}", "-S", "{cluster.folder}/work.py"]\nargs = {args}'
        for n in range(count)
    ]
    rundir = cluster.folder / "back"
    rundir.with_suffix(".toml").write_text("\n\n".join(tables) + "\n")
    run = ("--devices", f"cpu:{SLOTS}", "--profiles", cluster.folder / "profiles.json", "--requeue")
    run += ("--margin", REQUEUE_RESERVE_S)
    began, began_wall = time.monotonic(), time.time()
    options = ("--time=2", "--gres=gpu:2", "-c4", "--requeue")
    job = cluster.submit(rundir, rundir.with_suffix(".toml"), *options, run=run)
    deadline = began + (LIVES + 1) * (LIFE_S + 180)
    while (state := cluster.states().get(job, "")) in GOING_ON:
        if time.monotonic() > deadline:
            raise RuntimeError(f"batch job {job} is {state}")
        time.sleep(PERIOD_S)
    took = time.monotonic() - began
    facts = cluster.facts(job)
    found, machine = lives(rundir / "journal.jsonl")
    jobs = list(machine.run.jobs.values())
    repeated = [job.steps_repeated or 0 for job in jobs]
    attempted = sum(a.to_step - a.from_step for j in jobs for a in j.attempts if a.to_step is not None)
    done = [Counter(done_steps(rundir / "jobs" / str(job.id))) for job in jobs]
    each = dict.fromkeys(range(1, steps + 1), 1)
    once = all(steps_done == each for steps_done in done)
    complete = all(job.state is JobState.COMPLETED for job in jobs) and facts["JobState"] == "COMPLETED"
    how = "all completed" if complete else facts["JobState"]
    report.row(
        f"a set of {count} jobs from one sbatch, by requeue, in allocations of 2 minutes",
        f"{how} in {len(found)} allocations, {took:.0f} s in all",
        goal=f"all completed in {LIVES}",
        ok=complete and len(found) == LIVES,
    )
    report.row(
        "... steps done; done more than once, or not at all",
        f"{attempted} of {steps * count} by the journal, {sum(repeated)} repeated; "
        f"by the programs' own records each {'exactly once' if once else '**not** exactly once'}",
        goal="each exactly once",
        ok=once and attempted == steps * count and not any(repeated),
    )
    waits = [new.began_wall - old.began_wall - (old.left - start) for old, new, start in pairs(found)]
    report.row("... time in Slurm's queue between allocations", ", ".join(f"{wait:.0f} s" for wait in waits))
    unused = [life.unused for life in found[:-1]]
    margins = [life.margin for life in found[:-1]]
    beyond = [u - m for u, m in zip(unused, margins, strict=True)]
    report.row(
        "... time left unused at their ends, beyond the margin that was planned",
        ", ".join(f"{u:.1f} s of margin {m:.1f} s" for u, m in zip(unused, margins, strict=True)),
        goal=f"at most {SLACK_S:g} s beyond",
        ok=bool(beyond) and max(beyond) <= SLACK_S,
    )
    report.results |= {
        "requeues_wall_s": [took],
        "requeues_first_start_s": [found[0].began_wall - began_wall],
        "requeues_queue_s": waits,
        "requeues_unused_s": unused,
        "requeues_margin_s": margins,
        "requeues_steps_repeated": [float(n) for n in repeated],
        "requeues_steps_by_journal": [float(attempted)],
        "requeues_steps_total": [float(steps * count)],
        "requeues_each_once": [float(once)],
    }


def pairs(found: Sequence[Ended]) -> list[tuple[Ended, Ended, float]]:
    """Each life with the one after it, and the run clock at its beginning."""
    starts = [0.0, *(life.left for life in found)]
    return [(old, new, start) for old, new, start in zip(found, found[1:], starts, strict=False)]


if __name__ == "__main__":
    main("Ends of allocations, and coming back.", measure, "--ends", "--requeues")
