"""Taking a run over: what its jobs have left in their folders, and which processes still live."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.agent.recovery import saved_steps
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job, a_profile


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    return rundir


@pytest.fixture
def driver() -> Driver:
    return Driver(a_job("a", "m"), profiles=[a_profile("m", [1])])


def test_a_folder_under_the_name_of_a_held_state_ends_no_resume(rundir: RunDir, driver: Driver) -> None:
    driver.runs("a")
    driver.suspend("a")
    driver.leaves("a", 20)
    (rundir.job(1) / "held.9").mkdir(parents=True)
    assert saved_steps(rundir, driver.machine) == {1: 0}
