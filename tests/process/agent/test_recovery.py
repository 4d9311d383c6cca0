"""Taking a run over: what its jobs have left in their folders, and which processes still live."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.agent import recovery
from hpcsched.agent.recovery import end_orphans, put_unknown_jobs_aside, saved_steps
from hpcsched.core import events as ev
from hpcsched.launch.proc import stat
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


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_job_left_in_memory_as_its_agent_died_is_waited_for_where_it_may_be_kept(
    rundir: RunDir, driver: Driver, alone: bool
) -> None:
    driver.runs("a")
    driver.suspend("a")
    rundir.job(1).mkdir(parents=True)
    (rundir.job(1) / "held.1").touch()
    saved_steps(rundir, driver.machine, alone=alone)
    assert (rundir.job(1) / "held.1").exists() is not alone


@pytest.fixture
def lost() -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has thrown its environment away."""
    process = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("where", "run_id", "ends"), [("n1", "lost", True), ("n1.site", "", True), ("n2", "lost", False)]
)
def test_what_the_journal_knows_is_ended_where_the_runs_record_is_lost(
    rundir: RunDir, driver: Driver, lost: subprocess.Popen[bytes], where: str, run_id: str, ends: bool
) -> None:
    seen = stat(lost.pid)
    assert seen is not None
    driver.tell(ev.WorkersSpawned, "a", processes=((lost.pid, seen.start_ticks),), host=where)
    driver.machine.run.run_id = run_id
    rundir.journal.write_text("what it holds was read before")
    ended = end_orphans(rundir, driver.machine, None, host="n1", grace_s=5.0, hosts=1)
    assert (ended, lost.poll() is not None) == (int(ends), ends)


def test_a_life_whose_beginning_is_lost_too_looks_for_its_processes(
    rundir: RunDir, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(recovery, "find_orphans", lambda value, known, by="": asked.append((value, by)) or [])
    driver.machine.run.lives.clear()
    assert end_orphans(rundir, driver.machine, None, host="n1", grace_s=5.0, hosts=3) == 0
    assert asked == [], "no run has begun"
    rundir.journal.write_text("something")
    assert end_orphans(rundir, driver.machine, None, host="n1", grace_s=5.0, hosts=1) == 0
    assert asked == [(str(rundir.root), "HPCSCHED_RUN_DIR")]


def test_a_new_job_does_not_find_what_a_job_has_left_that_no_record_names(
    rundir: RunDir, driver: Driver, tmp_path: Path
) -> None:
    for job_id in (1, 2):
        (rundir.job(job_id) / "checkpoint").mkdir(parents=True)
        (rundir.job(job_id) / "STATE.json").write_text("{}")
        (tmp_path / "scratch" / str(job_id)).mkdir(parents=True)
    (rundir.root / "jobs" / "2.1.bak").mkdir()
    said = put_unknown_jobs_aside(rundir, driver.machine, lambda job_id: tmp_path / "scratch" / str(job_id))
    assert [line.split()[-2] for line in said] == ["2.2.bak", "2.1.bak"]
    assert sorted(path.name for path in (rundir.root / "jobs").iterdir()) == ["1", "2.1.bak", "2.2.bak"]
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == ["1", "2.1.bak"]
    assert (rundir.root / "jobs" / "2.2.bak" / "STATE.json").exists()
    assert put_unknown_jobs_aside(rundir, driver.machine, lambda job_id: tmp_path / str(job_id)) == []
