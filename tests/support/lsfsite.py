"""What a user of the stand-in of LSF has: a directory, job files, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lsfstandin import ENDED, Cluster, Job

PATIENCE_S = 120.0
"""How long anything may take that is not about time."""


class Site:
    """A job file, a run directory, and the commands of LSF and hpcsched as the user types them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.dir = cluster, folder, folder / "run"
        foreign = ("HPCSCHED_", "SLURM_", "LSB_", "LSF_")
        ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.env = {
            **ours,
            "PATH": f"{cluster.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HPCSCHED_DATABASE": str(folder / "db.sqlite"),
            "HPCSCHED_SITE_CONFIG": str(folder / "none.toml"),
            "HPCSCHED_INTERFACE": "127.0.0.1",
            "XDG_CONFIG_HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
        }

    def run(self, *argv: str, stdin: str = "") -> str:
        """What a command printed; fails the test when it does not end with 0."""
        ended = subprocess.run(
            argv, env=self.env, cwd=self.folder, input=stdin, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, f"{argv}: {ended.returncode} {ended.stderr}{ended.stdout}"
        return ended.stdout

    def submit(self, jobs: str, *options: str) -> Job:
        """`hpcsched script lsf`, and what it has written to bsub; the batch job."""
        (self.folder / "jobs.toml").write_text("schema = 1\n" + jobs)
        self.run("hpcsched", "script", "lsf", "jobs.toml", "--dir", "run", "-o", "train.lsf", *options)
        said = self.run("bsub", stdin=(self.folder / "train.lsf").read_text())
        return self.cluster.jobs[said.split("<")[1].split(">")[0]]

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of the run, as its newest snapshot has them."""
        snapshot = self.dir / "status.json"
        return json.loads(snapshot.read_text())["jobs"] if snapshot.exists() else []

    def log(self, job: Job) -> str:
        """What the batch job has written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"*{job.id}.out")))

    def wait(self, job: Job, what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Until `what` gives something; fails when it has not in time, or when the batch job has ended."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            if time.monotonic() > deadline or job.stat in ENDED:
                nodes = "".join(path.read_text() for path in self.dir.glob("nodes.log"))
                pytest.fail("\n".join((f"job is {job.stat}", *job.events, self.log(job), nodes)))
            time.sleep(0.1)
        return found

    def ended(self, job: Job, timeout_s: float = PATIENCE_S) -> str:
        """Waits for the end of the batch job; what it has written."""
        self.wait(job, lambda: job.stat in ENDED, timeout_s)
        return self.log(job)

    def ready(self) -> int:
        """How many attempts have said that they can be suspended."""
        return len(list(self.dir.glob("jobs/*/ready.*")))

    def steps(self) -> dict[str, int]:
        """The step on disk, by job."""
        found = {}
        for path in sorted(self.dir.glob("jobs/*/STATE.json")):
            found[path.parent.name] = json.loads(path.read_text())["step"]
        return found
