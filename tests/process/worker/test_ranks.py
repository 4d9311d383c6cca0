"""Plays the agent for ranks of a training job; used by the other worker tests, and tested here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from rankjobs import _DEADLINE_S, Job, woken_by

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRAINER", "nonsense", "trainer 'nonsense': not a class; accepted: package.module:Name"),
        ("TRAINER", "no_such_module:X", "trainer 'no_such_module:X': no module named 'no_such_module'"),
        ("TRAINER", "training:Missing", "trainer 'training:Missing': training has no Missing"),
        ("TRAINER", "training:nn", "trainer 'training:nn': nn is not a Trainer class"),
        ("ARGS", "[1]", "environment: HPCSCHED_ARGS: '[1]'; accepted: a JSON object"),
        ("RANK", "first", "environment: HPCSCHED_RANK: 'first'; accepted: a number"),
        ("STRATEGY", '{"kind": "magic"}', "strategy: kind: 'magic'"),
        ("STRATEGY", '{"kind": "ddp", "micro": 1}', "strategy ddp: micro: unknown option"),
        ("STRATEGY", '{"kind": "ddp", "micro_batch": 0}', "strategy ddp: micro_batch: 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    from hpcsched.worker.__main__ import main

    job = Job(tmp_path, trainer="training:Exact")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "training", raising=False)
    for name, setting in job.environment(0, 1, 1, {}).items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv(f"HPCSCHED_{variable}", value)
    assert main() == 2
    monkeypatch.delitem(sys.modules, "training", raising=False)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_more_ranks_than_samples_in_a_batch_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.run(2, batch=1) == [2, 2]
    assert "global_batch: a global batch of 1 samples is too small for 2 ranks" in job.output


def test_errors_of_the_users_code_keep_their_traceback(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.run(1, raise_at=2) == [1]
    assert "Traceback" in job.output
    assert "ZeroDivisionError: the user's own" in job.output


def test_a_real_start_suspend_and_wake_up(tmp_path: Path) -> None:
    """As the agent does it: ready file, SIGTSTP, STATE.json before SIGUSR1, exit code 75."""
    job = Job(tmp_path, steps=10**9)
    states: list[dict[str, Any]] = []
    read, write = os.pipe()
    with woken_by(lambda: states.append(job.state)):
        rank = job.spawn(
            sys.executable,
            "-m",
            "hpcsched.worker",
            pass_fds=[write],
            env={"HPCSCHED_PROGRESS_FD": str(write), "PYTHONPATH": str(ROOT)},
        )
        os.close(write)
        with os.fdopen(read) as progress:
            first = json.loads(progress.readline())
            assert (job.dir / "ready.1").exists()
            os.killpg(rank.pid, signal.SIGTSTP)
            assert rank.wait(_DEADLINE_S) == 75
            last = json.loads(progress.readlines()[-1])
    assert first["step"] == 1
    assert set(first) == {"step", "t", "loss", "total"}
    (state,) = states
    assert state == job.state
    assert state["step"] == last["step"]
    assert state["samples"] == 7 * state["step"]
    assert state["attempt"] == 1
    assert Path(state["checkpoint"]).parent == job.checkpoints.resolve()


@pytest.mark.slow
def test_own_loop_runs_without_hpcsched(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import training
        training.own_loop()
    """)
    Job(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} <= {"training.py", "jobs", "__pycache__"}


def test_the_digits_are_learnt(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    job = Job(tmp_path, trainer="hpcsched.examples.digits:Digits", steps=60)
    assert job.run(1, kind="cnn", width=4) == [0], job.output
    assert job.state["metrics"]["accuracy"] > 0.6
    assert job.run(1, depth=3) == [2]
    assert "Digits: depth: unknown argument; accepted: kind, width" in job.output
