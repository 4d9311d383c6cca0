"""Every way in which a real Slurm ends a batch job, and what a run makes of it."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from slurmsite import ONE, Site

pytestmark = pytest.mark.slurm

TELLS_WHY = """#!/bin/bash
exec python3 - <<'END'
import json, os, pathlib, signal, threading
from hpcsched.batch import open_batch

told = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: told.set())
pathlib.Path({file!r} + ".ready").write_text("yes\\n")
while not told.wait(0.1):
    pass
batch = open_batch(environ=os.environ)
said = [batch.reason(), batch.kill_wait(), batch.allocation().cluster]
pathlib.Path({file!r}).write_text(json.dumps(said) + "\\n")
END
"""
STUBBORN = """schema = 1
[[job]]
name = "a"
steps = 10
command = ["bash", "-c", "trap '' TSTP TERM; : > $HPCSCHED_JOB_DIR/ready.1; while :; do sleep 0.05; done"]
"""


class Ends:
    """Runs of one job each, at the same time."""

    def __init__(self, slurm: Any, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.sites: dict[str, Site] = {}
        self.jobs: dict[str, str] = {}

    def begin(self, name: str, *options: str, run: str, jobs: str = ONE) -> None:
        (self.folder / name).mkdir()
        before = self.slurm.env
        site = self.sites[name] = Site(self.slurm, self.folder / name)
        site.env["HPCSCHED_DEVICES"] = "replay:1@20"
        site.set_of(jobs)
        given = (f"--job-name={name}", "--gpus-per-node=0", *options)
        self.jobs[name] = site.submit(*given, run=f"jobs.toml --margin 40 {run}")
        self.slurm.env = before

    def scontrol(self, *words: str) -> None:
        self.slurm.run("scontrol", *words)

    def log(self, name: str) -> str:
        return str(self.slurm.log(self.jobs[name]))

    def says(self, name: str, text: str) -> None:
        self.sites[name].until(lambda: text in self.log(name))

    def saved(self, name: str) -> None:
        """The run has come to its end in good order."""
        site = self.sites[name]
        site.until(lambda: site.status()["run"]["state"] == "STOPPED")
        assert site.job("a")["state"] == "SUSPENDED", self.log(name)

    def fields(self, name: str) -> str:
        return str(self.slurm.run("scontrol", "-o", "show", "job", self.jobs[name]))


@pytest.mark.slow
def test_why_a_batch_job_ends_is_told_apart(slurm: Any, tmp_path: Path) -> None:
    ends, told = Ends(slurm, tmp_path), tmp_path / "limit"
    limit = slurm.sbatch(TELLS_WHY.format(file=str(told)), "--time=10", "--nodelist=node1")
    here = "--nodelist=node1"
    ends.begin("warned", here, "--requeue", run="--requeue")
    ends.begin("cancelled", here, "--no-requeue", run="--chain")
    ends.begin("requeued", here, "--requeue", run="--chain")
    ends.begin("back", here, "--partition=back", "--cpus-per-task=3", "--requeue", run="")
    ends.begin("spare", here, "--partition=spare", "--cpus-per-task=3", "--no-requeue", run="--chain")
    ends.begin("node", "--nodelist=node2", "--no-requeue", run="--chain")
    two = ONE + 'nodes = 2\n[[job]]\nname = "b"\n'
    ends.begin("nodes", "--nodes=2", "--no-kill", "--requeue", run="--requeue", jobs=two)
    for site in ends.sites.values():
        site.at_work("a")
    slurm.wait_for(Path(f"{told}.ready"))
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    ends.scontrol("update", f"JobId={limit}", f"EndTime={end}")  # Slurm looks every 30 s

    # A signal like that of --signal=B:TERM ends nothing, and what comes after a warning is no less a cancel.
    slurm.run("scancel", "--batch", "--signal=TERM", ends.jobs["warned"])
    ends.says("warned", "SIGTERM from the batch system; saving begins in")
    slurm.run("scancel", "--batch", "--signal=USR2", ends.jobs["warned"])
    ends.says("warned", "SIGUSR2 from the batch system; saving begins in")
    assert ends.sites["warned"].status()["run"]["state"] == "RUNNING"
    slurm.run("scancel", ends.jobs["warned"], ends.jobs["cancelled"])
    ends.scontrol("requeue", ends.jobs["requeued"])
    urgent = slurm.sbatch("sleep 600", "--partition=urgent", here, "--cpus-per-task=10")

    for name in ("warned", "cancelled"):
        ends.saved(name)
        assert slurm.wait(ends.jobs[name]) == "CANCELLED"
        ends.says(name, "not by itself: its batch job was cancelled")
        assert "Restarts=0" in ends.fields(name)
    ends.saved("requeued")
    slurm.wait(ends.jobs["requeued"], {"PENDING"})
    ends.says("requeued", "this batch job was put back into its queue, and goes on by itself")
    assert "Restarts=1" in ends.fields("requeued")

    # Of the time of grace a batch script is told nothing, but it is noticed; and both come back.
    for name in ("back", "spare"):
        ends.says(name, "its hosts are wanted for another job")
        ends.saved(name)
        assert "CANCELLED AT" not in ends.log(name).partition("is asked to save")[0], ends.log(name)
    slurm.wait(ends.jobs["back"], {"PENDING"})
    ends.says("back", "this batch job is back in the queue")
    ends.says("spare", "goes on when this one has ended")
    slurm.cancel(urgent)
    slurm.start_again(ends.jobs["back"])
    back = ends.sites["back"]
    back.until(lambda: back.status()["run"]["state"] == "RUNNING")
    back.until(lambda: back.job("a").get("attempt") == 2)

    # A node that is found down ends a batch job, but not one of several nodes that was asked to outlive it.
    try:
        ends.scontrol("update", "NodeName=node2", "State=DOWN", "Reason=test")
        ends.says("node", "one of its hosts is down")
        ends.says("node", "goes on when this one has ended")
        ends.says("nodes", "node2 was lost")
        nodes = ends.sites["nodes"]
        nodes.until(lambda: nodes.job("b").get("state") == "RUNNING")
        assert slurm.state(ends.jobs["nodes"]) == "RUNNING"
        assert "ends this job" not in ends.log("nodes")
    finally:
        slurm.run("scontrol", "update", "NodeName=node2", "State=RESUME", check=False)
    assert json.loads(slurm.wait_for(told)) == ["LIMIT", 30.0, "hpcsched"]


@pytest.mark.slow
def test_a_short_kill_wait_leaves_time_to_leave(slurm: Any, tmp_path: Path) -> None:
    conf = slurm.folder / "slurm.conf"
    usual = conf.read_text()
    ends = Ends(slurm, tmp_path)
    try:
        conf.write_text(usual.replace("KillWait=30", "KillWait=12"))
        slurm.run("scontrol", "reconfigure")
        slurm.env["HPCSCHED_GRACE"] = "60"
        ends.begin("short", run="--requeue --devices cpu:1", jobs=STUBBORN)
        site = ends.sites["short"]
        site.at_work("a")
        slurm.run("scancel", ends.jobs["short"])
        slurm.wait(ends.jobs["short"])
        assert site.status()["run"]["state"] == "STOPPED", ends.log("short")
    finally:
        conf.write_text(usual)
        slurm.run("scontrol", "reconfigure")


LOOKS = """#!/bin/bash
grep freezer /proc/self/cgroup > {file}.new
for gpu in 0 1; do cat {devices}/gpu$gpu 2>&1 | sed 's/.*: //' >> {file}.new; done
mv {file}.new {file}
"""


GRANTED = """schema = 1
[[job]]
name = "looks"
command = ["bash", "{script}"]
"""


def test_a_job_of_a_run_by_cgroup_keeps_to_what_was_granted(slurm_by_cgroup: Any, tmp_path: Path) -> None:
    slurm, told, script = slurm_by_cgroup, tmp_path / "looks", tmp_path / "looks.sh"
    script.write_text(LOOKS.format(file=told, devices=slurm.folder))
    ends = Ends(slurm, tmp_path)
    ends.begin(
        *("one", "--gpus-per-node=1"), run="--requeue --devices cpu:1", jobs=GRANTED.format(script=script)
    )
    group, *devices = slurm.wait_for(told).splitlines()
    assert f"job_{ends.jobs['one']}" in group
    # No driver answers for either of them; what was not granted is not even asked for.
    assert devices == ["No such device or address", "Operation not permitted"]
    assert slurm.wait(ends.jobs["one"]) == "COMPLETED", ends.log("one")


@pytest.mark.slow
def test_runs_by_cgroup_end_in_time_and_come_back(slurm_by_cgroup: Any, tmp_path: Path) -> None:
    slurm = slurm_by_cgroup
    ends = Ends(slurm, tmp_path)
    two = ONE + "nodes = 2\n"
    ends.begin("requeued", "--nodelist=node1", "--gpus-per-node=1", "--requeue", run="--requeue")
    ends.begin("chained", "--nodelist=node2", "--gpus-per-node=1", "--no-requeue", run="--chain")
    for name in ("requeued", "chained"):
        ends.sites[name].at_work("a")
        ends.sites[name].end_in(ends.jobs[name], 42)
    for name in ("requeued", "chained"):
        ends.saved(name)
    ends.says("requeued", "this batch job is back in the queue")
    ends.says("chained", "goes on when this one has ended")
    chained = ends.sites["chained"]
    chained.until(
        lambda: (chained.job("a").get("attempt"), chained.status()["run"]["state"]) == (2, "RUNNING")
    )
    slurm.cancel(*slurm.run("squeue", "-h", "-o", "%A").split())
    slurm.wait(ends.jobs["chained"], {"COMPLETED", "CANCELLED", "FAILED"})

    options = ("--nodes=2", "--gpus-per-node=2", "--requeue", "--no-kill")
    ends.begin("nodes", *options, run="--requeue", jobs=two)
    site, job = ends.sites["nodes"], ends.jobs["nodes"]
    site.at_work("a")
    site.end_in(job, 42)
    ends.saved("nodes")
    slurm.wait(job, {"PENDING"})
    ends.says("nodes", "this batch job is back in the queue")
    slurm.start_again(job, "TimeLimit=10")
    site.until(lambda: (site.job("a").get("attempt"), site.status()["run"]["state"]) == (2, "RUNNING"))


@pytest.mark.slow
def test_a_heterogeneous_job_gives_all_its_hosts_and_comes_back(slurm: Any, tmp_path: Path) -> None:
    ends = Ends(slurm, tmp_path)
    other = (":", "--nodes=1", "--cpus-per-task=2", "--gpus-per-node=0", "--time=9")
    ends.begin("both", "--requeue", "--nodes=1", *other, run="--requeue", jobs=ONE + "nodes = 2\n")
    site, job = ends.sites["both"], ends.jobs["both"]
    site.at_work("a")
    assert len(site.status()["gpus"]) == 2
    left = datetime.fromisoformat(site.status()["run"]["allocation"]["deadline"]).timestamp() - time.time()
    assert left <= 9 * 60  # the component that ends first
    site.end_in(job, 42)
    ends.saved("both")
    slurm.wait(job, {"PENDING"})
    slurm.run("scontrol", "hold", job)
    assert "is held in the queue of slurm (JobHeld" in site.hpcsched("status").stderr
    slurm.run("scontrol", "release", job)
    slurm.start_again(job)
    slurm.start_again(str(int(job) + 1), check=False)  # some releases start all at once
    site.until(lambda: (site.job("a").get("attempt"), site.status()["run"]["state"]) == (2, "RUNNING"))


@pytest.mark.slow
def test_each_task_of_an_array_is_followed_by_itself(slurm: Any, tmp_path: Path) -> None:
    site = Site(slurm, tmp_path)
    site.env["HPCSCHED_DEVICES"] = "replay:1@20"
    site.set_of(ONE)
    run = "exec hpcsched run jobs.toml --chain --margin 40 --dir run-$SLURM_ARRAY_TASK_ID"
    array = slurm.sbatch(run, "--array=1-2", "--time=10", "--gpus-per-node=0", "--no-requeue", cwd=tmp_path)
    pages = [tmp_path / f"run-{task}" / "status.json" for task in (1, 2)]

    def lives(count: int) -> bool:
        shown = [json.loads(page.read_text()) for page in pages if page.exists()]
        return [page["jobs"][0].get("attempt") for page in shown if page["jobs"][0].get("ready")] == [
            count
        ] * 2

    site.until(lambda: lives(1))
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 42))
    for row in slurm.run("squeue", "-h", "-j", array, "-o", "%A").split():
        slurm.run("scontrol", "update", f"JobId={row}", f"EndTime={end}")
        slurm.run("scancel", "--batch", "--signal=USR1", row)
    site.until(lambda: lives(2))
    tasks = slurm.run("squeue", "-h", "-t", "R", "-o", "%K").split()
    assert sorted(tasks) == ["1", "2"]
