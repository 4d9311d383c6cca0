"""`explain` without a job, and the lines of `status` and `top`, on GPUs that are left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.cli.jobs.about_leftover import in_a_line
from hpcsched.cli.jobs.explain_run import Smaller, commands, lines_of, page_of, smaller_allocation
from hpcsched.core import events as ev
from hpcsched.core.transitions.outcome import RELEASE
from hpcsched.durations import clock
from hpcsched.store.rundir import RunRecord
from hpcsched.store.status import AgentStatus, LeftOver, RunStatus, Status
from hpcsched.testing.builders import Driver, a_job, a_profile

ROOT = Path("/runs/one")
PROFILES = (a_profile("m", [1.0, 2.0]),)


def a_record(kind: str = "slurm", devices: str = "auto") -> RunRecord:
    return RunRecord(
        id="r",
        version="0",
        host="h",
        pid=1,
        started=0,
        began=0.0,
        devices=devices,
        policy="marble",
        allocation={"kind": kind},
    )


def a_tail(release_after_s: float | None = None) -> Driver:
    """Job a runs on host n1, b has left n2 at 100 s."""
    jobs = (a_job(name, "m", 8000, gpus=2) for name in ("a", "b"))
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=PROFILES, release_after_s=release_after_s)
    driver.runs("a", "b")
    driver.now = 100.0
    driver.exits("b", 0)
    return driver


def test_what_is_idle_and_what_to_do() -> None:
    driver = a_tail()
    assert lines_of(driver.machine, ROOT, a_record()) == [
        "jobs: 1 running, 1 completed",
        "GPUs: 2 of 4 busy",
        "idle: GPUs 2-3 on n2 since 1:40 into the run: no job is left that could use them",
        "next: n2: `run --release-idle-nodes MINUTES` would give it back",
        "next: a needs 2 GPUs at most, for about 1:06:40",
        "next: to go on with no more: `hpcsched drain --dir /runs/one`, then "
        "`sbatch --nodes=1 --gres=gpu:2 SCRIPT`",
    ]


def test_what_will_be_given_back_and_what_was() -> None:
    driver = a_tail(release_after_s=600.0)
    lines = lines_of(driver.machine, ROOT, a_record())
    assert "next: n2: given back to slurm from 11:40 into the run on" in lines
    driver.now = 700.0
    driver.tell(ev.TimerFired, key=RELEASE)
    driver.now = 702.0
    driver.tell(ev.HostsReleased, hosts=("n2",))
    lines = lines_of(driver.machine, ROOT, a_record())
    assert "given back: n2 with 2 GPUs, 11:42 into the run" in lines
    assert not any(line.startswith(("idle", "next")) for line in lines)
    page = page_of(driver.machine, ROOT, a_record())
    assert (page["given_back"], page["left_over"], page["gpus"], page["free"]) == ({"n2": 702.0}, [], 2, 0)


def test_a_job_that_may_still_get_them_is_named() -> None:
    jobs = a_job("a", "m", 100, gpus=2), a_job("b", "m", 100, gpus=1), a_job("c", "m", 8000)
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=PROFILES)
    driver.runs("a", "b")
    driver.tell(ev.WorkersSpawned, "c", processes=((100, 1),))
    driver.exits("a", 0)
    lines = lines_of(driver.machine, ROOT, a_record())
    assert "idle: 2 free, which c may still get" in lines and not any("next" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "devices", "command"),
    [
        ("none", "cpu:4", "`hpcsched run --resume --dir /runs/one --devices cpu:1`"),
        ("none", "auto", "`hpcsched run --resume --dir /runs/one --devices cuda:1`"),
        ("none", "replay:4@50", "`hpcsched run --resume --dir /runs/one --devices replay:1@50`"),
        ("slurm", "auto", "`sbatch --nodes=1 --gres=gpu:1 SCRIPT`"),
        ("lsf", "auto", "the script again with 1 host and 1 GPU on each"),
    ],
)
def test_the_commands(kind: str, devices: str, command: str) -> None:
    said = commands(a_record(kind, devices), ROOT, Smaller(1, 1))
    assert said == f"`hpcsched drain --dir /runs/one`, then {command}"


def test_a_smaller_allocation_has_room_for_the_widest_job() -> None:
    jobs = [a_job(name, "m", 8000, gpus=n) for name, n in (("a", 2), ("b", 1), ("c", 1), ("d", 2))]
    driver = Driver(*jobs, gpus=2, hosts=3, profiles=PROFILES)
    driver.runs("a", "b", "c", "d")
    assert smaller_allocation(driver.machine) is None, "all is busy"
    driver.exits("d", 0)
    driver.exits("c", 0)
    assert smaller_allocation(driver.machine) == Smaller(2, 2), "three GPUs, on hosts of two"
    driver.exits("b", 0)
    assert smaller_allocation(driver.machine) == Smaller(1, 2)


def test_the_line_of_status() -> None:
    run = RunStatus(
        dir="d",
        state="RUNNING",
        stale=False,
        seq=1,
        written_at="",
        policy="marble",
        agent=AgentStatus(host="h", pid=1),
        allocation={"kind": "slurm"},
        clock_s=700.0,
    )
    status = Status(run=run, gpus=[], jobs=[])
    assert in_a_line(status, clock) == []
    run.left_over = [LeftOver(host=f"n{n}", gpus=[2 * n, 2 * n + 1], since_s=100.0 * n) for n in range(5)]
    run.given_back = {"n7": 5.0}
    assert in_a_line(status, clock) == [
        "idle, with no job left that could use them, for 5:00 or longer: GPUs 0-1 on n0; 2-3 on n1; "
        "4-5 on n2; 2 more hosts",
        "given back to slurm: n7",
    ]
    run.state = "STOPPED"
    assert in_a_line(status, clock) == ["given back to slurm: n7"]
