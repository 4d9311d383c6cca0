"""The conformance suite for batch systems, over all of them; the vendors' commands are stand-ins."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from hpcsched.batch.base import BatchJobState, BatchSystem
from hpcsched.batch.local import Local
from hpcsched.batch.lsf import Lsf
from hpcsched.batch.pyslurm import PySlurm
from hpcsched.batch.sge import Sge
from hpcsched.batch.slurm import Slurm
from hpcsched.testing.batch import (
    LSF_JOB,
    SGE_HOSTS,
    SGE_JOB,
    SLURM_JOB,
    FakeCluster,
    FakeJob,
    FakeLsfCommands,
    FakeSgeCommands,
    FakeSlurmCommands,
    asked_directly,
    fake_pyslurm,
)
from hpcsched.testing.conformance_batch import BatchConformance

STATES = {
    "8": "PENDING",
    "9": "RUNNING",
    "10": "SUSPENDED",
    "11": "COMPLETED",
    "12": "FAILED",
    "13": "BAFFLED",
}
LIVES = {
    "8": BatchJobState.PENDING,
    "9": BatchJobState.RUNNING,
    "10": BatchJobState.SUSPENDED,
    "11": BatchJobState.ENDED,
    "12": BatchJobState.ENDED,
    "13": BatchJobState.UNKNOWN,
    "14": BatchJobState.ENDED,  # nobody has heard of it
}


def cluster(
    job: str, *, end: float | None = None, requeueable: bool = True, answers: bool = True
) -> FakeCluster:
    jobs = {name: FakeJob(name, state) for name, state in STATES.items()}
    hosts = ("h1", "h2") if job == LSF_JOB["LSB_JOBID"] else ("node1", "node2")
    jobs[job] = FakeJob(job, end=end, requeueable=requeueable, hosts=hosts)
    return FakeCluster(jobs, answers=answers)


class TestSlurmCommands(BatchConformance):
    def make(self, known: FakeCluster, environ: dict[str, str]) -> BatchSystem:
        return Slurm(environ, run=FakeSlurmCommands(known))

    def inside(self, *, end: float | None, requeueable: bool = True) -> BatchSystem:
        return self.make(cluster("7", end=end, requeueable=requeueable), SLURM_JOB)

    def outside(self) -> BatchSystem:
        return self.make(cluster("7"), {})

    def silent(self) -> BatchSystem:
        return self.make(cluster("7", answers=False), SLURM_JOB)

    def lives(self) -> tuple[BatchSystem, dict[str, BatchJobState]]:
        return self.make(cluster("7"), {}), LIVES


class TestPySlurm(TestSlurmCommands):
    def make(self, known: FakeCluster, environ: dict[str, str]) -> BatchSystem:
        known.release = "25.11.1"
        batch = PySlurm(environ, run=FakeSlurmCommands(known), ask=asked_directly(fake_pyslurm(known)))
        assert batch.usable() is None
        return batch


class TestLsf(BatchConformance):
    copies_script = False
    form = "json"

    def make(self, known: FakeCluster, environ: dict[str, str]) -> BatchSystem:
        run = FakeLsfCommands(known, form=self.form)
        return Lsf(environ, run=run, launcher="blaunch", hostname="h1")

    def inside(self, *, end: float | None, requeueable: bool = True) -> BatchSystem:
        environ = {key: value for key, value in LSF_JOB.items() if requeueable or key != "LSB_EXIT_REQUEUE"}
        return self.make(cluster("806290", end=end), environ)

    def outside(self) -> BatchSystem:
        return self.make(cluster("806290"), {})

    def silent(self) -> BatchSystem:
        return self.make(cluster("806290", answers=False), LSF_JOB)

    def lives(self) -> tuple[BatchSystem, dict[str, BatchJobState]]:
        return self.make(cluster("806290"), {}), LIVES


class TestLsfBeforeJson(TestLsf):
    form = "delimiter"


class TestLsfBeforeFields(TestLsf):
    form = "long"


class TestLsfWithJsrun(TestLsf):
    gives_back = False

    def make(self, known: FakeCluster, environ: dict[str, str]) -> BatchSystem:
        return Lsf(environ, run=FakeLsfCommands(known), launcher="jsrun", hostname="batch5")


class TestSge(BatchConformance):
    copies_script = gives_back = False

    @pytest.fixture(autouse=True)
    def _spool(self, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_text(SGE_HOSTS)
        for name, forbidden in (("main", 0), ("strict", 1)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config").write_text(f"forbid_reschedule={forbidden}\nnotify=60\n")
            (tmp_path / name / "job_pid").write_text("4711\n")
        self.job = {
            **SGE_JOB,
            "PE_HOSTFILE": str(tmp_path / "hosts"),
            "SGE_JOB_SPOOL_DIR": str(tmp_path / "main"),
        }

    def inside(self, *, end: float | None, requeueable: bool = True) -> BatchSystem:
        spool = self.job["SGE_JOB_SPOOL_DIR"]
        environ = self.job if requeueable else {**self.job, "SGE_JOB_SPOOL_DIR": spool[:-4] + "strict"}
        return Sge(environ, run=FakeSgeCommands(self.known(end=end)))

    def outside(self) -> BatchSystem:
        return Sge({}, run=FakeSgeCommands(self.known()))

    def silent(self) -> BatchSystem:
        return Sge(self.job, run=FakeSgeCommands(self.known(answers=False)))

    def lives(self) -> tuple[BatchSystem, dict[str, BatchJobState]]:
        known = {job if job != "11" else "31": state for job, state in LIVES.items()}
        return Sge({}, run=FakeSgeCommands(self.known())), known

    def known(self, *, end: float | None = None, answers: bool = True) -> FakeCluster:
        made = cluster("11", end=end, answers=answers)
        made.jobs["31"] = FakeJob("31", STATES["11"])
        return made


class TestLocal(BatchConformance):
    comes_back = tells_lives = copies_script = gives_back = False
    launcher = "local"

    def inside(self, *, end: float | None, requeueable: bool = True) -> BatchSystem:
        return Local(("h1", "h2"), launcher=self.launcher)

    def outside(self) -> BatchSystem:
        return Local()

    def silent(self) -> BatchSystem:
        return self.inside(end=None)

    def lives(self) -> tuple[BatchSystem, dict[str, BatchJobState]]:
        return Local(), dict.fromkeys(LIVES, BatchJobState.UNKNOWN)


class TestLocalBySsh(TestLocal):
    launcher = "ssh"


def test_the_real_pyslurm() -> None:
    """Where one is installed that goes with the Slurm here: it has the names that we use."""
    if importlib.util.find_spec("pyslurm") is None:
        pytest.skip("pyslurm is not installed")
    batch = PySlurm(os.environ)
    why_not = batch.usable()
    if why_not is not None:
        pytest.skip(why_not)
    assert batch.job_state("999999999") is BatchJobState.ENDED
    assert "pyslurm" in batch.version()
