"""`hpcsched clean`: removes what it is told to, of hpcsched's, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rundirs import a_home, a_run

from hpcsched.cli.main import cli
from hpcsched.core.model import JobState
from hpcsched.errors import StoreError
from hpcsched.store import cleaning, registry
from hpcsched.store.cleaning import remove
from hpcsched.store.leftovers import What, left_by
from hpcsched.store.rundir import CLEANED, RunDir, RunDirError, RunLock

DONE = (JobState.COMPLETED,)
RUN_ID = "0" * 31 + "1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    a_home(tmp_path, monkeypatch)
    assert registry.folder().is_relative_to(tmp_path)  # never the registry of who runs the tests
    return tmp_path


def over(folder: Path, *, run_id: str = RUN_ID, age_s: float = 1e6, jobs: Any = DONE) -> Path:
    """A run that is over, with a checkpoint and an output."""
    a_run(folder, state="FINISHED", kind="none", age_s=age_s, run_id=run_id, jobs=jobs)
    job = folder / "jobs" / "1"
    (job / "checkpoint").mkdir(parents=True)
    (job / "checkpoint" / "step-1.pt").write_bytes(b"x" * 5000)
    (job / "STATE.json").write_text("{}")
    (job / "hpcsched-1.out").write_text("said\n")
    (folder / "journal.jsonl").write_text("{}\n")
    registry.register(run_id, folder)
    return folder


def clean(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["clean", *map(str, words)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_on_its_own_it_only_shows(here: Path) -> None:
    run, other = over(here / "hpcsched-run"), over(here / "other" / "r", run_id="2" * 32)
    code, said = clean()
    assert code == 0 and "hpcsched-run" in said and str(other) not in said and run.is_dir()
    assert "other/r" in clean("--all")[1] and other.is_dir()
    code, said = clean("--older-than", "1d")  # no terminal that could be asked
    assert code == 1 and "nothing is removed: --yes" in said and run.is_dir()
    refused = CliRunner().invoke(cli, ["clean", "--all", "--older-than", "0", "--yes"])
    assert refused.exit_code == 2 and run.is_dir() and other.is_dir()


def test_nothing_is_left_of_a_run_over_several_allocations(here: Path) -> None:
    run = over(here / "hpcsched-run")
    for name in ("agent-12", "agent.options", "join-0a1b2c", "joined-0a1b2c-own", "pool.json", "pool.lock"):
        (run / name).write_text("{}")
    (run / "pool").mkdir()
    (run / "pool" / "pool-0a-1-77.out").write_text("said\n")
    code, said = clean(run, "--yes")
    assert code == 0 and "stays" not in said and not run.exists()


def test_runs_of_other_directories_are_removed_only_by_name(here: Path) -> None:
    run, other = over(here / "hpcsched-run"), over(here / "other" / "r", run_id="2" * 32)
    young = over(here / "hpcsched-run-2", run_id="3" * 32, age_s=60.0)
    assert clean("--older-than", "1d", "--yes")[0] == 0
    assert not run.exists() and other.is_dir() and young.is_dir()
    assert clean(other, "--yes")[0] == 0
    assert not other.exists()
    assert [entry.dir for entry in registry.runs()] == [str(young)]


@pytest.mark.parametrize("jobs", [(JobState.COMPLETED, JobState.SUSPENDED)])
def test_what_lives_or_has_work_left_stays(here: Path, jobs: Any) -> None:
    left = over(here / "left", jobs=jobs)
    living = a_run(here / "living", state="RUNNING", kind="none", jobs=DONE)
    for run in (left, living):
        code, said = clean(run, "--yes")
        assert code == 1 and (run / "run.json").is_file() and "left alone" in said
    assert clean(living, "--with-work-left", "--yes")[0] == 1 and living.is_dir()
    assert clean(left, "--with-work-left", "--yes")[0] == 0 and not left.exists()


def test_files_of_the_user_stay_and_links_lead_nowhere(here: Path) -> None:
    run, mine = over(here / "hpcsched-run"), here / "mine"
    mine.mkdir()
    (mine / "model.pt").write_text("precious")
    job = run / "jobs" / "1"
    (job / "results.csv").write_text("1,2\n")
    shutil.rmtree(job / "checkpoint")
    (job / "checkpoint").symlink_to(mine)
    (run / "jobs" / "2").symlink_to(mine)
    (run / "packs").symlink_to(mine)
    code, said = clean(run, "--yes")
    assert code == 0 and "not made by hpcsched, and stays" in said
    assert (mine / "model.pt").read_text() == "precious"
    assert (job / "results.csv").exists() and not (job / "hpcsched-1.out").exists()
    assert (run / "journal.jsonl").exists()  # by which the folder is still known


def test_checkpoints_alone_or_all_else(here: Path) -> None:
    run, kept = over(here / "a"), over(here / "b", run_id="2" * 32)
    elsewhere = here / "place" / RUN_ID / "1"
    elsewhere.mkdir(parents=True)
    (here / "place" / "other").mkdir()
    record = RunDir(run).read_record()
    assert record
    record.checkpoints = str(here / "place")
    RunDir(run).write_record(record)
    assert clean(run, "--only-checkpoints", "--yes")[0] == 0
    assert not (run / "jobs/1/checkpoint").exists() and (run / "jobs/1/hpcsched-1.out").exists()
    assert not elsewhere.parent.exists() and (here / "place" / "other").exists()
    assert clean(kept, "--keep-checkpoints", "--yes")[0] == 0
    assert (kept / "jobs/1/checkpoint/step-1.pt").exists() and not (kept / "jobs/1/hpcsched-1.out").exists()
    assert (kept / "run.json").exists()


def test_what_a_search_of_programs_has_left_is_a_result_and_goes_with_all(here: Path) -> None:
    run = over(here / "a")
    (run / "trials" / "t0003").mkdir(parents=True)
    (run / "trials" / "t0003" / "model.pt").write_text("best")
    (run / "jobs" / "1" / "metric.1.json").write_text("{}")
    for part in ("--only-checkpoints", "--keep-checkpoints"):
        assert clean(run, part, "--yes")[0] == 0
        assert (run / "trials/t0003/model.pt").exists() and (run / "jobs/1/metric.1.json").exists()
    assert clean(run, "--yes")[0] == 0 and not run.exists()


def test_a_removal_that_was_interrupted_is_gone_on_with(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, remove, done = over(here / "hpcsched-run"), cleaning._remove, list[str]()

    def dies(item: Any) -> int:
        if len(done) == 2:
            raise StoreError("the power is gone")
        done.append(item.parts[-1])
        return remove(item)

    monkeypatch.setattr(cleaning, "_remove", dies)
    assert clean(run, "--yes")[0] == 1 and (run / "run.json").exists()
    monkeypatch.setattr(cleaning, "_remove", remove)
    assert not (run / "jobs/1/STATE.json").exists()  # before what it tells of
    assert json.loads(clean("--json")[1])["runs"][0]["half"]
    assert clean(run, "--yes")[0] == 0 and not run.exists()


def test_results_and_what_functions_need_are_no_checkpoints(here: Path) -> None:
    runs = [over(here / "a"), over(here / "b", run_id="2" * 32)]
    results = ["outcome.pickle", "metrics.jsonl", "adapter/model.safetensors", "checkpoint/best.pt"]
    for run in runs:
        (run / "calls").mkdir()
        (run / "calls" / "1.pickle").write_text("f")
        for name in results:
            (run / "jobs/1" / name).parent.mkdir(exist_ok=True)
            (run / "jobs/1" / name).write_text("dear")
    assert clean(runs[0], "--only-checkpoints", "--yes")[0] == 0
    assert not (runs[0] / "jobs/1/checkpoint/step-1.pt").exists()
    assert clean(runs[1], "--keep-checkpoints", "--yes")[0] == 0
    for run in runs:
        assert (run / "calls/1.pickle").exists() and all((run / "jobs/1" / name).exists() for name in results)
    assert "with results of jobs" in clean(runs[0])[1]
    assert clean(runs[0], "--yes")[0] == 0 and not runs[0].exists()


def test_an_agent_of_another_host_without_a_word(here: Path) -> None:
    near = a_run(here / "near", run_id="2" * 32, host=os.uname().nodename, jobs=DONE)
    record = RunDir(near).read_record()
    assert record
    record.pid, record.started = 1, 1  # of another container with this name
    RunDir(near).write_record(record)
    assert "wait a minute" in clean(near, "--with-work-left", "--yes")[1] and (near / "run.json").exists()
    run = a_run(here / "r", run_id=RUN_ID, age_s=600, jobs=DONE)
    assert "wait an hour" in clean(run, "--with-work-left", "--yes")[1]
    os.utime(run / "status.json", (1e9, 1e9))
    assert "ended without a word" in clean(run, "--yes")[1] and (run / "run.json").exists()
    assert clean(run, "--with-work-left", "--yes")[0] == 0 and not run.exists()


def test_what_comes_meanwhile_is_not_removed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(over(here / "r"))
    found = left_by(run)
    new = run.inbox / "new" / "1"
    new.write_text('{"command": "submit"}')
    with pytest.raises(RunDirError, match="jobs wait there meanwhile"):
        remove(found, What.ALL)
    assert new.exists()
    new.unlink()
    lock = RunLock(run)
    with pytest.raises(RunDirError, match="another agent"):
        remove(found, What.ALL)
    lock.release()
    os.utime(run.status)  # an agent has come and gone
    with pytest.raises(RunDirError, match="changed meanwhile"):
        remove(found, What.ALL)
    assert (run.root / "jobs/1/checkpoint/step-1.pt").exists()

    first = cleaning._remove

    def agent_begins(item: Any) -> int:  # on another host, which the lock does not reach
        (run.root / CLEANED).unlink()
        return first(item)

    monkeypatch.setattr(cleaning, "_remove", agent_begins)
    with pytest.raises(RunDirError, match="has begun there"):
        remove(left_by(run), What.CHECKPOINTS)
    assert (run.root / "jobs/1/checkpoint/step-1.pt").exists()


def test_a_lock_whose_file_is_removed_is_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, flock = RunDir(over(here / "r")), fcntl.flock

    def late(descriptor: int, how: int) -> None:
        (run.root / "agent.lock").unlink()
        flock(descriptor, how)

    monkeypatch.setattr("hpcsched.store.rundir.fcntl.flock", late)
    with pytest.raises(RunDirError, match="being removed"):
        RunLock(run)


def test_copies_and_links_take_nothing_along(here: Path) -> None:
    (here / "place" / RUN_ID / "1").mkdir(parents=True)
    (here / "place" / RUN_ID / "1" / "step-1.pt").write_text("x")
    run = over(here / "elsewhere" / "run")
    record = RunDir(run).read_record()
    assert record
    record.checkpoints = str(here / "place")
    RunDir(run).write_record(record)
    copy = shutil.copytree(run, here / "copy")
    (here / "hpcsched-run").symlink_to(run)
    assert clean("--older-than", "0", "--yes")[0] == 0 and (run / "run.json").exists()
    assert clean(copy, "--yes")[0] == 0 and not copy.exists()
    assert (here / "place" / RUN_ID / "1" / "step-1.pt").exists() and registry.find(RUN_ID)
    assert clean(run, "--yes")[0] == 0 and not (here / "place" / RUN_ID).exists()
    assert registry.find(RUN_ID) is None and (here / "place").is_dir()


def test_the_archive_of_a_journal_goes_with_it(here: Path) -> None:
    run = RunDir(over(here / "r"))
    archive = run.root / "journal"
    archive.mkdir()
    (archive / "000000000009.jsonl.gz").write_bytes(b"x" * 100)
    remove(left_by(run), What.OTHERS)
    assert [*archive.iterdir()]
    remove(left_by(run), What.ALL)
    assert not run.root.exists()
