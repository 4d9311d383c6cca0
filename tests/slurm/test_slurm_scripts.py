"""The example scripts, and what `hpcsched script slurm` prints, on a real Slurm: each reaches its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from budget import slow

pytestmark = pytest.mark.slurm

EXAMPLES = Path(__file__).parents[2] / "jobscripts" / "slurm"
JOB = '[[job]]\nname = "{name}"\nmodel = "m"\nsteps = {steps}\nreplay = true\ngpus = {{ min = 1, max = 6 }}\n'
PROFILE = {"model": "m", "device": "any", "throughput": {"1": 1.0, "6": 4.0}}
PROFILE |= {"start_s": 1.0, "suspend_s": 1.0, "resume_s": 1.0}
SHORT, LONG = 100, 100_000
"""Steps that take half a second, and some that outlast every test."""

WAIT_S = 60.0


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Where the user is: job sets (two short jobs each), and the profile they follow."""
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "profiles": [PROFILE]}))
    for name in ("a", "b"):
        jobs = "".join(JOB.format(name=f"{name}{i}", steps=SHORT) for i in range(2))
        (tmp_path / f"{name}.toml").write_text("schema = 1\n" + jobs)
    (tmp_path / "long.toml").write_text("schema = 1\n" + JOB.format(name="x", steps=LONG))
    return tmp_path


def settings(work: Path, **more: str) -> str:
    """--export: the settings of the run, and none of this user's own."""
    own = {
        "HPCSCHED_DEVICES": "replay:6@50",
        "HPCSCHED_PROFILES": f"{work}/p.json",
        "HPCSCHED_DATABASE": f"{work}/db",
        "HPCSCHED_SITE_CONFIG": f"{work}/none.toml",
        "XDG_CONFIG_HOME": f"{work}/config",
        "XDG_STATE_HOME": f"{work}/state",
        **more,
    }
    return "--export=ALL," + ",".join(f"{name}={value}" for name, value in own.items())


