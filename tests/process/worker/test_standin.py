"""The stand-in as a process: signals, files, exit codes, timing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.orphans import end_processes, find_orphans
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped

SLACK_S = 5.0  # of a busy machine; what is promised is a few ms
Start = Callable[..., LocalWorkers]


@pytest.fixture(autouse=True)
def notified() -> Iterator[list[float]]:
    """The times at which SIGUSR1 came (which would end us if we did not listen)."""
    times: list[float] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: times.append(time.monotonic()))
    yield times
    signal.signal(signal.SIGUSR1, old)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LocalWorkers] = []

    def launch(
        *, ranks: int = 1, attempt: int = 1, resume: bool = False, every: float = 600.0, **task: float
    ) -> LocalWorkers:
        course = {"rate": 100.0, "start_s": 0.0, "suspend_s": 0.0, "steps": 10_000, "speed": 1.0, **task}
        env = {
            "HPCSCHED_STANDIN": json.dumps(course),
            "HPCSCHED_JOB_DIR": str(tmp_path),
            "HPCSCHED_ATTEMPT": str(attempt),
            "HPCSCHED_RESUME": str(int(resume)),
            "HPCSCHED_NOTIFY_PID": str(os.getpid()),
            "HPCSCHED_CHECKPOINT_EVERY_S": str(every),
        }
        argv = [sys.executable, "-m", "hpcsched.worker.standin"]
        workers = LocalLauncher().launch(replace(plan(tmp_path, argv, ranks=ranks), env=env, cwd=Path.cwd()))
        started.append(workers)
        return workers

    yield launch
    for workers in started:
        workers.signal(signal.SIGKILL)
        reaped(workers)
        workers.close()


def until(folder: Path, name: str) -> Path:
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return folder / name


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "STATE.json").read_text())
    return found


def progress(workers: LocalWorkers) -> list[dict[str, float]]:
    assert workers.progress_fd is not None
    return [json.loads(line) for line in os.read(workers.progress_fd, 65536).splitlines()]


def test_it_ends_when_the_course_says(start: Start, tmp_path: Path) -> None:
    begun = time.monotonic()
    workers = start(ranks=2, steps=4000, rate=100.0, start_s=10.0, speed=25.0)  # 50 profile seconds
    assert reaped(workers) == 0
    assert 2.0 <= time.monotonic() - begun < 2.0 + SLACK_S
    assert state(tmp_path) == {
        "schema": 1,
        "step": 4000,
        "samples": None,
        "checkpoint": str(tmp_path / "STATE.json"),
        "attempt": 1,
    }
    lines = progress(workers)
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps) and steps[-1] == 4000 and len(steps) >= 3
    assert abs(lines[-1]["t"] - time.time()) < 5


@pytest.mark.parametrize("sig", [signal.SIGTSTP, signal.SIGTERM])
def test_asked_to_leave_it_finishes_the_step_and_pays(
    start: Start, tmp_path: Path, notified: list[float], sig: signal.Signals
) -> None:
    workers = start(ranks=2, rate=20.0, suspend_s=0.2)
    until(tmp_path, "ready.1")
    time.sleep(0.05)  # rank 1 has no file to say that it listens
    asked = time.monotonic()
    workers.signal(sig)
    assert reaped(workers) == 75
    assert 0.2 <= time.monotonic() - asked < 0.2 + 0.05 + SLACK_S
    saved = state(tmp_path)["step"]
    assert 0 < saved < 10_000
    assert progress(workers)[-1]["step"] == saved
    assert len(notified) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_it_resumes_where_it_was(start: Start, tmp_path: Path) -> None:
    (tmp_path / "STATE.json").write_text(json.dumps({"step": 9_990, "attempt": 1}))
    workers = start(attempt=2, resume=True, start_s=0.05)  # 0.15 s instead of 100
    assert reaped(workers) == 0
    assert state(tmp_path)["step"] == 10_000
    assert state(tmp_path)["attempt"] == 2
    assert until(tmp_path, "ready.2")


def test_without_resume_it_begins_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "STATE.json").write_text(json.dumps({"step": 9_990}))
    workers = start(start_s=60.0, suspend_s=0.0)
    until(tmp_path, "ready.1")
    workers.signal(signal.SIGTSTP)
    assert reaped(workers) == 75
    assert state(tmp_path)["step"] == 0


def test_a_broken_record_means_the_beginning(start: Start, tmp_path: Path) -> None:
    (tmp_path / "STATE.json").write_text("{")
    workers = start(resume=True, steps=1, rate=1000.0)
    assert reaped(workers) == 0
    assert "starting from step 0" in (tmp_path / "logs" / "out").read_text()


def test_periodic_checkpoints(start: Start, tmp_path: Path) -> None:
    workers = start(every=0.05, rate=1000.0)
    until(tmp_path, "STATE.json")
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == 128 + signal.SIGKILL
    assert 0 < state(tmp_path)["step"] < 10_000


def test_asked_in_the_last_step_it_completes(start: Start, tmp_path: Path) -> None:
    workers = start(steps=1, rate=1 / 0.4, suspend_s=30.0)  # one step of 0.4 s
    until(tmp_path, "ready.1")
    workers.signal(signal.SIGTSTP)
    assert reaped(workers) == 0
    assert state(tmp_path)["step"] == 1


def test_an_orphan_saves_and_leaves(tmp_path: Path) -> None:
    run_id = f"standin-{os.getpid()}"
    task = {"rate": 100.0, "start_s": 0.0, "suspend_s": 0.0, "steps": 10_000, "speed": 1.0}
    agent = (
        "import json, os, pathlib, subprocess, sys, time\n"
        f"env = os.environ | {{'HPCSCHED_STANDIN': json.dumps({task!r})}}\n"
        "env |= {'HPCSCHED_NOTIFY_PID': str(os.getpid()), 'HPCSCHED_LAUNCHED_AT': repr(time.monotonic())}\n"
        "argv = [sys.executable, '-m', 'hpcsched.worker.standin']\n"
        "p = subprocess.Popen(argv, env=env, start_new_session=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'ready.1')!r}).exists(): time.sleep(0.005)\n"
        "os._exit(0)\n"
    )
    env = {
        **os.environ,
        "HPCSCHED_RUN_ID": run_id,
        "HPCSCHED_JOB_DIR": str(tmp_path),
        "HPCSCHED_ATTEMPT": "1",
        "HPCSCHED_RANK": "0",
    }
    try:
        subprocess.run([sys.executable, "-c", agent], env=env, check=True, timeout=DEADLINE_S)
        until(tmp_path, "STATE.json")
        assert 0 < state(tmp_path)["step"] < 10_000
    finally:
        assert end_processes(find_orphans(run_id, []), 2.0) == []


def test_an_environment_outside_the_contract() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HPCSCHED_")}
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched.worker.standin"],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "HPCSCHED_STANDIN" in done.stderr and "Traceback" not in done.stderr


def test_it_imports_little() -> None:
    code = (
        "import sys, hpcsched.worker.standin; "
        "print([m for m in ('torch', 'numpy', 'msgspec', 'pathlib', 'asyncio') if m in sys.modules])"
    )
    # -S: what site-packages' .pth files import is not ours
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
