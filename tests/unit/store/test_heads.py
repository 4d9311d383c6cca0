"""The numbers of a run's agents: one has each, whoever comes at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcsched.store import heads
from hpcsched.store.heads import (
    Superseded,
    claim_number,
    give_up_number,
    keep_options,
    kept_options,
    must_lead,
)
from hpcsched.store.rundir import RunDir, RunDirError, RunRecord


def record(epoch: int) -> RunRecord:
    return RunRecord(
        id="r",
        version="0",
        host="n1",
        pid=1,
        started=1,
        began=0.0,
        devices="cpu:1",
        policy="marble",
        epoch=epoch,
    )


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.make()
    return rundir


def test_numbers_go_up_and_old_claims_go(rundir: RunDir) -> None:
    assert claim_number(rundir) == 1
    rundir.write_record(record(1))
    assert claim_number(rundir) == 2
    assert [path.name for path in rundir.root.glob("agent-*")] == ["agent-2"]
    rundir.write_record(record(2))
    must_lead(rundir, 2)
    must_lead(rundir, 3)
    with pytest.raises(Superseded):
        must_lead(rundir, 1)


def test_who_begins_keeps_others_out_until_it_has_died(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_number(rundir)
    with pytest.raises(RunDirError):
        claim_number(rundir)
    monkeypatch.setattr(heads, "process_started", lambda pid: None)
    assert claim_number(rundir) == 2


def test_one_on_another_host_has_its_time_to_begin(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (rundir.root / "agent-1").write_text('{"host": "elsewhere", "pid": 1, "started": 1}')
    with pytest.raises(RunDirError):
        claim_number(rundir)
    long_ago = (rundir.root / "agent-1").stat().st_mtime - heads.BEGINS_WITHIN_S - 1.0
    os.utime(rundir.root / "agent-1", (long_ago, long_ago))
    assert claim_number(rundir) == 2


def test_of_many_one_has_the_number(rundir: RunDir) -> None:
    rundir.write_record(record(6))

    def claim(_: int) -> int:
        try:
            return claim_number(rundir)
        except RunDirError:
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == [0] * 7 + [7]


def test_of_two_that_saw_the_same_one_has_the_number(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_claims", lambda rundir: {})
    assert claim_number(rundir) == 1
    claim = (rundir.root / "agent-1").read_text()
    with pytest.raises(RunDirError):
        claim_number(rundir)
    assert (rundir.root / "agent-1").read_text() == claim


def test_a_number_that_is_given_up_can_be_had_again_but_not_one_in_use(rundir: RunDir) -> None:
    give_up_number(rundir, claim_number(rundir))
    assert claim_number(rundir) == 1
    rundir.write_record(record(1))
    give_up_number(rundir, 1)
    assert (rundir.root / "agent-1").exists() and claim_number(rundir) == 2


@pytest.mark.parametrize("name", ["agent-", "agent-x", "agent-²", "agent-1.tmp", "agent-01x"])
def test_other_files_are_no_claims(rundir: RunDir, name: str) -> None:
    (rundir.root / name).write_text("not JSON")
    assert claim_number(rundir) == 1


def test_a_claim_that_cannot_be_read_is_one_of_another_host(rundir: RunDir) -> None:
    (rundir.root / "agent-4").write_text("torn")
    with pytest.raises(RunDirError):
        claim_number(rundir)


def test_options_are_kept_for_this_user_alone(rundir: RunDir) -> None:
    assert kept_options(rundir) is None
    keep_options(rundir, ("--margin=90", "--notify-webhook=https://secret"))
    assert kept_options(rundir) == ("--margin=90", "--notify-webhook=https://secret")
    assert (rundir.root / heads.OPTIONS).stat().st_mode & 0o777 == 0o600


def test_a_record_of_a_run_that_is_not_joinable_is_followed_by_number_one(rundir: RunDir) -> None:
    rundir.write_record(record(-5))
    assert claim_number(rundir) == 1
