"""`hpcsched clean` stays on the file system of the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from rundirs import a_home, a_run
from smalldisk import small_disk

from hpcsched.core.model import JobState
from hpcsched.store.cleaning import remove
from hpcsched.store.leftovers import What, left_by
from hpcsched.store.rundir import RunDir


def test_what_is_mounted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_home(tmp_path, monkeypatch)
    run = RunDir(
        a_run(tmp_path / "r", state="FINISHED", kind="none", jobs=(JobState.COMPLETED,), run_id="1" * 32)
    )
    checkpoints, before = run.job(1) / "checkpoint", run.job(1) / "checkpoint.before.2"
    for folder in (checkpoints, before / "below"):
        folder.mkdir(parents=True)
    (checkpoints / "step-1.pt").write_text("x")
    with small_disk(before / "below"):
        (before / "below" / "dear").write_text("x")
        found = left_by(run)
        assert found.foreign == [before]
        remove(found, What.ALL)
        assert (before / "below" / "dear").read_text() == "x" and not checkpoints.exists()
        assert run.record.exists()
    with small_disk(before):
        (before / "dear").write_text("x")
        remove(left_by(run), What.ALL)
        assert (before / "dear").exists()
