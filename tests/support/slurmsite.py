"""A user of the real Slurm: job files, runs in batch jobs, and what is seen of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONE = """schema = 1
[defaults]
replay = true
model = "ResNet-50"
steps = 200000
[[job]]
name = "a"
"""
SET = """schema = 1
[defaults]
replay = true
model = "ResNet-50"
[[job]]
name = "a"
steps = {steps}
[[job]]
name = "b"
steps = {steps}
"""


class Site:
    """A user's directory on the cluster: a job file, a run directory, and the login node's view of them."""

    def __init__(self, slurm, folder: Path) -> None:
        self.slurm, self.folder, self.dir = slurm, folder, folder / "run"
        self.env = {
            **slurm.env,
            "HPCSCHED_DIR": str(self.dir),
            "HPCSCHED_DATABASE": str(folder / "db.sqlite"),
            "HPCSCHED_DEVICES": "replay:6@20",
            "HPCSCHED_PROFILES": "marble-summit",
            "HPCSCHED_SITE_CONFIG": str(folder / "none.toml"),
            "HPCSCHED_INTERFACE": "127.0.0.1",
            "XDG_CONFIG_HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        slurm.env = self.env

    def set_of(self, text: str) -> Path:
        path = self.folder / "jobs.toml"
        path.write_text(text)
        return path

    def submit(self, *options: str, run: str = "jobs.toml --requeue --margin 40", minutes: int = 10) -> str:
        script = f"#!/bin/bash\nexec hpcsched run {run}\n"
        return self.slurm.sbatch(script, f"--time={minutes}", "--gpus-per-node=6", *options, cwd=self.folder)

    def hpcsched(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ("hpcsched", *words), env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )

    def status(self) -> dict[str, Any]:
        """What `hpcsched status --json` prints, without a Python that starts for it every time."""
        try:
            return json.loads((self.dir / "status.json").read_text())
        except FileNotFoundError:
            return {"run": {"state": ""}, "jobs": []}

    def job(self, name: str) -> dict[str, Any]:
        return next((job for job in self.status()["jobs"] if job["name"] == name), {})

    def until(self, met: Callable[[], Any], timeout_s: float = 90.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := met()):
            logs = "\n".join(self.slurm.log(job) for job in self.slurm.jobs)
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.status()}\n{logs}"
            time.sleep(0.2)
        return found

    def at_work(self, *names: str) -> None:
        """Waits until these jobs run and can be suspended; the page tells of their steps only every 10 s."""
        self.until(lambda: all(self.job(name).get("ready") for name in names))

    def end_in(self, job: str, seconds: int) -> None:
        """An operator has the batch job end so soon, and its run look at once."""
        before = self.slurm.log(job).count("the allocation now ends at")
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.slurm.run("scontrol", "update", f"JobId={job}", f"EndTime={end}")
        self.slurm.run("scancel", "--batch", "--signal=USR1", job)
        self.until(lambda: self.slurm.log(job).count("the allocation now ends at") > before)
