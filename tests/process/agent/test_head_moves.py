"""The head of a joinable run dies, or its allocation ends: what runs elsewhere goes on under another."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from livebench import FOREVER, Agent, Bench, job, saves
from slurmstandin import Cluster

from hpcsched.launch.orphans import end_processes

ALONE = ("--devices", "cpu:1", "--joinable", "--margin", "3", "--grace", "2")
HERE = (*ALONE, "--hosts", "home", "--launcher", "local")
THERE = ("--hosts", "far", "--launcher", "local")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def killed_with_its_node(agent: Agent) -> None:
    """End an agent and all that it has started on its host, as when that dies."""
    theirs = [agent.pid]
    for parent in theirs:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # some end meanwhile
            for task in Path(f"/proc/{parent}/task").iterdir():
                theirs += map(int, (task / "children").read_text().split())
    for pid in theirs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def led_again(bench: Bench, guest: Agent) -> None:
    """Wait until an agent in the guest's allocation leads the run."""
    bench.until(lambda: "starts one here" in guest.said, "the guest takes over")
    record = bench.rundir.read_record()
    assert record
    bench.until(
        lambda: (now := bench.rundir.read_record()) and now.epoch > 1 and not bench.status()["run"]["stale"],
        "another agent leads",
    )


def attempts(bench: Bench) -> dict[str, list[tuple[int, ...]]]:
    """By job the GPUs of its attempts."""
    machine, _ = bench.replayed()
    return {job.spec.name: [attempt.gpus for attempt in job.attempts] for job in machine.run.jobs.values()}


def test_what_runs_elsewhere_goes_on_without_the_head_and_under_the_next(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.ready("b")
    first.kill()
    first.wait()
    led_again(bench, guest)
    bench.until(lambda: bench.states() == {"a": "RUNNING", "b": "RUNNING"}, "both go on")
    assert attempts(bench) == {"a": [(0,)], "b": [(1,)]}
    bench("cancel", "a", "b")
    assert guest.wait() == 0
    assert guest.said.endswith("the run is over\n") and bench.all_gone()


@pytest.mark.slow
def test_a_job_on_a_host_that_died_with_the_head_waits_until_it_surely_has_and_goes_on(bench: Bench) -> None:
    file = bench.set_of(*(saves(name, steps=FOREVER, gpus=1) for name in "abcd"))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, "--devices", "cpu:2", command="join")
    bench.ready("b", "c")
    killed_with_its_node(first)
    led_again(bench, guest)
    now = {"a": "PENDING", "b": "RUNNING", "c": "RUNNING", "d": "PENDING"}
    bench.until(lambda: bench.states() == now, "b and c go on")
    assert "HostSilent" in bench("explain", "a", "--json").stdout
    assert attempts(bench) == {"a": [(0,)], "b": [(1,)], "c": [(2,)], "d": []}, "nothing starts there"
    bench("cancel", "c", "d")
    bench.until(lambda: bench.states()["a"] == "RUNNING", "a starts again")
    assert attempts(bench)["a"] == [(0,), (2,)]
    bench("cancel", "a", "b")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_of_two_allocations_one_leads_and_when_it_dies_the_other(bench: Bench) -> None:
    file = bench.set_of(*(saves(name, steps=FOREVER, gpus=1) for name in "abc"))
    first = bench.start(file, *HERE)
    bench.ready("a")
    far = bench.start(*THERE, command="join")
    bench.ready("b")
    wide = bench.start("--hosts", "wide", "--launcher", "local", command="join")
    bench.ready("c")
    first.kill()
    first.wait()
    bench.until(lambda: "starts one here" in far.said + wide.said, "one takes over")
    leader, other = (far, wide) if "starts one here" in far.said else (wide, far)
    led_again(bench, leader)
    bench.until(lambda: bench.states() == dict.fromkeys("abc", "RUNNING"), "all go on")
    record = bench.rundir.read_record()
    assert record and "starts one here" not in other.said
    leader.kill()
    leader.wait()
    end_processes([(record.pid, record.started)], 0.0)
    led_again(bench, other)
    bench.until(lambda: bench.states() == dict.fromkeys("abc", "RUNNING"), "all go on again")
    assert attempts(bench) == {"a": [(0,)], "b": [(1,)], "c": [(2,)]}
    bench("cancel", "a", "b", "c")
    assert other.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_the_head_leaves_before_its_allocation_ends_and_its_jobs_go_on_elsewhere(bench: Bench) -> None:
    cluster = Cluster(bench)
    cluster.ends_in(3600)
    file = bench.set_of(saves("a", steps=1500, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *ALONE)
    bench.ready("a")
    guest = bench.start(*THERE, "--batch", "none", "--devices", "cpu:2", command="join")
    bench.ready("b")
    cluster.shorten(first, 20)
    assert first.wait() == 75 and "leaves the run to another allocation" in first.said
    led_again(bench, guest)
    bench.until(lambda: bench.states().get("a") == "COMPLETED", "a has ended")
    machine, _ = bench.replayed()
    a, b = machine.run.jobs[1], machine.run.jobs[2]
    assert [attempt.gpus for attempt in a.attempts] == [(0,), (2,)]
    assert a.attempts[0].to_step == a.attempts[1].from_step > 0 and len(b.attempts) == 1
    bench("cancel", "b")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_an_agent_that_another_one_has_followed_writes_nothing_more(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("a", steps=FOREVER, gpus=1)), *HERE)
    bench.ready("a")
    record = bench.rundir.read_record()
    assert record and record.epoch == 1
    bench.rundir.write_record(msgspec.structs.replace(record, epoch=2))
    bench.start("a", command="hold")
    assert agent.wait() != 0 and "another agent leads" in agent.said
    machine, _ = bench.replayed()
    assert not machine.run.jobs[1].held
    assert bench.all_gone()


