"""A pool on a real Slurm: one allocation leads, another one joins, and both are given back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurmsite import Site

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

POOL = """schema = 1
dir = "run"
[pool]
max_allocations = 3
max_gpus = 8
gpu_hours = 4
idle = "30s"
[[template]]
name = "two"
partition = "main"
gpus_per_node = 2
time = "20m"
[run]
margin = 20
"""
JOBS = """schema = 1
[defaults]
replay = true
model = "ResNet-50"
gpus = 1
steps = 1500
"""


@pytest.fixture
def site(slurm, tmp_path: Path) -> Iterator[Site]:
    before = slurm.env
    site = Site(slurm, tmp_path)
    slurm.env = site.env = {**site.env, "HPCSCHED_DEVICES": "replay:2@100"}
    yield site
    slurm.env = before


def pool(site: Site) -> dict[str, Any]:
    return json.loads((site.dir / "pool.json").read_text())


def rounds(site: Site, met: Callable[[], Any]) -> None:
    """As cron does it: each time another process."""
    deadline = time.monotonic() + 80
    while not met():
        assert time.monotonic() < deadline, site.hpcsched("pool", "status", "pool.toml").stdout
        once = site.hpcsched("pool", "start", "pool.toml", "--once")
        assert once.returncode == 0, once.stderr
        time.sleep(1)


def shown(site: Site) -> dict[str, Any]:
    return json.loads(site.hpcsched("pool", "status", "pool.toml", "--json").stdout)


def test_allocations_come_as_jobs_do_and_go_with_them(site: Site) -> None:
    (site.folder / "pool.toml").write_text(POOL)
    jobs = "".join(f'[[job]]\nname = "j{i}"\n' for i in range(20))
    site.set_of(JOBS + jobs + '[[job]]\nname = "wide"\nnodes = 2\n')  # more than one allocation has
    assert site.hpcsched("submit", "jobs.toml").returncode == 0
    dry = site.hpcsched("pool", "start", "pool.toml", "--dry-run")
    assert "would ask for two (1 x 2 GPUs in main for 20:00)" in dry.stdout, dry.stderr
    assert not (site.dir / "pool.json").exists()

    rounds(site, lambda: (site.dir / "pool.json").exists() and len(pool(site)["allocations"]) == 2)
    site.until(lambda: len(site.status()["run"].get("joined", [])) == 1)
    rounds(site, lambda: all(one["state"] == "ended" for one in pool(site)["allocations"]))
    assert {job["state"] for job in site.status()["jobs"]} == {"COMPLETED"}
    assert site.status()["run"]["state"] == "FINISHED"
    assert 0 < json.loads(site.hpcsched("pool", "status", "--json").stdout)["gpu_hours_used"] < 1
    assert len(site.job("wide")["hosts"]) == 2
    assert not site.slurm.run("squeue", "-h", "-o", "%A").strip()


def test_when_the_allocation_that_leads_goes_another_one_leads(site: Site) -> None:
    (site.folder / "pool.toml").write_text(POOL)
    site.set_of(JOBS + "".join(f'[[job]]\nname = "j{i}"\nsteps = 12000\n' for i in range(12)))
    assert site.hpcsched("submit", "jobs.toml").returncode == 0
    rounds(site, lambda: site.job("j3").get("state") == "RUNNING")
    first = shown(site)["leader"]
    site.until(lambda: "leads the run" in site.hpcsched("pool", "status", "pool.toml").stdout)
    site.slurm.run("scancel", first)
    site.until(lambda: shown(site)["leader"] not in (None, first))
    site.hpcsched("cancel", *(f"j{i}" for i in range(4, 12)))
    rounds(site, lambda: not site.slurm.run("squeue", "-h", "-o", "%A").strip())
    kept = [site.job(f"j{i}") for i in range(4)]
    assert {job["state"] for job in kept} == {"COMPLETED"}
    assert [job["attempt"] for job in kept[2:]] == [1, 1], "the second host worked on"
