"""`status` without a sign of life asks the batch system once; `status --all` lists the user's runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rundirs import a_home, a_run

from hpcsched.cli.main import cli


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_home(tmp_path, monkeypatch)


def status(*words: str) -> Result:
    return CliRunner().invoke(cli, ["status", *words])


def test_a_job_of_another_cluster_is_not_said_to_have_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("scontrol", 'echo "ClusterName             = marble"'),
        (
            "squeue",
            'case "$*" in *--clusters=summit*) echo "no database" >&2; exit 1 ;; esac',
        ),
    ):
        command = home / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    a_run(home / "hpcsched-run", age_s=60, cluster="summit")
    said = "slurm does not answer here about job 123 of cluster summit: if that is not the cluster here, ask"
    assert said in status().stderr
