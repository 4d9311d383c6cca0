"""What `explain` says of a burst job: what its plans take, predicted and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcsched.cli.jobs import about_burst
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job

PAGE = {
    "schema": 1,
    "kept": "one rank",
    "compared": [
        {"name": "data parallel", "predicted_s": 0.0171, "measured_s": 0.018},
        {"name": "burst plan", "predicted_s": 0.0123, "measured_s": None},
        {"name": "one rank", "predicted_s": 0.0161, "measured_s": None, "refused": "no room"},
    ],
}


def said(folder: Path, text: str | None, kind: str = "burst") -> list[str]:
    driver = Driver(a_job("a", steps=10, gpus=1, strategy={"kind": kind}), gpus=1)
    job, rundir = driver.job("a"), RunDir(folder)
    if text is not None:
        rundir.job(job.id).mkdir(parents=True, exist_ok=True)
        (rundir.job(job.id) / "plan.json").write_text(text)
    return about_burst.as_it_is(about_burst.compared(rundir, job))


def test_each_plan_has_what_was_measured_and_what_was_predicted(tmp_path: Path) -> None:
    assert said(tmp_path, json.dumps(PAGE)) == [
        "trains by: one rank, the fastest as measured",
        "data parallel: 18 ms a step (predicted 17.1 ms)",
        "burst plan: not tried (predicted 12.3 ms)",
        "one rank: not tried, no room (predicted 16.1 ms)",
    ]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"compared": [{"name": 3}]}', '{"compared": 5}'])
def test_as_long_as_nothing_is_known_nothing_is_said(tmp_path: Path, text: str | None) -> None:
    assert said(tmp_path, text) == []


def test_other_jobs_have_no_plans(tmp_path: Path) -> None:
    assert said(tmp_path, json.dumps(PAGE), kind="ddp") == []
