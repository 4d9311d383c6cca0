"""A mechanism of an installed package, in one file with its strategy: real jobs that share one licence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from livebench import Bench, saves

MODULE = '''
"""Jobs that need a licence, and no GPU; there is one licence."""
from dataclasses import dataclass
from hpcsched.contract.seats import Seat
from hpcsched.contract.strategies import Strategy
from hpcsched.core.jobs import Target
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.reasons import Reason, Why

@dataclass(frozen=True)
class Licensed(Strategy):
    about = "A program that needs a licence."
    gpus = 0
    job = "a job with a licence"
    in_background = False
    only = "licences for jobs with a command only"
    needs_trainer = False

class Licences(Mechanism):
    name, role = "licences", "licensed"
    on_gpus = profiled = teaches = False

    def __init__(self, parts):
        super().__init__()
        self.holders, self._parts = set(), parts

    @staticmethod
    def rule(policy):
        return 1

    def needed_by(self, spec):
        return spec.strategy["kind"] == "licensed"

    def waits(self, job):
        return self.needed_by(job.spec)

    def waiting_reason(self, job):
        return Reason(Why.ADDED, {"words": "waits for a licence"})

    def hold(self, job, target):
        self.holders.add(job.id)

    def release(self, job):
        self.holders.remove(job.id)

    def saving(self):
        return (self._parts.run.jobs[job_id] for job_id in self.holders)

    def decide(self):
        limit = self._parts.decisions.rule(self.name)
        host = next(iter(self._parts.ledger.devices.values())).host
        waiting = [*self.queue.walk(lambda need, nodes, uneven: limit is not None)]
        for job_id in waiting[: limit - len(self.holders)]:
            job = self._parts.run.jobs[job_id]
            self._parts.out.note(job, Reason(Why.ADDED, {"words": "has the licence"}))
            seat = Seat(server=False, share=1.0, host=host)
            target = Target((), self.role, self._parts.run.now, seats=(seat,))
            self._parts.attempts.launch(job, target)
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package in it."""
    info = tmp_path / "site" / "licences-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "licences.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: licences\nVersion: 1.0\n")
    points = "[hpcsched.strategies]\nlicensed = licences:Licensed\n[hpcsched.mechanisms]\n"
    (info / "entry_points.txt").write_text(f"{points}licences = licences:Licences\n")
    return info.parent


@pytest.mark.slow
def test_jobs_hold_the_licence_one_after_the_other_over_two_lives(bench: Bench, site: Path) -> None:
    without = bench.env.get("PYTHONPATH", "")
    bench.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), without)))
    jobs = bench.set_of(*(saves(name, steps=400, strategy="licensed") for name in ("a", "b")))
    agent = bench.start(jobs, "--devices", "cpu:1")
    bench.ready("a")
    assert bench.states() == {"a": "RUNNING", "b": "PENDING"}
    assert len(bench.job("a")["hosts"]) == 1
    assert "waits for a licence" in bench("explain", "b").stdout
    assert "as licensed" in bench("explain", "a").stdout
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states() == {"a": "SUSPENDED", "b": "RUNNING"}, "b has it", 30.0)
    agent.kill(signal.SIGKILL)
    agent.wait()

    bench.env["PYTHONPATH"] = without
    for words in (("explain", "a"), ("journal", "repair"), ("run", "--resume", "--devices", "cpu:1")):
        refused = bench(*words)
        assert refused.returncode != 0
        assert "where the package is installed that adds the mechanism 'licences'" in refused.stderr
    bench.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), without)))

    bench.start("--resume", "--devices", "cpu:1")
    bench.until(lambda: bench.states().get("b") == "COMPLETED", "b is done")
    assert bench("resume", "a").returncode == 0
    assert bench.agents[-1].wait() == 0
    assert bench.states() == {"a": "COMPLETED", "b": "COMPLETED"}
    assert bench("journal", "check").returncode == 0
    for words in (("--run",), (jobs, "--gpus-per-node", "1")):
        told = bench("simulate", *words)
        assert "Traceback" not in told.stdout + told.stderr
        assert "unknown work" in told.stdout + told.stderr or "how fast others are" in told.stderr
