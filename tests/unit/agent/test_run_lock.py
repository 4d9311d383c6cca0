"""The lock of a run whose agent hangs, or died with its host, while its file system still has it locked."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from rundirs import a_run

from hpcsched.agent.run_lock import take_run_lock
from hpcsched.store.rundir import RunDir, RunDirError


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
