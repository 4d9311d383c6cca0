"""A real SGE for the tests in this directory: brought up once, taken down at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from debian import need

HERE = Path(__file__).parent
PACKAGES = ("gridengine-master", "gridengine-exec", "gridengine-client")
FOREIGN = ("SGE_", "JOB_", "HPCSCHED_", "SLURM_", "LSB_")


class RealSge:
    """A user's directory on the cluster: job files, batch scripts, and what is seen of them from outside."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        own = dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines())
        mine = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.env = {**mine, **own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        # SGE hands nothing of the user's environment on: it stands in the script.
        self.settings = {
            "HPCSCHED_DATABASE": str(work / "db.sqlite"),
            "HPCSCHED_DEVICES": "replay:2@20",
            "HPCSCHED_PROFILES": "marble-summit",
            "HPCSCHED_SITE_CONFIG": str(work / "site.toml"),
            "HPCSCHED_INTERFACE": "127.0.0.1",
            "XDG_CONFIG_HOME": str(work),
            "XDG_STATE_HOME": str(work / "state"),
        }
        self.env |= self.settings
        (work / "site.toml").write_text('[script]\npe = "node"\n')

    def run(self, *argv: str, check: bool = True) -> str:
        """What a command printed; fails the test when it does not end with 0."""
        argv = (str(self.folder / "enter"), *argv)
        ended = subprocess.run(argv, env=self.env, cwd=self.work, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 or not check, f"{argv}: {ended.returncode} {ended.stderr}{ended.stdout}"
        return ended.stdout + ended.stderr

    def submit(self, name: str, sets: list[str], *options: str, run: str = "") -> str:
        """`hpcsched script sge` and qsub; the id of the batch job."""
        exports = [
            word for key, value in self.settings.items() for word in ("--setup", f"export {key}={value}")
        ]
        words = ("--gpus-per-node", "2", "--cpus", "2", "--name", name, "--margin", "20", *options, *exports)
        script = f"{name}.sge"
        self.run("hpcsched", "script", "sge", *sets, "--dir", name, "-o", script, *words)
        return self.run("qsub", "-terse", script).split(".")[0].strip()

    def log(self, name: str) -> str:
        """What the batch jobs of this name have written."""
        return "\n".join(path.read_text() for path in sorted(self.work.glob(f"{name}-*.out")))

    def status(self, run: str) -> dict[str, Any]:
        try:
            return json.loads((self.work / run / "status.json").read_text())
        except FileNotFoundError:
            return {"run": {"state": ""}, "jobs": []}

    def at_work(self, *runs: str) -> None:
        self.until(lambda: all(any(job.get("ready") for job in self.status(run)["jobs"]) for run in runs))

    def until(self, met: Callable[[], Any], timeout_s: float = 90.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := met()):
            if time.monotonic() > deadline:
                logs = [path.read_text() for path in sorted(self.work.glob("*.out"))]
                pytest.fail("\n".join((f"not within {timeout_s:g} s", self.run("qstat", check=False), *logs)))
            time.sleep(0.2)
        return found


@pytest.fixture(scope="session")
def sge_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.environ.get("HPCSCHED_TEST_SGE") == "off":
        pytest.skip("HPCSCHED_TEST_SGE=off")
    need(("sge_qmaster", "sge_execd", "qsub"), PACKAGES)
    environ = {**os.environ, "HPCSCHED_TEST_SGE_DIR": str(tmp_path_factory.mktemp("sge") / "cell")}
    folder = Path(environ["HPCSCHED_TEST_SGE_DIR"])
    try:
        up = subprocess.run((sys.executable, str(HERE / "up")), env=environ, capture_output=True, text=True)
        if up.returncode != 0:
            pytest.skip(f"SGE does not start here: {(up.stderr.strip().splitlines() or ['?'])[-1]}")
        yield folder
    finally:
        subprocess.run((sys.executable, str(HERE / "down"), str(folder)), check=False)


@pytest.fixture
def sge(sge_cluster: Path, tmp_path: Path) -> Iterator[RealSge]:
    site = RealSge(sge_cluster, tmp_path)
    yield site
    site.run("qdel", "-f", "-u", "*", check=False)
