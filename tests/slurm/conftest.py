"""A real Slurm for the tests in this directory: brought up once, taken down at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from debian import need

HERE = Path(__file__).parent
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})
HEALTHY_S = 60.0


@dataclass
class RealSlurm:
    """The cluster: two nodes of six pretended GPUs, partitions as `up` says."""

    folder: Path
    env: Mapping[str, str]
    work: Path
    jobs: list[str] = field(default_factory=list)

    def run(self, *argv: str, timeout_s: float = 30.0, check: bool = True) -> str:
        """What a command printed; fails the test when it does not end with 0."""
        ended = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        assert ended.returncode == 0 or not check, f"{argv}: {ended.returncode} {ended.stderr}{ended.stdout}"
        return ended.stdout

    def sbatch(self, script: str, *options: str, cwd: Path | None = None) -> str:
        """Submits a batch script; its output goes where `log` finds it."""
        file = self.work / f"script-{len(self.jobs)}-{time.monotonic_ns()}.sh"
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        submitted = subprocess.run(
            ("sbatch", "--parsable", f"--output={self.work}/%j.out", *options, str(file)),
            env={**self.env, "SBATCH_OPEN_MODE": "append"},
            cwd=cwd or self.work,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        self.jobs.append(job)
        return job

    def state(self, job: str) -> str:
        """Slurm's word for a job, such as PENDING; "" when it has forgotten it."""
        rows = self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%A %T", check=False).splitlines()
        return next((row.split()[1] for row in rows if row.split()[0] == job), "")

    def wait(self, job: str, states: Collection[str] = ENDED, timeout_s: float = 90.0) -> str:
        """Waits until the job is in one of these states, and says which."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}:\n{self.log(job)}"
            time.sleep(0.1)
        return state

    def wait_for(self, file: Path, timeout_s: float = 90.0) -> str:
        """Waits until a file a job writes is there and ends with a whole line; its text."""
        deadline = time.monotonic() + timeout_s
        while not (file.exists() and file.read_text().endswith("\n")):
            if time.monotonic() > deadline:
                shown = [self.run("scontrol", "-o", "show", "job", job, check=False) for job in self.jobs]
                logs = [self.log(job) for job in self.jobs]
                for log in sorted(self.folder.glob("slurmd-*.log")):
                    logs += [f"{log.name}:", *log.read_text(errors="replace").splitlines()[-20:]]
                pytest.fail("\n".join((f"no {file.name} after {timeout_s:g} s", *logs, *shown)))
            time.sleep(0.05)
        return file.read_text()

    def start_again(self, job: str, *changes: str, check: bool = True) -> None:
        """Has a requeued job, which Slurm holds back for two minutes, start at once."""
        self.rest()
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", *changes, check=check)

    def rest(self) -> None:
        """Lets a second pass: in the one in which it has ended a job, a node would not start it again."""
        time.sleep(1.1)

    def cancel(self, *jobs: str) -> None:
        """Ends jobs, at once."""
        if jobs:
            self.run("scancel", "--full", "--signal=KILL", *jobs, check=False)
            self.run("scancel", *jobs, check=False)

    def log(self, job: str) -> str:
        """What the job's script has printed so far."""
        file = self.work / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def daemon(self, name: str) -> int:
        """The process id of `slurmctld`, `slurmd-node1` or `slurmd-node2`."""
        return int((self.folder / f"{name}.pid").read_text())

    def signal(self, name: str, number: signal.Signals) -> None:
        """To a daemon."""
        os.kill(self.daemon(name), number)

    def tidy(self) -> None:
        """Cancels what a test has submitted, and waits until the nodes are free for the next one."""
        self.cancel(*self.jobs)
        self.jobs.clear()
        deadline = time.monotonic() + HEALTHY_S
        while self.run("squeue", "-h", "-o", "%A", check=False).strip() and time.monotonic() < deadline:
            left = self.run("squeue", "-h", "-o", "%A", check=False).split()
            self.cancel(*left)
            time.sleep(0.1)


@contextlib.contextmanager
def brought_up(work: Path, **settings: str) -> Iterator[RealSlurm]:
    """A cluster with these settings of `up`; skips where it cannot be."""
    if os.environ.get("HPCSCHED_TEST_SLURM") == "off":
        pytest.skip("HPCSCHED_TEST_SLURM=off")
    need(("munged", "slurmctld", "slurmd", "sbatch"), PACKAGES)
    environ = {**os.environ, **settings}
    up = subprocess.run((sys.executable, str(HERE / "up")), env=environ, capture_output=True, text=True)
    if up.returncode != 0:
        pytest.skip(f"Slurm does not start here: {(up.stderr.strip().splitlines() or ['?'])[-1]}")
    folder = Path(up.stdout.strip())
    mine = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
    env = {
        **mine,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
    }
    try:
        yield RealSlurm(folder, env, work)
    finally:
        subprocess.run((sys.executable, str(HERE / "down"), str(folder)), check=False)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSlurm]:
    with brought_up(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm_by_cgroup(tmp_path: Path) -> Iterator[RealSlurm]:
    """A cluster of its own that keeps processes, cores and GPUs apart, as production machines do."""
    work = tmp_path / "slurm"
    work.mkdir()
    # Slurm's sockets are below it, and the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as short:
        own = {"HPCSCHED_TEST_SLURM_DIR": f"{short}/cluster", "HPCSCHED_TEST_SLURM_PORTS": ""}
        with brought_up(work, SLURM_TEST_CGROUP="1", **own) as cluster:
            yield cluster
            cluster.tidy()


@pytest.fixture
def slurm(slurm_cluster: RealSlurm) -> Iterator[RealSlurm]:
    """The cluster, with nothing on it before and after the test, and the environment as it was."""
    before = dict(slurm_cluster.env)
    yield slurm_cluster
    slurm_cluster.env = before
    slurm_cluster.tidy()
