"""`status` without a sign of life asks the batch system once; `status --all` lists the user's runs."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.main import cli
from hpcsched.core.model import JobState
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.status import AgentStatus, JobStatus, RunStatus, Status


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own directories, and none of his settings."""
    for name in [name for name in os.environ if name.startswith("HPCSCHED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "none.toml"))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(
    folder: Path,
    *,
    state: str = "RUNNING",
    age_s: float = 0.0,
    host: str = "elsewhere",
    kind: str = "slurm",
    left_s: float | None = None,
    cluster: str | None = None,
    run_id: str = "r1",
    jobs: tuple[JobState, ...] = (JobState.COMPLETED, JobState.RUNNING, JobState.PENDING),
) -> Path:
    """A run directory as an agent on `host` wrote it `age_s` ago; on this host it is this process."""
    rundir = RunDir(folder)
    rundir.make()
    now = datetime.now(UTC)
    deadline = None if left_s is None else (now + timedelta(seconds=left_s)).isoformat()
    job_id = None if kind == "none" else "123"
    allocation = {"kind": kind, "id": job_id, "cluster": cluster, "deadline": deadline}
    run = RunStatus(
        dir=str(folder),
        state=state,
        stale=False,
        seq=1,
        written_at=(now - timedelta(seconds=age_s)).isoformat(),
        policy="marble",
        agent=AgentStatus(host=host, pid=os.getpid()),
        allocation=allocation,
    )
    rows = [
        JobStatus(
            id=number,
            name=f"job-{number}",
            state=job,
            reason=None,
            role=None,
            gpus=[],
            hosts=[],
            step=None,
            steps=10,
            elapsed_s=0.0,
            eta_s=None,
            attempt=1,
            suspensions=0,
            exit=None,
        )
        for number, job in enumerate(jobs, 1)
    ]
    rundir.status.write_bytes(msgspec.json.encode(Status(run=run, gpus=[], jobs=rows)))
    os.utime(rundir.status, (now.timestamp() - age_s,) * 2)
    rundir.write_record(
        RunRecord(
            id=run_id,
            version="1",
            host=host,
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            began=0.0,
            devices="auto",
            policy="marble",
        )
    )
    return folder


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
