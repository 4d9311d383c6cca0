"""An agent in the background: its words, and what bad input leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.agent.inbox import Command, Inbox, send
from hpcsched.cli.run.staying import LOG, in_foreground, tidy
from hpcsched.store.rundir import RunDir


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["run", "--detach", "--stay"], ["run", "--stay"]),
        (["run", "j.toml", "--detach"], ["run", "j.toml"]),
        (["run", "--detach", "--", "x", "--detach"], ["run", "--", "x", "--detach"]),
    ],
)
def test_what_a_job_is_told_stays(words: list[str], left: list[str]) -> None:
    assert in_foreground(words) == left


def test_nothing_is_left_but_what_others_have_put_there(tmp_path: Path) -> None:
    empty, used = RunDir(tmp_path / "empty"), RunDir(tmp_path / "used")
    for rundir in (empty, used):
        rundir.make()
        (rundir.root / LOG).write_text("no such file")
    send(used, Command(command="submit"))
    for rundir in (empty, used):
        tidy(rundir)
    assert not empty.root.exists()
    assert [command.command for _, command in Inbox.peek(used)] == ["submit"]
    assert (used.inbox / "ack").is_dir()
