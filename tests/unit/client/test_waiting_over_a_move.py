"""Waiting for jobs goes on while one agent of a run follows another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rundirs import a_run

from hpcsched.client import requests
from hpcsched.client.requests import wait_for
from hpcsched.core.model import JobState
from hpcsched.errors import NoSuchRun
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import Status


def jobs_of(status: Status) -> list:
    return list(status.jobs)


def test_who_waits_bears_that_no_agent_is_there_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    rundir = RunDir(a_run(folder, age_s=60.0))
    record = rundir.read_record()
    assert record
    with pytest.raises(NoSuchRun, match="agent is gone"):
        wait_for(rundir, jobs_of)
    rundir.write_record(msgspec.structs.replace(record, joinable=True))
    waited: list[float] = []

    def followed(seconds: float) -> None:
        waited.append(seconds)
        a_run(folder, jobs=(JobState.COMPLETED,) * 3)

    monkeypatch.setattr(requests.time, "sleep", followed)
    assert [job.state for job in wait_for(rundir, jobs_of)] == [JobState.COMPLETED] * 3
    assert len(waited) == 1
