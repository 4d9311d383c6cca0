"""`hpcsched run` inside real Slurm jobs: their end, coming back, several hosts, the login node."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from slurmsite import SET, Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(slurm, tmp_path: Path):
    before = slurm.env
    yield Site(slurm, tmp_path)
    slurm.env = before


def test_it_saves_in_time_and_comes_back_until_all_is_done(site: Site) -> None:
    site.set_of(SET.format(steps=5000))
    job = site.submit("--requeue")
    steps = [0]
    for _ in range(2):
        site.at_work("a", "b")
        site.end_in(job, 50)  # 40 s in reserve and some for saving leave a few of work
        site.until(lambda: site.status()["run"]["state"] == "STOPPED")
        site.slurm.wait(job, {"PENDING"})
        found = site.status()
        assert all(j["state"] in ("SUSPENDED", "COMPLETED") for j in found["jobs"])
        steps.append(sum(j["step"] for j in found["jobs"]))
        said = site.hpcsched("status").stderr
        assert f"job {job} waits in the queue" in said
        site.slurm.start_again(job, "TimeLimit=10")
        site.until(lambda: site.status()["run"]["state"] != "STOPPED")
    assert 0 < steps[1] < steps[2] < 10000
    assert site.slurm.wait(job, timeout_s=120) == "COMPLETED"
    found = site.status()
    assert [j["state"] for j in found["jobs"]] == ["COMPLETED", "COMPLETED"]
    history = json.loads(site.hpcsched("history", "--json").stdout)
    assert history["jobs"]
    explained = json.loads(site.hpcsched("explain", "a", "--json").stdout)
    assert "Saved" in [line["code"] for line in explained["story"]]
    assert "Lost" not in [line["code"] for line in explained["story"]]


@pytest.mark.slow
def test_without_a_controller_the_last_known_end_counts(site: Site) -> None:
    site.set_of(SET.format(steps=100_000))
    job = site.submit("--requeue")
    site.at_work("a", "b")
    site.end_in(job, 65)
    site.slurm.signal("slurmctld", signal.SIGSTOP)
    try:
        assert [j["state"] for j in site.status()["jobs"]] == ["RUNNING", "RUNNING"]
        site.until(lambda: site.status()["run"]["state"] == "STOPPED")
        assert [j["state"] for j in site.status()["jobs"]] == ["SUSPENDED", "SUSPENDED"]
    finally:
        site.slurm.signal("slurmctld", signal.SIGCONT)
    assert "asked to save" in site.slurm.log(job)


@pytest.mark.slow
def test_a_chain_goes_on_in_a_job_of_its_own(site: Site) -> None:
    site.set_of(SET.format(steps=4200))
    job = site.submit("--no-requeue", minutes=1, run="jobs.toml --chain --margin 30")
    site.until(lambda: "goes on when this one has ended" in site.slurm.log(job))
    following = site.slurm.log(job).split("batch job ")[1].split()[0]
    site.slurm.jobs.append(following)
    site.slurm.run("scontrol", "update", f"JobId={following}", "TimeLimit=10")  # all the rest, however slow
    assert site.slurm.wait(job) == "FAILED"  # exit code 75
    site.until(lambda: site.status()["run"]["allocation"]["id"] == following)
    site.until(lambda: site.status()["run"]["state"] == "FINISHED", timeout_s=90)
    assert [j["attempt"] for j in site.status()["jobs"]] == [2, 2]


def test_two_hosts_and_the_loss_of_one(site: Site) -> None:
    wide = '[[job]]\nname = "wide"\nnodes = 2\ngpus = 1\nsteps = 100000\n'
    head, *jobs = SET.format(steps=100_000).partition("[[job]]")
    site.set_of("".join([head, wide, *jobs]))
    job = site.submit("--nodes=2", "--ntasks-per-node=1")
    site.at_work("a", "b", "wide")
    found = site.status()
    assert {g["host"] for g in found["gpus"]} == {"node1", "node2"}
    assert len(found["gpus"]) == 12
    assert site.job("wide")["hosts"] == ["node1", "node2"]
    victim = _node_agent(site.dir, "node2")
    lost = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    site.until(lambda: "node2 was lost" in site.slurm.log(job))
    assert time.monotonic() - lost < 25
    site.until(lambda: {g["host"] for g in site.status()["gpus"]} == {"node1"})
    assert site.job("a")["state"] == "RUNNING" and site.job("a")["attempt"] == 1
    site.until(lambda: (site.job("b")["state"], site.job("b")["hosts"]) == ("RUNNING", ["node1"]))
    site.until(lambda: site.job("wide").get("state") in ("PENDING", "SUSPENDED"))


def test_the_login_node_sees_and_steers(site: Site) -> None:
    site.set_of(SET.format(steps=100_000))
    job = site.submit()
    site.at_work("a", "b")
    assert len(json.loads(site.hpcsched("status", "--json").stdout)["jobs"]) == 2
    seen = site.hpcsched("status")
    assert "node1" in seen.stdout and seen.returncode == 0
    assert job in site.hpcsched("top", "-n", "1").stdout
    assert str(site.dir) in site.hpcsched("status", "--all").stdout
    assert site.hpcsched("hold", "b").returncode == 1  # it runs
    assert site.hpcsched("cancel", "b").returncode == 0
    site.until(lambda: site.job("b")["state"] == "CANCELLED")
    submitted = site.hpcsched("submit", "--name", "late", "--model", "VGG-16", "--steps", "50", "--", "true")
    assert submitted.returncode == 0, submitted.stderr
    assert site.hpcsched("drain").returncode == 0
    assert site.slurm.wait(job) == "FAILED"
    assert site.status()["run"]["state"] == "STOPPED"


@pytest.mark.slow
def test_a_sites_records_sum_up_to_what_slurm_charges(site: Site) -> None:
    """Two lives of a run: trainings and idle are all of each, and little less than elapsed time x GPUs."""
    records = site.folder / "records"
    records.mkdir()
    Path(site.env["HPCSCHED_SITE_CONFIG"]).write_text(f'locked = ["records"]\nrecords = "{records}"\n')
    site.set_of(SET.format(steps=16_000))
    charged = 0.0
    for _ in range(2):
        job = site.submit("--no-requeue", "--account=proj", run="jobs.toml --resume --margin 40")
        site.at_work("a", "b")
        site.end_in(job, 60)
        site.slurm.wait(job)
        about = dict(
            word.partition("=")[::2]
            for word in site.slurm.run("scontrol", "-o", "show", "job", job).split()
            if "=" in word
        )
        hours, minutes, seconds = map(int, about["RunTime"].split(":"))
        charged += 6 * (3600 * hours + 60 * minutes + seconds) / 3600
    shown = site.hpcsched("efficiency", "--records", str(records), "--by", "account", "--json")
    (total,) = json.loads(shown.stdout)["sums"]
    assert total["by"] == {"account": "proj"} and (total["runs"], total["trainings"]) == (1, 2)
    assert total["held_gpu_hours"] + total["idle_gpu_hours"] == pytest.approx(total["gpu_hours"], rel=1e-3)
    assert 0.5 * charged < total["gpu_hours"] <= 1.1 * charged, (total, charged)


def _node_agent(run_dir: Path, name: str) -> int:
    """The pid of a node agent itself: not of srun, nor of what guards it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"hpcsched.agent.node" in words and words[0].endswith((b"python", b"python3")):
                text = b" ".join(words).decode()
                if str(run_dir) in text and f"--name {name}" in text:
                    found[int(entry.name)] = ppid
    return next(pid for pid, ppid in found.items() if ppid not in found)
