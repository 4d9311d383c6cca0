"""Two batch jobs of a real Slurm, and one run: `run --joinable` in the first, `join` in the second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurmsite import SET, Site

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def site(slurm, tmp_path: Path) -> Iterator[Site]:
    before = slurm.env
    yield Site(slurm, tmp_path)
    slurm.env = before


def joins(site: Site, *options: str) -> str:
    script = f"#!/bin/bash\nexec hpcsched join --dir {site.dir}\n"
    return site.slurm.sbatch(script, "--time=10", "--gpus-per-node=6", *options, cwd=site.folder)


def test_a_second_allocation_joins_and_leaves_before_its_end(site: Site) -> None:
    site.set_of(SET.format(steps=200000).replace('"ResNet-50"\n', '"ResNet-50"\ngpus = 6\n'))
    run = site.submit("--nodelist=node1", run="jobs.toml --joinable --margin 12")
    site.at_work("a")
    assert site.job("b")["state"] == "PENDING"
    guest = joins(site, "--nodelist=node2")
    site.at_work("b")
    assert site.job("b")["hosts"] == ["node2"]
    (joined,) = site.status()["run"]["joined"]
    assert joined["host"] == "node2" and joined["end"]
    # An operator has it end in 25 s; it looks at once.
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 25))
    site.slurm.run("scontrol", "update", f"JobId={guest}", f"EndTime={end}")
    site.slurm.run("scancel", "--batch", "--signal=USR1", guest)
    site.slurm.wait(guest, {"COMPLETED"})
    site.until(lambda: site.job("b")["state"] == "SUSPENDED")
    saved = site.job("b")["step"]
    assert saved > 0 and site.job("a")["state"] == "RUNNING"
    assert "host node2 left the run" in site.slurm.log(run) and "was lost" not in site.slurm.log(run)
    # The next one is cancelled: its job has saved by then.
    again = joins(site, "--nodelist=node2")
    site.until(lambda: site.job("b").get("hosts") == ["node2-2"] and site.job("b")["step"] > saved)
    site.slurm.run("scancel", again)
    site.slurm.wait(again, {"CANCELLED", "COMPLETED"})
    site.until(lambda: site.job("b")["state"] == "SUSPENDED" and site.job("b")["step"] > saved)
    assert "was lost" not in site.slurm.log(run)
    site.hpcsched("cancel", "a", "b")
    site.slurm.wait(run, {"COMPLETED"})