def page(rundir: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((rundir / "status.json").read_text())
    except FileNotFoundError:
        return {"run": {"state": "none"}, "jobs": []}
    return found


def states(rundir: Path) -> list[str]:
    return [job["state"] for job in page(rundir)["jobs"]]


def until(what: Callable[[], Any], why: Callable[[], str]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)
    return found


def example(slurm: Any, work: Path, name: str, *options: str, **more: str) -> str:
    text = (EXAMPLES / f"{name}.sbatch").read_text()
    return str(slurm.sbatch(text, "--time=2", settings(work, **more), *options, cwd=work))


def printed(slurm: Any, work: Path, *words: str) -> str:
    """Have a script printed into a file, and submit that."""
    given = (
        "--gpus",
        "6",
        "--time",
        "5m",
        "--devices",
        "replay:6@50",
        "--profiles",
        "p.json",
        "-o",
        "job.sh",
    )
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched", "script", "slurm", *words, *given],
        cwd=work,
        env={**os.environ, "HPCSCHED_SITE_CONFIG": f"{work}/none.toml", "XDG_CONFIG_HOME": f"{work}/config"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    options = (f"--export=ALL,HPCSCHED_DATABASE={work}/db,XDG_STATE_HOME={work}/state",)
    job = subprocess.run(
        ("sbatch", "--parsable", *options, str(work / "job.sh")),
        env=slurm.env,
        cwd="/",  # the script itself says where
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    slurm.jobs.append(job.stdout.strip())
    return job.stdout.strip()


@pytest.mark.parametrize(("name", "hosts"), [slow("single", 1), ("several-hosts", 2), slow("chained", 1)])
def test_an_example_reaches_its_end(slurm: Any, work: Path, name: str, hosts: int) -> None:
    job = example(slurm, work, name, HPCSCHED_JOBS="a.toml")
    assert slurm.wait(job, timeout_s=WAIT_S) == "COMPLETED", slurm.log(job)
    assert states(work / "hpcsched-run") == ["COMPLETED"] * 2
    found = page(work / "hpcsched-run")
    assert found["run"]["allocation"]["id"] == job
    assert len({gpu["host"] for gpu in found["gpus"]}) == hosts


def test_the_array_example_runs_a_set_in_each_task(slurm: Any, work: Path) -> None:
    job = example(slurm, work, "array", "--array=0-1", HPCSCHED_SETS="a.toml b.toml")
    for name in ("a", "b"):
        rundir = work / "hpcsched-run" / name
        until(lambda d=rundir: page(d)["run"]["state"] == "FINISHED", lambda: all_logs(slurm, job))  # type: ignore[misc]
        assert states(rundir) == ["COMPLETED"] * 2


def all_logs(slurm: Any, job: str) -> str:
    return "\n".join(path.read_text() for path in slurm.work.glob("*.out")) + job


def test_a_printed_script_reaches_its_end(slurm: Any, work: Path) -> None:
    job = printed(slurm, work, "a.toml")
    assert slurm.wait(job, timeout_s=WAIT_S) == "COMPLETED"
    assert states(work / "hpcsched-run") == ["COMPLETED"] * 2
    assert (work / f"a-{job}.out").exists()


@pytest.mark.slow
def test_a_printed_array_runs_a_set_in_each_task(slurm: Any, work: Path) -> None:
    job = printed(slurm, work, "a.toml", "b.toml", "--at-once", "1")
    for number, name in enumerate(("a", "b")):
        rundir, log = work / "hpcsched-run" / name, work / f"hpcsched-{job}_{number}.out"
        until(lambda d=rundir: page(d)["run"]["state"] == "FINISHED", lambda f=log: f"{f}")  # type: ignore[misc]
        assert states(rundir) == ["COMPLETED"] * 2 and log.exists()


def test_names_with_blanks_reach_slurm_whole(slurm: Any, work: Path) -> None:
    odd = work / "a b 'c' 100%"
    odd.mkdir()
    for name in ("a.toml", "p.json"):
        (odd / name).write_text((work / name).read_text())
    job = printed(slurm, odd, "a.toml", "--dir", "the run", "--name", "my job")
    assert slurm.wait(job, timeout_s=WAIT_S) == "COMPLETED"
    assert states(odd / "the run") == ["COMPLETED"] * 2
    assert (odd / f"my job-{job}.out").exists()


def running(slurm: Any, work: Path, job: str) -> None:
    log = work / f"long-{job}.out"
    until(
        lambda: states(work / "hpcsched-run") == ["RUNNING"],
        lambda: log.read_text() if log.exists() else slurm.state(job),
    )
    # Saving is asked of a program only once it has said that it can.
    until(lambda: list((work / "hpcsched-run" / "jobs" / "1").glob("ready.[0-9]")), lambda: "never ready")


def warn(slurm: Any, job: str) -> None:
    """Bring the end within the margin, and send what --signal=B:USR2@... has Slurm send then."""
    slurm.run("scontrol", "update", f"job={job}", "TimeLimit=1")
    slurm.run("scancel", "--batch", "--signal=USR2", job)


def test_a_warned_script_saves_and_comes_back_by_requeue(slurm: Any, work: Path) -> None:
    job = printed(slurm, work, "long.toml")
    running(slurm, work, job)
    warn(slurm, job)
    log = work / f"long-{job}.out"
    assert slurm.wait(job, {"PENDING", "FAILED", "COMPLETED"}, timeout_s=WAIT_S) == "PENDING", log.read_text()
    said = subprocess.run(
        [sys.executable, "-m", "hpcsched", "status", "--dir", str(work / "hpcsched-run")],
        env=dict(slurm.env),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert f"job {job} waits in the queue of slurm (BeginTime): it goes on by itself" in said.stderr
    slurm.start_again(job, "TimeLimit=5")  # with time to work
    until(lambda: page(work / "hpcsched-run")["run"]["state"] == "RUNNING", log.read_text)
    assert page(work / "hpcsched-run")["jobs"][0]["suspensions"] == 1


def test_a_warned_script_saves_and_a_follow_up_job_goes_on(slurm: Any, work: Path) -> None:
    job = printed(slurm, work, "long.toml", "--chain")
    running(slurm, work, job)
    warn(slurm, job)
    slurm.wait(job, timeout_s=WAIT_S)
    log = work / f"long-{job}.out"

    def next_life() -> bool:
        run = page(work / "hpcsched-run")["run"]
        return run["state"] == "RUNNING" and run["allocation"]["id"] not in (None, job)

    until(next_life, log.read_text)
    follow_up = page(work / "hpcsched-run")["run"]["allocation"]["id"]
    slurm.jobs.append(follow_up)
    assert page(work / "hpcsched-run")["jobs"][0]["suspensions"] == 1
