"""One suite for training programs of any kind: a shell script, plain Python, the stand-in."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcsched.examples
from hpcsched.agent.attempts import read_record
from hpcsched.agent.launch_plans import Site, launch_plan
from hpcsched.core.actions import Launch
from hpcsched.core.jobs import Job
from hpcsched.core.model import Device, JobSpec, Kind, Role
from hpcsched.core.profile import Profile
from hpcsched.launch.base import Workers
from hpcsched.launch.local import LocalLauncher
from hpcsched.store.rundir import RunDir

STEPS = 30
FOREVER = 100_000
DEADLINE_S = 60.0
PROFILE = Profile(model="m", device="cpu", throughput={1: 40.0, 2: 40.0}, source="measured")

PLAIN_PYTHON = """
import json, os, signal, sys, time
asked = []
for number in (signal.SIGTSTP, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.append(1))
env, job = os.environ, os.environ["HPCSCHED_JOB_DIR"]
state, attempt = os.path.join(job, "STATE.json"), int(env["HPCSCHED_ATTEMPT"])
step = json.load(open(state))["step"] if env["HPCSCHED_RESUME"] == "1" else 0
def save():
    with open(state + ".tmp", "w") as file:
        json.dump({"step": step, "attempt": attempt}, file)
    os.replace(state + ".tmp", state)
if env["RANK"] == "0":
    open(os.path.join(job, f"ready.{attempt}"), "w").close()
while step < int(env["HPCSCHED_STEPS"]):
    time.sleep(0.025)
    step += 1
    if "HPCSCHED_PROGRESS_FD" in env:
        try:
            os.write(int(env["HPCSCHED_PROGRESS_FD"]), b'{"step": %d, "t": %r}\\n' % (step, time.time()))
        except OSError:
            pass
    if asked:
        if env["RANK"] == "0":
            save()
            os.kill(int(env["HPCSCHED_NOTIFY_PID"]), signal.SIGUSR1)
        sys.exit(75)
if env["RANK"] == "0":
    save()
"""

PROGRAMS: dict[str, dict[str, Any]] = {
    "shell": {
        "kind": Kind.COMMAND,
        "command": ("bash", str(Path(hpcsched.examples.__path__[0]) / "plain.sh")),
        "env": {"STEP_S": "0.025"},
    },
    "python": {"kind": Kind.COMMAND, "command": (sys.executable, "-S", "-c", PLAIN_PYTHON)},
    "stand-in": {"kind": Kind.REPLAY},
}


class Bench:
    """Runs attempts of one program as the agent does."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        spec = JobSpec(name="p", model="m", steps=STEPS, workdir=str(folder), **keys)
        self.job = Job(id=1, spec=spec, submit_s=0.0)
        self.rundir = RunDir(folder / "run")
        self.rundir.make()
        self.folder = self.rundir.job(1)
        self.folder.mkdir()
        self.running: list[Workers] = []
        self.woken = 0

    def to_do(self, steps: int) -> None:
        self.job.spec = replace(self.job.spec, steps=steps)

    def launch(self, attempt: int, *, ranks: int, resume: bool = False) -> Workers:
        gpus = tuple(range(ranks))
        devices = tuple(Device(index=i, host="h", kind="cpu", handle=str(i)) for i in gpus)
        site = Site(rundir=self.rundir, run_id=str(self.rundir.root), user="u", speed=1.0, stand_ins=False)
        action = Launch(
            at=0, cause="", job_id=1, attempt=attempt, gpus=gpus, role=Role.PRIMARY, resume=resume
        )
        plan = launch_plan(self.job, action, site=site, devices=devices, profile=PROFILE)
        self.running.append(LocalLauncher().launch(plan))
        return self.running[-1]

    def until_ready(self, attempt: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / f"ready.{attempt}").exists():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)

    def until_step(self, workers: Workers, least: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while max(self.steps(workers), default=0) < least:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)

    def until_listening(self, workers: Workers, number: signal.Signals) -> None:
        """`ready` is rank 0's word; this waits until the other ranks have a handler too."""
        deadline = time.monotonic() + DEADLINE_S
        for pid, _ in workers.processes[1:]:
            while not _listens(pid, number):
                assert time.monotonic() < deadline, self.said
                time.sleep(0.002)

    def code(self, workers: Workers) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while (code := workers.reap()) is None:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)
        return code

    @staticmethod
    def steps(workers: Workers) -> list[int]:
        """Those of the progress lines that have come since the last look."""
        assert workers.progress_fd is not None
        try:
            lines = os.read(workers.progress_fd, 65536).splitlines()
        except BlockingIOError:
            return []
        return [json.loads(line)["step"] for line in lines]

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.out"))


