"""The lock of a run whose agent hangs, or died with its host, while its file system still has it locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rundirs import a_run

from hpcsched.agent import run_lock
from hpcsched.agent.run_lock import take_run_lock
from hpcsched.store.rundir import RunDir, RunDirError, RunLock


@pytest.mark.parametrize(
    ("host", "age_s", "follows", "goes_on"),
    [
        ("elsewhere", 60.0, True, True),
        ("elsewhere", 0.0, True, False),
        ("here", 60.0, True, False),
    ],
)
def test_an_agent_that_follows_by_its_number_goes_without_that_of_a_dead_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, age_s: float, follows: bool, goes_on: bool
) -> None:
    monkeypatch.setattr("hpcsched.agent.run_lock.socket.gethostname", lambda: "here")
    monkeypatch.setattr("hpcsched.agent.run_lock.COMMANDS_HOLD_S", 0.0)
    rundir = RunDir(a_run(tmp_path / "run", host=host, age_s=age_s))
    with (rundir.root / "agent.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if goes_on:
            assert take_run_lock(rundir, resume=False, follows=follows) is None
        else:
            with pytest.raises(RunDirError):
                take_run_lock(rundir, resume=False, follows=follows)


@pytest.mark.parametrize(
    ("host", "state", "age_s", "moves", "taken", "seconds"),
    [
        ("elsewhere", "RUNNING", 60.0, True, False, 1.0),
        ("elsewhere", "RUNNING", 60.0, False, True, 6.0),
        ("elsewhere", "STOPPED", 60.0, True, True, 0.0),
        ("elsewhere", "RUNNING", 3600.0, False, True, 0.0),
        ("here", "RUNNING", 60.0, False, True, 0.0),
    ],
)
def test_where_the_lock_of_another_host_does_not_reach_its_signs_of_life_are_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    state: str,
    age_s: float,
    moves: bool,
    taken: bool,
    seconds: float,
) -> None:
    """They look old, as our clock is ahead of the file server's."""
    rundir, now = RunDir(a_run(tmp_path / "run", host=host, state=state, age_s=age_s)), 1000.0

    def sleep(for_s: float) -> None:
        nonlocal now
        now += for_s
        if moves and now > 1000.7:
            written = rundir.status.stat().st_mtime_ns + 1
            os.utime(rundir.status, ns=(written, written))

    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr("hpcsched.agent.run_lock.socket.gethostname", lambda: "here")
    if taken:
        lock = take_run_lock(rundir, resume=True)
        assert lock is not None
        lock.release()
    else:
        with pytest.raises(RunDirError, match="another agent"):
            take_run_lock(rundir, resume=True)
    assert now - 1000.0 == pytest.approx(seconds, abs=0.5)
    RunLock(rundir).release()
