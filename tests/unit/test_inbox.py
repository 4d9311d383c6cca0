"""Commands that an agent has answered are not carried out again by the next one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from hpcsched.agent.inbox import Answer, Command, Inbox, send, wait_for_answer
from hpcsched.store.rundir import RunDir

REFUSED = Answer(error="no such job")


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path)
    rundir.make()
    return rundir


def killed_after_its_answer(rundir: RunDir) -> str:
    """What an agent leaves that dies between the answer to a command and the end of its file."""
    name = send(rundir, Command(command="cancel", targets=[7]))
    (rundir.inbox / "ack" / name).write_bytes(msgspec.json.encode(REFUSED))
    return name


def test_a_command_that_was_answered_is_not_carried_out_by_the_next_agent(rundir: RunDir) -> None:
    killed_after_its_answer(rundir)
    assert not Inbox(rundir).read()
    assert not [*(rundir.inbox / "ack").iterdir()], "its sender is gone"


def test_nor_where_its_sender_has_taken_the_answer(rundir: RunDir) -> None:
    name = killed_after_its_answer(rundir)
    assert wait_for_answer(rundir, name, timeout_s=0) == REFUSED
    assert not Inbox(rundir).read()


def test_a_command_without_an_answer_waits_for_the_next_agent(rundir: RunDir) -> None:
    name = send(rundir, Command(command="cancel", targets=[7]))
    assert [found for found, _ in Inbox(rundir).read()] == [name]


def test_what_was_sent_is_there_after_a_loss_of_power(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, own, synced = rundir.inbox / "new", os.fsync, list[list[str]]()

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == new:
            synced.append([path.name for path in new.iterdir()])
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert synced == [] and [send(rundir, Command(command="drain"))] == synced[-1]


def test_an_answer_stays_as_long_as_its_command_cannot_be_removed(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = killed_after_its_answer(rundir)
    own = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "new":
            raise OSError(errno.EIO, "a bad disk")
        own(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert wait_for_answer(rundir, name, timeout_s=0) == REFUSED
    assert not Inbox(rundir).read()
    monkeypatch.undo()
    assert not Inbox(rundir).read() and not [*(rundir.inbox / "new").iterdir()]