def _listens(pid: int, number: signal.Signals) -> bool:
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


@pytest.fixture(params=sorted(PROGRAMS))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    place = Bench(tmp_path, **PROGRAMS[request.param])

    def wake(*_: object) -> None:
        place.woken += 1

    before = signal.signal(signal.SIGUSR1, wake)
    yield place
    for workers in place.running:
        workers.signal(signal.SIGKILL)
        while workers.reap() is None:
            time.sleep(0.001)
        workers.close()
    signal.signal(signal.SIGUSR1, before)


def test_runs_to_its_end(bench: Bench) -> None:
    workers = bench.launch(1, ranks=2)
    assert bench.code(workers) == 0, bench.said
    record = read_record(bench.folder)
    assert record is not None
    assert (record.step, record.attempt) == (STEPS, 1)
    steps = bench.steps(workers)
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert (bench.folder / "ready.1").exists()


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTERM])
def test_saves_and_leaves_when_asked_and_goes_on_where_it_was(bench: Bench, number: signal.Signals) -> None:
    # The stand-in waits for signals without a handler, which /proc does not show: one rank of it.
    bench.to_do(FOREVER)
    workers = bench.launch(1, ranks=1 if bench.job.spec.kind is Kind.REPLAY else 2)
    bench.until_ready(1)
    bench.until_step(workers, 2)
    bench.until_listening(workers, number)
    workers.signal(number)
    assert bench.code(workers) == 75, bench.said
    record = read_record(bench.folder)
    assert record is not None
    assert 2 <= record.step < FOREVER
    assert record.attempt == 1
    assert bench.woken >= 1
    # The agent's books, then the same program on another number of devices.
    bench.job.step = bench.job.saved_step = record.step
    bench.to_do(record.step + STEPS)
    again = bench.launch(2, ranks=1, resume=True)
    bench.until_ready(2)
    assert bench.code(again) == 0, bench.said
    steps = bench.steps(again)
    assert record.step <= steps[0], "no step is done twice"
    done = read_record(bench.folder)
    assert done is not None
    assert (done.step, done.attempt) == (record.step + STEPS, 2)


def test_asked_at_once_after_ready(bench: Bench) -> None:
    bench.to_do(FOREVER)
    workers = bench.launch(1, ranks=1)
    bench.until_ready(1)
    workers.signal(signal.SIGTSTP)
    assert bench.code(workers) == 75, bench.said
    record = read_record(bench.folder)
    assert record is not None
    assert record.step < FOREVER


def test_goes_on_when_nobody_reads_its_progress(bench: Bench) -> None:
    workers = bench.launch(1, ranks=1)
    bench.until_ready(1)
    assert workers.progress_fd is not None
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, workers.progress_fd)  # the reading end is gone, as when the agent was killed
    os.close(null)
    assert bench.code(workers) == 0, bench.said


def test_a_shell_program_hears_the_order_behind_a_launcher(tmp_path: Path) -> None:
    # In a session of its own, without signals, and with its own file where the progress pipe was.
    script = PROGRAMS["shell"]["command"][1]
    launcher = f"trap '' TSTP TERM; setsid -w bash {script} 3>mine; exit 3"
    keys = {**PROGRAMS["shell"], "command": ("bash", "-c", launcher), "processes": "one"}
    bench = Bench(tmp_path, **keys)
    bench.to_do(FOREVER)
    workers = bench.launch(1, ranks=1)
    try:
        bench.until_ready(1)
        workers.signal(signal.SIGTSTP)
        assert bench.code(workers) == 75, bench.said
    finally:
        workers.signal(signal.SIGKILL)
        workers.close()
    record = read_record(bench.folder)
    assert record is not None and 0 <= record.step < FOREVER
    assert (tmp_path / "mine").read_text() == ""
