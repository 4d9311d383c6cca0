"""The run that is meant where none is named, and the place of the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
from rundirs import a_home, a_run

from hpcsched.store import run_folders
from hpcsched.store.rundir import RunDir

LONG_AGO_S = 1e5


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def begun(folder: Path, state: str, *, age_s: float = LONG_AGO_S) -> Path:
    """A run directory of an agent on another host, whose last word is so old."""
    a_run(folder, state=state, age_s=age_s)
    (folder / "journal.jsonl").write_text("{}\n")
    return folder


def test_the_first_run_and_all_commands_mean_the_usual_folder(home: Path) -> None:
    assert run_folders.newest(home) == run_folders.of_next_run(home) == home / "hpcsched-run"
    assert run_folders.named(home / "hpcsched-run", home) == ""


def test_a_run_that_has_finished_leaves_its_place_and_the_next_gets_a_number(home: Path) -> None:
    first = begun(home / "hpcsched-run", "FINISHED")
    assert run_folders.newest(home) == first
    assert run_folders.of_next_run(home) == home / "hpcsched-run-2"
    second = begun(home / "hpcsched-run-2", "FINISHED")
    assert run_folders.newest(home) == second
    assert run_folders.of_next_run(home) == home / "hpcsched-run-3"
    assert run_folders.named(first, home) == f" --dir {first}" and run_folders.named(second, home) == ""


@pytest.mark.parametrize("state", ["RUNNING", "DRAINING", "STOPPED"])
def test_no_number_hides_a_run_with_work_left(home: Path, state: str) -> None:
    begun(home / "hpcsched-run", "FINISHED")
    second = begun(home / "hpcsched-run-2", state)
    assert run_folders.newest(home) == run_folders.of_next_run(home) == second


def test_the_run_that_lives_is_meant_whatever_its_number(home: Path) -> None:
    first = begun(home / "hpcsched-run", "RUNNING", age_s=1.0)
    begun(home / "hpcsched-run-2", "FINISHED")
    assert run_folders.newest(home) == run_folders.of_next_run(home) == first


def test_an_agent_that_leaves_does_not_hide_what_waits_for_the_next_run(home: Path) -> None:
    begun(home / "hpcsched-run", "FINISHED", age_s=0.0)
    second = RunDir(home / "hpcsched-run-2")
    second.make()
    (second.inbox / "new" / "1").write_text('{"command": "submit"}')
    assert run_folders.newest(home) == run_folders.of_next_run(home) == second.root


def test_a_run_whose_last_word_cannot_be_read_keeps_its_place(home: Path) -> None:
    first = begun(home / "hpcsched-run", "FINISHED")
    (first / "status.json").write_text("{")
    assert run_folders.of_next_run(home) == first


def test_folders_in_which_nothing_has_begun_do_not_count_unless_something_waits_there(home: Path) -> None:
    first = begun(home / "hpcsched-run", "FINISHED")
    second = home / "hpcsched-run-2"
    RunDir(second).make()
    assert run_folders.newest(home) == first and run_folders.of_next_run(home) == second
    (second / "inbox" / "new" / "1").write_text('{"command": "submit"}')
    assert run_folders.newest(home) == run_folders.of_next_run(home) == second


def test_a_gap_in_the_numbers_is_left(home: Path) -> None:
    begun(home / "hpcsched-run-7", "FINISHED")
    assert run_folders.newest(home) == home / "hpcsched-run-7"
    assert run_folders.of_next_run(home) == home / "hpcsched-run-8"


@pytest.mark.parametrize("name", ["hpcsched-run-1", "hpcsched-run-02", "hpcsched-run-x", "hpcsched-run.old"])
def test_other_names_are_not_runs_of_ours(home: Path, name: str) -> None:
    begun(home / name, "FINISHED")
    (home / "hpcsched-run-5").write_text("a file")
    assert run_folders.newest(home) == run_folders.of_next_run(home) == home / "hpcsched-run"


def test_the_command_that_goes_on_can_be_pasted(home: Path) -> None:
    assert run_folders.go_on(home / "hpcsched-run") == "hpcsched run --resume"
    (home / "pooled").mkdir()
    (home / "pooled" / "pool.json").write_text('{"file": "/home/me/my pool.toml"}')
    for told in (run_folders.go_on, run_folders.begin):
        assert told(home / "pooled") == "hpcsched pool start '/home/me/my pool.toml'"
    assert run_folders.begin(home / "my run") == f"hpcsched run --dir '{home}/my run'"
    assert run_folders.go_on(home / "my run") == f"hpcsched run --resume --dir '{home}/my run'"
