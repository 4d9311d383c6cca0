"""Run directories and their status, as agents leave them, for the commands that read these."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from hpcsched.core.model import JobState
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.status import AgentStatus, GpuStatus, JobStatus, RunStatus, Status


def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own directories below this one, which is the working directory, and no settings."""
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


def a_status(
    jobs: int = 5, hosts: int = 1, *, state: str = "RUNNING", stale: bool = False, age_s: float = 0.0
) -> Status:
    """Job 2 runs on all GPUs, 1 has completed, the others wait."""
    now = datetime.now(UTC)
    run = RunStatus(
        dir="/scratch/me/hpcsched-run",
        state=state,
        stale=stale,
        seq=1,
        written_at=(now - timedelta(seconds=age_s)).isoformat(),
        policy="marble",
        agent=AgentStatus(host="n1", pid=1),
        allocation={"kind": "slurm", "id": "123", "deadline": (now + timedelta(hours=2)).isoformat()},
    )
    gpus = [
        GpuStatus(
            index=h * 4 + g, host=f"node{h}", job=2, lane="foreground", utilisation=0.5, memory_mib=None
        )
        for h in range(hosts)
        for g in range(4)
    ]
    states = {1: JobState.COMPLETED, 2: JobState.RUNNING}
    rows = [
        JobStatus(
            id=i,
            name=f"a-training-with-quite-a-long-name-{i}",
            state=states.get(i, JobState.PENDING),
            reason=None if i < 3 else "Resources",
            role="primary" if i == 2 else None,
            gpus=[0, 1, 2, 3] if i == 2 else [],
            hosts=["node0"] if i == 2 else [],
            step=50 if i == 2 else None,
            steps=100,
            elapsed_s=60.0,
            eta_s=60.0 if i == 2 else None,
            attempt=1,
            suspensions=0,
            exit=None,
        )
        for i in range(1, jobs + 1)
    ]
    return Status(run=run, gpus=gpus, jobs=list(reversed(rows)))
