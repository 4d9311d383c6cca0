"""An agent that stays when nothing is left to run, and one in the background."""

from __future__ import annotations

import os
import signal
import time

import pytest
from livebench import Bench, job, saves

from hpcsched.store.rundir import agent_works

STAYS = ("--devices", "cpu:1", "--stay")


def idle(bench: Bench) -> bool:
    return bool(bench.status()["run"].get("idle"))


def test_it_stays_with_nothing_runs_what_comes_and_ends_when_it_is_drained(bench: Bench) -> None:
    agent = bench.start(*STAYS)
    bench.until(lambda: idle(bench), "idle")
    shown = bench("status")
    assert shown.returncode == 0 and "the agent stays for what `hpcsched submit` brings" in shown.stderr
    assert bench("submit", "--name", "a", "--", "true").returncode == 0
    assert bench("wait", "a").returncode == 0
    bench.until(lambda: idle(bench), "idle again")
    assert bench("submit", "--name", "b", "--", "false").returncode == 0
    assert bench("wait", "b").returncode == 1
    assert bench("drain").returncode == 0
    assert agent.wait() == 1  # b has failed
    assert bench.status()["run"]["state"] == "FINISHED" and not idle(bench)
    assert agent.said.count("nothing is left that can run: staying until `hpcsched drain`") == 3


@pytest.mark.slow
def test_it_leaves_when_nothing_has_come_for_long_enough(bench: Bench) -> None:
    began = time.monotonic()
    agent = bench.start(bench.set_of(job("a", "sleep 1")), *STAYS, "--idle-timeout", "2s")
    assert agent.wait() == 0
    assert time.monotonic() - began > 3
    assert "nothing has come that can run for 2 s: leaving" in agent.said


@pytest.mark.slow
def test_a_job_that_can_never_start_here_does_not_end_it_and_is_left(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("wide", steps=5000, gpus=2)), "--devices", "cpu:2")
    bench.ready("wide")
    assert bench("drain").returncode == 0 and agent.wait() == 75
    agent = bench.start(*STAYS, "--resume", "--idle-timeout", "5s")
    bench.until(lambda: idle(bench), "idle")
    assert bench("submit", "--name", "a", "--", "true").returncode == 0
    assert bench("wait", "a").returncode == 0
    assert agent.wait() == 75
    assert bench.states() == {"wide": "SUSPENDED", "a": "COMPLETED"}
    assert "that are left: staying" in agent.said


def test_one_in_the_background_outlives_the_command_that_started_it(bench: Bench) -> None:
    done = bench("run", *STAYS, "--detach")
    assert done.returncode == 0 and f"`hpcsched drain --dir {bench.dir}` ends it" in done.stderr
    record = bench.rundir.read_record()
    try:
        assert record is not None and agent_works(bench.rundir)
        assert os.getsid(record.pid) == record.pid
        again = bench("run", *STAYS, "--detach")
        assert again.returncode == 2 and "give it more jobs with `hpcsched submit`" in again.stderr
        assert bench("submit", "--name", "a", "--", "true").returncode == 0
        assert bench("wait").returncode == 0
        assert bench("drain").returncode == 0
        assert "job 1 (a) completed" in (bench.dir / "agent.log").read_text()
    finally:
        if record is not None and agent_works(bench.rundir):
            os.kill(record.pid, signal.SIGKILL)


def test_what_cannot_begin_in_the_background_says_so_and_leaves_nothing(bench: Bench) -> None:
    done = bench("run", "none.toml", "--detach", "--devices", "cpu:1")
    assert done.returncode == 2 and "none.toml: No such file" in done.stderr
    assert not bench.dir.exists()
    assert bench("run", "--idle-timeout", "3s").returncode == 2
