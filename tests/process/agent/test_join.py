"""Hosts of another allocation join a run, and leave it: `hpcsched join`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from livebench import FOREVER, Bench, job, saves

HERE = ("--devices", "cpu:1", "--hosts", "home", "--launcher", "local", "--joinable", "--margin", "3")
THERE = ("--hosts", "far", "--launcher", "local")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def hosts(bench: Bench, name: str) -> list[str]:
    return list(bench.job(name).get("hosts", ()))


@pytest.mark.slow
def test_a_job_goes_to_a_host_that_joins_and_on_elsewhere_before_that_ends(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=1200, gpus=1))
    run = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, "--time", "25s", command="join")
    bench.ready("b")
    assert hosts(bench, "b") == ["far"]
    (joined,) = bench.status()["run"]["joined"]
    assert (joined["host"], joined["gpus"], joined["closing"]) == ("far", [1], False)
    assert "joined: far (ends in " in bench("status").stderr
    assert guest.wait() == 0 and guest.said.endswith(" s before its end here\n")
    bench.until(lambda: bench.job("b")["state"] == "SUSPENDED", "b saved")
    bench("cancel", "a")
    assert run.wait() == 0, run.said
    machine, _ = bench.replayed()
    attempts = machine.run.jobs[2].attempts
    assert [attempt.gpus for attempt in attempts] == [(1,), (0,)]
    assert attempts[0].from_step == 0 and attempts[0].to_step == attempts[1].from_step
    assert attempts[1].to_step == 1200
    assert "host far left the run" in run.said and bench.all_gone()
    assert not list(bench.dir.glob("join*")), "no key is left"


@pytest.mark.slow
def test_who_interrupts_it_has_its_hosts_back_and_may_join_again(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    run = bench.start(file, *HERE)
    bench.ready("a")
    first = bench.start(*THERE, command="join")
    bench.ready("b")
    first.kill(signal.SIGINT)
    assert first.wait() == 0
    bench.until(lambda: bench.job("b")["state"] == "SUSPENDED", "b saved")
    second = bench.start(*THERE, command="join")
    bench.until(lambda: hosts(bench, "b") == ["far-2"], "b on far-2")
    bench("drain")
    assert run.wait() == 75
    bench.until(lambda: second.process.poll() is not None or "waiting" in second.said, "the agent is gone")
    assert second.process.poll() is None, "the run may go on"
    second.kill(signal.SIGINT)
    assert second.wait() == 0 and bench.all_gone()


def test_a_job_that_needs_more_than_there_is_waits_for_hosts_to_come(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), job("wide", "sleep 0.1", gpus=1, nodes=2))
    run = bench.start(file, *HERE)
    bench.ready("a")
    assert bench.job("wide")["state"] == "PENDING"
    guest = bench.start("--hosts", "far,away", "--launcher", "local", command="join")
    bench.until(lambda: bench.states().get("wide") == "COMPLETED", "wide")
    assert hosts(bench, "wide") == ["away", "far"]
    bench("cancel", "a")
    assert run.wait() == 0 and guest.wait() == 0


@pytest.mark.slow
def test_what_cannot_be_joined_is_said(bench: Bench) -> None:
    nowhere = bench("join", *THERE, "--wait", "1s")
    assert (nowhere.returncode, "no run in" in nowhere.stderr) == (3, True)
    run = bench.start(
        bench.set_of(saves("a", steps=FOREVER)), "--devices", "cpu:1", "--hosts", "x,y", "--launcher", "local"
    )
    bench.ready("a")
    refused = bench("join", *THERE)
    assert refused.returncode == 2 and "not started with `run --joinable`" in refused.stderr
    bench("cancel", "a")
    assert run.wait() == 0
    over = bench("join", *THERE)
    assert (over.returncode, over.stderr) == (0, "hpcsched: the run is over\n")
