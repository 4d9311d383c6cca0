"""Hosts that nothing can use any more are given back to a real Slurm; the run goes on with the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurmsite import Site

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

TAIL = """schema = 1
[defaults]
replay = true
model = "ResNet-50"
gpus = 6
[[job]]
name = "long"
steps = 200000
[[job]]
name = "short"
steps = 300
"""


@pytest.fixture
def site(slurm, tmp_path: Path) -> Iterator[Site]:
    before = slurm.env
    yield Site(slurm, tmp_path)
    slurm.env = before


def hosts_of(site: Site, job: str) -> str:
    return site.slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()


def test_the_job_shrinks_and_comes_back_whole(site: Site) -> None:
    site.set_of(TAIL)
    job = site.submit(
        "--nodes=2",
        "--ntasks-per-node=1",
        "--no-kill",
        run="jobs.toml --requeue --margin 40 --release-idle-nodes 0.05",
    )
    site.until(lambda: hosts_of(site, job) == "node1")
    assert site.job("short")["state"] == "COMPLETED"
    site.until(lambda: site.status()["run"].get("given_back"))
    assert {gpu["host"] for gpu in site.status()["gpus"]} == {"node1"}
    # Somebody else can have all of it.
    site.slurm.run("srun", "--time=1", "--nodelist=node2", "--gpus-per-node=6", "true", timeout_s=60.0)
    before = site.job("long")["step"]
    site.until(lambda: site.job("long")["step"] > before)
    log = site.slurm.log(job)
    assert "nothing is left that could use host node2: given back to slurm" in log
    assert "was lost" not in log
    # Slurm starts a job that is put back into the queue with the nodes that it asked for at first.
    site.slurm.run("scontrol", "requeue", job)
    site.until(lambda: site.status()["run"]["state"] == "STOPPED")
    site.slurm.wait(job, {"PENDING"})
    site.slurm.start_again(job, "TimeLimit=10")
    site.until(lambda: site.status()["run"]["state"] == "RUNNING" and site.status()["run"]["allocation"])
    site.at_work("long")
    assert {gpu["host"] for gpu in site.status()["gpus"]} == {"node1", "node2"}
    assert site.job("long")["attempt"] == 2
