"""Helpers of the tests of `hpcsched simulate`: a place with jobs and profiles, and the command in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.core.model import JobSpec
from hpcsched.errors import HpcschedError
from hpcsched.testing.builders import a_job, a_profile

PROFILES = (
    a_profile("a", [10.0, 18.0, 24.0], start_s=5.0, suspend_s=3.0, resume_s=4.0),
    a_profile("b", [5.0, 9.5, 14.0, 18.0], start_s=2.0, suspend_s=8.0, resume_s=6.0),
)
JOBS = (
    a_job("one", "a", 3000),
    a_job("two", "b", 4000),
    a_job("three", "a", 900, submit_at=40.0),
    a_job("four", "b", 1500, after=("one",)),
)
SET = ("jobs.toml", "--gpus-per-node", 4, "--profiles", "p.json")
"""The jobs above, in files that `make_place` writes."""


def make_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, without the caller's settings; profiles in p.json."""
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "CONFIG", "GPUS", "NODES", "POLICY", "POLICY_OPTION", "PROFILES", "DEVICE_TYPE"):
        monkeypatch.delenv(f"HPCSCHED_{name}", raising=False)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "none.sqlite"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keys = ("model", "device", "throughput", "start_s", "suspend_s", "resume_s")
    tables = [{key: getattr(profile, key) for key in keys} for profile in PROFILES]
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "profiles": tables}))
    write_set(JOBS)
    return tmp_path


def write_set(jobs: Sequence[JobSpec], path: str = "jobs.toml", head: str = "") -> None:
    lines = ["schema = 1", head]
    for job in jobs:
        lines += ["[[job]]", f'name = "{job.name}"', f'model = "{job.model}"', "replay = true"]
        lines += [f"steps = {job.steps}", f"after = {json.dumps(job.after)}", f"submit_at = {job.submit_at}"]
    Path(path).write_text("\n".join(lines))


def call(*words: object) -> click.testing.Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, words)])


def shown(*words: object) -> str:
    done = call(*words)
    assert done.exit_code == 0, done.exception
    return done.stdout


def page(*words: object) -> list[dict[str, Any]]:
    read = json.loads(shown(*words, "--json"))
    return read.get("results", [read])


def refused(*words: object, code: int = 2) -> str:
    done = call(*words)
    if isinstance(done.exception, HpcschedError):
        assert done.exception.exit_code == code, done.exception
        assert "\n" not in str(done.exception)
        return str(done.exception)
    assert done.exit_code == code, done.exception
    return done.stderr


def measures(text: str) -> dict[str, list[str]]:
    """The cells of each line of a comparison, by the line's label."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        label, *cells = re.split(r"  +", line.strip())
        rows.setdefault(label, cells)
    return rows
