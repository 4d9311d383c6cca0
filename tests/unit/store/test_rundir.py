"""A run directory that a group may watch: what it reads, what stays private, and who may change it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpcsched.agent.inbox import Command, send
from hpcsched.cli.common import find_run
from hpcsched.cli.run.watching import closed_before, group_of
from hpcsched.config import Settings
from hpcsched.core.events import DrainRequested
from hpcsched.errors import ConfigError, StoreError
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir, RunDirError, RunRecord
from hpcsched.watchers import make_folder, mode_in


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


RECORD = RunRecord(
    id="0", version="0.6.0", host="h", pid=1, started=1, began=0.0, devices="cpu:1", policy="marble"
)


def test_what_is_shared_is_read_by_the_group_and_the_inbox_is_not(run: RunDir) -> None:
    run.make()
    Journal(run.journal).close()
    make_folder(run.job(1))
    (run.job(1) / "hpcsched-1.out").touch()
    assert [mode(path) for path in (run.root, run.journal, run.job(1))] == [0o700, 0o600, 0o700]
    run.make(share=os.getegid())
    run.make()  # whoever comes later leaves it so
    run.write_record(RECORD)
    make_folder(run.job(2))
    assert {mode(path) for path in (run.root, run.job(1), run.job(2), run.job(1).parent)} == {0o2750}
    assert {mode(path) for path in (run.record, run.journal, run.job(1) / "hpcsched-1.out")} == {0o640}
    assert {mode(path) & 0o077 for path in (run.inbox, *run.inbox.iterdir())} == {0}
    (run.job(1) / "checkpoint").mkdir(mode=0o700)
    assert mode_in(run.job(1) / "checkpoint") == 0o600 and mode_in(run.inbox) == 0o600


def test_a_full_disk_is_a_reason_for_another_directory_only_before_the_run_begins(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with (
        monkeypatch.context() as patch,
        pytest.raises(StoreError, match="go on once that is mended") as caught,
    ):
        patch.setattr(Path, "mkdir", stale)  # then nothing says whether one has begun
        run.make()
    assert caught.value.exit_code == 1

    with monkeypatch.context() as patch, pytest.raises(RunDirError, match="choose another --dir"):
        patch.setattr(Path, "touch", full)
        run.make()
    journal = Journal(run.journal)
    journal.append([DrainRequested(at=0.0, cause="x")])
    journal.close()
    with (
        monkeypatch.context() as patch,
        pytest.raises(StoreError, match="go on once that is mended") as caught,
    ):
        patch.setattr(Path, "touch", full)
        run.make()
    assert caught.value.exit_code == 1


def test_others_watch_and_do_not_touch(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.make(share=os.getegid())
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    looking = click.Context(click.Command("status"), info_name="status", obj=Settings())
    assert find_run(looking, str(run.root)).root == run.root
    assert "you can watch it, and not change it" in capsys.readouterr().err
    with pytest.raises(RunDirError, match="not to you: look at it"):
        find_run(click.Context(click.Command("cancel"), info_name="cancel", obj=Settings()), str(run.root))
    with pytest.raises(RunDirError, match="not to you: look at it"):
        send(run, Command(command="drain"))  # as hpcsched.Run does


def test_only_a_group_of_ones_own_and_a_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--share: 'nobody-has-this', which is no group; accepted: one of"):
        group_of("nobody-has-this")
    way = tmp_path / "closed" / "run"
    way.parent.mkdir(mode=0o700)
    assert closed_before(way, os.getegid()) is not None
    way.parent.chmod(0o710)
    assert closed_before(way, os.getegid()) != way.parent
