"""The end of an allocation, followed by a real agent that asks a squeue of ours."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from livebench import COMMAND, PATIENCE_S, Bench, job, saves
from slurmstandin import Cluster


@pytest.fixture
def cluster(bench: Bench) -> Cluster:
    return Cluster(bench)


def test_all_is_saved_before_the_time_is_up_and_the_job_requeued(bench: Bench, cluster: Cluster) -> None:
    began = time.time()
    cluster.ends_in(3600)
    path = bench.set_of(saves("a", steps=5000), saves("b", steps=5000))
    agent = bench.start(path, "--devices", "cpu:2", "--margin", "5", "--requeue")
    bench.ready("a", "b")
    allocation = bench.status()["run"]["allocation"]
    assert allocation["kind"] == "slurm"
    deadline = datetime.fromisoformat(allocation["deadline"]).timestamp()
    assert deadline == pytest.approx(began + 3600, abs=2)
    soon = time.time() + 26
    cluster.shorten(agent, 26)
    assert agent.wait() == 75
    assert time.time() < soon - 5
    assert {j["state"] for j in bench.status()["jobs"]} == {"SUSPENDED"}
    assert bench.status()["run"]["state"] == "STOPPED"
    assert cluster.log[-1] == "scontrol requeue 77"
    assert "this batch job is back in the queue" in agent.said
    # The batch system starts the same script again.
    cluster.ends_in(3600)
    bench.env["SLURM_RESTART_COUNT"] = "1"
    agent = bench.start(path, "--devices", "cpu:2", "--margin", "5", "--requeue")
    bench.ready("a", "b")
    assert all(j["attempt"] == 2 for j in bench.status()["jobs"])
    assert "restart 1" in agent.said


def test_without_asking_for_it_nothing_comes_back(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work()
    cluster.shorten(agent, 60)
    assert agent.wait() == 75
    assert not [line for line in cluster.log if "requeue" in line]
    assert f"go on with `hpcsched run --resume --dir {bench.dir}`" in agent.said


def test_a_refused_requeue_is_said_and_loses_nothing(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work("--requeue")
    cluster.mood("refuse")
    cluster.shorten(agent, 60)
    assert agent.wait() == 75
    assert "Slurm does not requeue job 77" in agent.said
    assert "#SBATCH --requeue" in agent.said
    assert bench.status()["jobs"][0]["state"] == "SUSPENDED"


def test_where_nothing_advanced_it_does_not_come_back(bench: Bench, cluster: Cluster) -> None:
    cluster.ends_in(3600)
    script = job("stuck", "trap 'exit 143' TERM; while :; do sleep 0.05; done")
    agent = bench.start(bench.set_of(script), "--devices", "cpu:1", "--requeue")
    bench.until(lambda: bench.job("stuck").get("state") == "RUNNING")
    cluster.shorten(agent, 60)
    assert agent.wait() == 75
    assert "nothing advanced" in agent.said
    assert not [line for line in cluster.log if "requeue" in line]


@pytest.mark.slow
def test_a_job_that_does_not_leave_is_killed_in_time(bench: Bench, cluster: Cluster) -> None:
    cluster.ends_in(3600)
    stubborn = job(
        "stubborn", 'trap "" TSTP TERM; : > "$HPCSCHED_JOB_DIR/ready.1"; while :; do sleep 0.05; done'
    )
    path = bench.set_of(saves("a", steps=5000), stubborn)
    agent = bench.start(path, "--devices", "cpu:2", "--margin", "20", "--requeue")
    bench.ready("a", "stubborn")
    deadline = time.time() + 31
    cluster.shorten(agent, 31)  # 5 + 5 s of saving, as far as is known, and 20 in reserve
    assert agent.wait() == 75
    assert (cluster.folder / "log").stat().st_mtime < deadline
    assert "is killed (SIGKILL)" in agent.said
    assert cluster.log[-1] == "scontrol requeue 77"


def test_who_cancels_the_batch_job_does_not_get_it_back(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work("--requeue")
    agent.kill(signal.SIGCONT)  # Slurm adds it; it means nothing
    cluster.mood("mute")
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75
    assert bench.status()["jobs"][0]["state"] == "SUSPENDED"
    assert "asked to stop by SIGTERM" in agent.said
    assert not [line for line in cluster.log if "requeue" in line]


def test_a_warning_that_is_early_is_only_told(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work()
    agent.kill(signal.SIGUSR2)
    bench.until(lambda: "SIGUSR2 from the batch system; saving begins in 35" in agent.said)
    assert bench.status()["run"]["state"] == "RUNNING"
    # The end has moved: the next warning finds that out, long before the next question is due.
    cluster.ends_in(62)
    agent.kill(signal.SIGUSR1)
    assert agent.wait() == 75
    assert "the allocation now ends at" in agent.said


@pytest.mark.parametrize("mood", ["down", "garbage"])
def test_a_warning_counts_when_nobody_says_how_near_the_end_is(
    bench: Bench, cluster: Cluster, mood: str
) -> None:
    agent = cluster.at_work()
    cluster.mood(mood)
    agent.kill(signal.SIGUSR2)
    assert agent.wait() == 75
    assert "SIGUSR2: saving all jobs" in agent.said
    assert "going by the end time known last" in agent.said
    assert bench.status()["jobs"][0]["state"] == "SUSPENDED"


@pytest.mark.slow
def test_a_worker_that_wakes_us_late_is_no_warning(bench: Bench, cluster: Cluster) -> None:
    cluster.mood("down")  # no end is known, so that a warning would drain at once
    agent = bench.start(bench.set_of(saves("a", steps=5000)), "--devices", "cpu:1")
    bench.ready("a")
    agent.kill(signal.SIGUSR1)
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.job("a")["state"] == "SUSPENDED")
    agent.kill(signal.SIGUSR1)
    assert bench("resume", "a").returncode == 0
    bench.until(lambda: bench.job("a")["state"] == "RUNNING")
    assert "saving all jobs" not in agent.said
    agent.kill(signal.SIGUSR2)
    assert agent.wait() == 75


def test_a_batch_system_that_hangs_at_the_start_costs_the_deadline_only(
    bench: Bench, cluster: Cluster
) -> None:
    cluster.mood("down")
    agent = bench.start(bench.set_of(saves("a", steps=10)), "--devices", "cpu:1")
    assert agent.wait() == 0
    assert "has no end that is known" in agent.said


@pytest.mark.slow
def test_a_stop_of_all_of_us_does_not_count(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work()
    for _ in range(5):  # a stop counts only while it waits for things to happen, which it mostly does
        began, before = time.monotonic(), bench.status()["run"]["clock_s"]
        agent.kill(signal.SIGSTOP)
        time.sleep(6.5)
        agent.kill(signal.SIGCONT)
        bench.until(lambda before=before: bench.status()["run"]["clock_s"] > before)
        if "all was stopped for" in agent.said:
            break
    after = bench.status()["run"]["clock_s"]
    assert "all was stopped for" in agent.said
    assert after - before < time.monotonic() - began - 5


def test_a_report_that_cannot_be_written_does_not_keep_it_from_coming_back(
    bench: Bench, cluster: Cluster
) -> None:
    cluster.ends_in(3600)
    path = bench.set_of(saves("a", steps=5000))
    with Path("/dev/full").open("w") as full, (bench.folder / "said").open("w") as said:
        argv = [COMMAND, "run", str(path), "--devices", "cpu:1", "--requeue"]
        process = subprocess.Popen(argv, env=bench.env, cwd=bench.folder, stdout=full, stderr=said)
    try:
        bench.ready("a")
        cluster.ends_in(60)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(PATIENCE_S) == 75
    finally:
        process.kill()
    assert "scontrol requeue 77" in cluster.log
    assert "the report cannot be written" in (bench.folder / "said").read_text()


@pytest.mark.slow
def test_a_batch_system_that_is_restarting_is_asked_again(bench: Bench, cluster: Cluster) -> None:
    agent = cluster.at_work("--requeue")
    cluster.mood("restarting")
    cluster.shorten(agent, 60)
    bench.until(lambda: "trying again" in agent.said)
    cluster.mood("well")
    assert agent.wait() == 75
    assert "this batch job is back in the queue" in agent.said


def test_a_script_to_chain_is_enough_to_come_back(bench: Bench, cluster: Cluster) -> None:
    cluster.ends_in(3600)
    script = bench.folder / "next.sh"
    script.write_text("#!/bin/sh\n")
    path = bench.set_of(saves("a", steps=5000))
    for _ in range(2):  # the second life finds the run of the first
        agent = bench.start(path, "--devices", "cpu:1", "--chain-script", script)
        bench.ready("a")
        cluster.shorten(agent, 60)
        assert agent.wait() == 75
        assert "batch job 78 goes on when this one has ended" in agent.said
        cluster.ends_in(3600)
    assert bench.status()["run"]["allocation"]["next"] == "78"


def test_a_run_starts_with_the_hosts_that_came_and_comes_back_for_the_others(
    bench: Bench, cluster: Cluster
) -> None:
    bench.env |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    cluster.ends_in(3600)
    path = bench.set_of(saves("both", steps=5, nodes=2), job("one", "exit 0"))
    options = ("--devices", "cpu:1", "--interface", "127.0.0.1", "--requeue")
    agent = bench.start(path, *options)
    assert agent.wait() == 75
    assert "no node agent has come from node8: `srun` ended with exit code 1" in agent.said
    assert "on 1 of 2 hosts" in agent.said
    assert bench.states() == {"both": "PENDING", "one": "COMPLETED"}
    assert cluster.log[-1] == "scontrol requeue 77"
    # Nothing advances in the second life: that is for want of the host.
    bench.env["SLURM_RESTART_COUNT"] = "1"
    assert bench.start(path, *options).wait() == 75
    assert cluster.log.count("scontrol requeue 77") == 2


def test_a_slurm_job_without_its_variables_is_refused(bench: Bench) -> None:
    bench.env["SLURM_JOB_ID"] = "77"
    done = bench("run", bench.set_of(saves("a", steps=1)), "--devices", "cpu:1")
    assert done.returncode == 1
    assert "SLURM_JOB_NODELIST" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not bench.dir.exists()


def test_the_run_is_registered(bench: Bench, tmp_path: Path) -> None:
    bench.env["XDG_STATE_HOME"] = str(tmp_path / "state")
    assert bench("run", bench.set_of(saves("a", steps=1)), "--devices", "cpu:1").returncode == 0
    (entry,) = (tmp_path / "state" / "hpcsched" / "runs").iterdir()
    assert json.loads(entry.read_text())["dir"] == str(bench.dir)


@pytest.mark.slow
def test_an_agent_that_stays_with_nothing_to_do_leaves_before_the_end(bench: Bench, cluster: Cluster) -> None:
    cluster.ends_in(3600)
    agent = bench.start("--devices", "cpu:1", "--stay", "--margin", "25")
    bench.until(lambda: bench.status()["run"].get("idle"), "idle")
    ends = time.time() + 30
    cluster.shorten(agent, 30)
    assert agent.wait() == 0
    assert time.time() < ends - 10 and bench.status()["run"]["state"] == "FINISHED"