@pytest.mark.slow
def test_a_program_that_saves_by_itself_goes_on(bench: Bench) -> None:
    script = (
        'i=0; while :; do i=$((i+1)); sleep 0.1; echo $i > "$HPCSCHED_JOB_DIR/ckpt-$i";'
        ' rm -f "$HPCSCHED_JOB_DIR/ckpt-$((i-3))"; done'
    )
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), job("b", script, gpus=1, checkpoints="ckpt-*"))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.until(lambda: bench.states().get("b") == "RUNNING", "b")
    first.kill()
    first.wait()
    led_again(bench, guest)
    bench.until(lambda: bench.states() == {"a": "RUNNING", "b": "RUNNING"}, "both go on")
    assert attempts(bench)["b"] == [(1,)]
    bench("cancel", "a", "b")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_who_resumes_the_run_of_a_dead_agent_has_its_host_and_the_others(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.ready("b")
    guest.kill(signal.SIGSTOP)  # else it would be faster
    first.kill()
    first.wait()
    second = bench.start("--resume", *HERE)
    bench.until(lambda: "ran on without an agent" in second.said, "the second agent leads")
    guest.kill(signal.SIGCONT)
    bench.until(lambda: attempts(bench) == {"a": [(0,), (2,)], "b": [(1,)]}, "both run")
    bench("cancel", "a", "b")
    assert second.wait() == 0 and guest.wait() == 0 and bench.all_gone()
    assert "starts one here" not in guest.said


@pytest.mark.slow
def test_a_run_that_was_drained_is_not_taken_over(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.ready("b")
    bench("drain")
    assert first.wait() == 75
    bench.until(lambda: "waiting" in guest.said, "the guest waits for an agent")
    second = bench.start("--resume", *HERE)
    bench.until(lambda: bench.states() == {"a": "RUNNING", "b": "RUNNING"}, "both run again")
    assert "starts one here" not in guest.said
    bench("cancel", "a", "b")
    assert second.wait() == 0 and guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_an_agent_that_hangs_is_not_followed_on_its_host(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.ready("b")
    first.kill(signal.SIGSTOP)
    bench.until(lambda: bench.rundir.status.stat().st_mtime + 20 < time.time(), "it hangs")
    first.kill(signal.SIGCONT)
    bench.until(lambda: "was stopped" in first.said, "it goes on")
    assert "starts one here" not in guest.said
    assert bench.states() == {"a": "RUNNING", "b": "RUNNING"}
    assert attempts(bench) == {"a": [(0,)], "b": [(1,)]}
    bench("cancel", "a", "b")
    assert first.wait() == 0 and guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_an_allocation_that_comes_when_all_others_are_gone_leads_the_run(bench: Bench) -> None:
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
    first = bench.start(file, *HERE)
    bench.ready("a")
    killed_with_its_node(first)
    guest = bench.start(*THERE, "--time", "600s", command="join")
    led_again(bench, guest)
    bench.until(lambda: bench.states() == {"a": "PENDING", "b": "RUNNING"}, "b starts")
    assert "HostSilent" in bench("explain", "a", "--json").stdout
    assert bench.job("b")["hosts"] == ["far"]
    bench("cancel", "a", "b")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_a_head_in_a_lent_allocation_leaves_it_in_good_order(bench: Bench) -> None:
    file = bench.set_of(*(saves(name, steps=FOREVER, gpus=1) for name in "ab"))
    first = bench.start(file, *HERE)
    bench.ready("a")
    far = bench.start(*THERE, "--time", "60s", command="join")
    bench.ready("b")
    first.kill()
    first.wait()
    led_again(bench, far)
    wide = bench.start("--hosts", "wide", "--launcher", "local", "--devices", "cpu:2", command="join")
    assert far.wait() == 0 and far.said.endswith(" s before its end here\n")
    assert "leaves the run to another allocation" in far.said
    led_again(bench, wide)
    bench.until(lambda: bench.job("b").get("hosts") == ["wide"], "b goes on elsewhere")
    machine, _ = bench.replayed()
    b = machine.run.jobs[2]
    assert b.attempts[0].to_step == b.attempts[1].from_step and len(b.attempts) == 2
    bench("cancel", "a", "b")
    assert wide.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_a_job_on_several_hosts_goes_on_with_the_ranks_that_it_has(bench: Bench) -> None:
    log, go = bench.folder / "starts", bench.folder / "go"
    script = f"echo $RANK >> {log}; while [ ! -e {go}.$RANK ]; do sleep 0.1; done; echo over >> {log}"
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), job("wide", script, gpus=1, nodes=2))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start("--hosts", "far,away", "--launcher", "local", command="join")
    bench.until(lambda: log.exists() and len(log.read_text().split()) == 2, "both ranks run")
    first.kill()
    first.wait()
    led_again(bench, guest)
    bench.until(lambda: bench.states() == {"a": "RUNNING", "wide": "RUNNING"}, "both go on")
    for rank in (0, 1):
        Path(f"{go}.{rank}").touch()
    bench.until(lambda: bench.states()["wide"] == "COMPLETED", "wide has ended")
    assert sorted(log.read_text().split()) == ["0", "1", "over", "over"]
    assert len(attempts(bench)["wide"]) == 1
    bench("cancel", "a")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_an_end_that_no_head_has_seen_is_told_to_the_next(bench: Bench, code: int, state: str) -> None:
    log, go = bench.folder / "starts", bench.folder / "go"
    script = f"echo start >> {log}; while [ ! -e {go} ]; do sleep 0.1; done; exit {code}"
    file = bench.set_of(saves("a", steps=FOREVER, gpus=1), job("b", script, gpus=1, retries=0))
    first = bench.start(file, *HERE)
    bench.ready("a")
    guest = bench.start(*THERE, command="join")
    bench.until(lambda: bench.states().get("b") == "RUNNING" and log.exists(), "b runs")
    first.kill()
    first.wait()
    go.touch()
    led_again(bench, guest)
    bench.until(lambda: bench.states().get("b") == state, "b has ended")
    assert log.read_text().count("start") == 1 and len(attempts(bench)["b"]) == 1
    assert bench("wait", "b").returncode == (0 if code == 0 else 1)
    bench("cancel", "a")
    assert guest.wait() == 0 and bench.all_gone()


@pytest.mark.slow
def test_a_run_whose_time_is_up_goes_on_where_an_allocation_waits(bench: Bench) -> None:
    cluster = Cluster(bench)
    cluster.ends_in(3600)
    first = bench.start(bench.set_of(saves("a", steps=FOREVER, gpus=1)), *ALONE)
    bench.ready("a")
    guest = bench.start(*THERE, "--batch", "none", "--time", "48s", command="join")
    bench.until(lambda: bench.status()["run"]["joined"], "far has joined")
    cluster.shorten(first, 20)  # the other one does not last so much longer that all would go there
    assert first.wait() == 75 and "stopped with 1 job left" in first.said
    led_again(bench, guest)
    bench.until(lambda: bench.states().get("a") == "RUNNING", "a goes on")
    bench("cancel", "a")
    assert guest.wait() == 0 and bench.all_gone()
