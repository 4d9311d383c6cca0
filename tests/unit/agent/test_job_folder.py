"""What is done in a job's folder before an attempt begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsched.agent.job_folder import is_aside, last_line, mark_attempt, put_aside


def test_attempts_are_told_apart_in_one_output(tmp_path: Path) -> None:
    output = tmp_path / "out"
    mark_attempt(output, 2, where="GPU 0", resumed=False, step=None)
    assert not output.exists(), "nothing to tell apart"
    output.write_text("first\nno end of line")
    mark_attempt(output, 2, where="GPUs 0,1", resumed=True, step=120)
    first, last, line = output.read_text().splitlines()
    assert (first, last) == ("first", "no end of line")
    assert line.startswith("hpcsched: ---- attempt 2, ")
    assert line.endswith(", GPUs 0,1, from step 120 ----")
    assert last_line(output) == "", "the second attempt has said nothing"
    with output.open("a") as file:
        file.write("a bar\rsecond\n\n")
    assert last_line(output) == "second"
    mark_attempt(output, 3, where="CPU cores", resumed=False, step=None)
    assert output.read_text().splitlines()[-1].endswith(", CPU cores, from its beginning ----")
    mark_attempt(output, 4, where="GPU 0", resumed=True, step=None)
    assert output.read_text().splitlines()[-1].endswith(", GPU 0, from its checkpoint ----")


@pytest.mark.parametrize("saved", [True, False])
def test_what_was_saved_is_put_aside_once(tmp_path: Path, saved: bool) -> None:
    checkpoints, state = tmp_path / "checkpoint", tmp_path / "STATE.json"
    if saved:
        checkpoints.mkdir()
        (checkpoints / "count").write_text("40")
        state.write_text('{"step": 40}')
    assert not is_aside(tmp_path, 3)
    put_aside(tmp_path, checkpoints, 3)
    assert is_aside(tmp_path, 3)
    assert not state.exists()
    assert not checkpoints.exists()
    assert (tmp_path / "STATE.before.3.json").read_text() == ('{"step": 40}' if saved else "")
    assert (tmp_path / "checkpoint.before.3" / "count").exists() is saved
    state.write_text('{"step": 5}')
    put_aside(tmp_path, checkpoints, 3)
    assert state.exists(), "that is the new beginning's own"


def test_an_output_may_be_anything_and_nobody_waits_for_it(tmp_path: Path) -> None:
    pipe, endless, folder = tmp_path / "pipe", tmp_path / "endless", tmp_path / "folder"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    folder.mkdir()
    for output in (pipe, endless, folder):
        mark_attempt(output, 2, where="GPU 0", resumed=False, step=None)
        assert last_line(output) == ""
    long = tmp_path / "long"
    long.write_text("x" * 10_000 + "\nthe end")
    assert last_line(long) == "the end"
