"""kill -9 of the agent at any moment, then `run --resume`: nothing lost, nothing done twice at once."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from livebench import FOREVER, SLOW_AT_FIRST, Bench, job, launched_once, saves

from hpcsched.core import events as ev
from hpcsched.store import journal

CPU = ["--devices", "cpu:2", "--grace", "5"]


def resumed(bench: Bench, *words: object) -> dict[str, Any]:
    """The result of `run --resume`, which must end well."""
    done = bench("run", "--resume", "--json", "-q", *words)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert {j["state"] for j in result["jobs"]} == {"COMPLETED"}
    assert launched_once(bench.replayed()[1])
    assert bench.all_gone()
    return result


def spawned(bench: Bench) -> int:
    try:
        return sum(isinstance(e, ev.WorkersSpawned) for e, _ in journal.read(bench.rundir.journal))
    except Exception:
        return 0


def test_killed_while_jobs_run(bench: Bench) -> None:
    jobs = bench.set_of(saves("a", steps=40, pause=SLOW_AT_FIRST, gpus=1), saves("b", steps=6, gpus=1))
    agent = bench.start(jobs, *CPU)
    bench.ready("a")
    bench.until(lambda: bench.states().get("b") == "COMPLETED")
    agent.kill()
    agent.wait()
    orphans = bench.live_workers()
    assert orphans, "the worker goes on without its agent"
    result = resumed(bench, jobs, *CPU)  # the same file again: its jobs are there already
    a, b = result["jobs"]
    assert len(result["jobs"]) == 2
    assert result["downtime_s"] > 0
    assert [x["ended"] for x in a["attempts"]] == ["lost", "completed"]
    assert len(b["attempts"]) == 1
    # The orphan was asked before it was ended, and saved: the second attempt goes on from there.
    first, second = (line for line in bench.output(1).splitlines() if line.startswith("from"))
    assert first.startswith("from 0 ")
    assert int(second.split()[1]) > 0
    assert a["steps_repeated"] == 0
    logs = bench("logs", "b")
    assert logs.stdout.startswith("from 0 on"), "output of an earlier life is still found"


def test_steps_after_the_last_checkpoint_are_counted(bench: Bench) -> None:
    script = """
        cd "$HPCSCHED_JOB_DIR"
        if [ $HPCSCHED_RESUME = 1 ]; then echo "resumed"; exit 0; fi
        trap '' TERM
        echo '{"step": 10, "attempt": 1}' > STATE.json; : > ready.1
        echo '{"step": 25, "t": 0}' >&$HPCSCHED_PROGRESS_FD; : > told
        while :; do sleep 0.05; done
    """
    agent = bench.start(bench.set_of(job("a", script, steps=30, gpus=1)), "--devices", "cpu:2")
    bench.until((bench.dir / "jobs" / "1" / "told").exists)
    bench.ready("a")
    bench.until(lambda: bench.job("a").get("step") == 25, "progress")
    agent.kill()
    agent.wait()
    result = resumed(bench, "--devices", "cpu:2", "--grace", "0.2")
    assert result["jobs"][0]["steps_repeated"] == 15
    *_, started = (
        event for event, _ in journal.read(bench.rundir.journal) if isinstance(event, ev.AgentStarted)
    )
    assert started.seen_steps == {1: 25}, "the snapshot told it, before it was on record"


def test_killed_while_starting(bench: Bench) -> None:
    jobs = bench.set_of(*(saves(f"j{n}", steps=5, gpus=1) for n in range(4)))
    agent = bench.start(jobs, *CPU)
    bench.until(lambda: spawned(bench) >= 1)
    agent.kill()
    agent.wait()
    assert len(resumed(bench, *CPU)["jobs"]) == 4


def test_killed_before_anything_started(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("a", steps=5, gpus=1)), *CPU)
    bench.until(lambda: bench.rundir.record.exists())
    agent.kill()
    agent.wait()
    if bench.rundir.begun:
        resumed(bench, "set.toml", *CPU)
    else:
        assert bench("run", "set.toml", *CPU).returncode == 0


def test_killed_while_suspending_and_resumed_under_another_policy_on_fewer_devices(bench: Bench) -> None:
    slow = """
        save() {
            while [ ! -e "$HPCSCHED_RUN_DIR/../go" ]; do sleep 0.05; done
            echo "{\\"step\\": 3, \\"attempt\\": $HPCSCHED_ATTEMPT}" > STATE.json; exit 75
        }
        trap save TSTP TERM
        cd "$HPCSCHED_JOB_DIR"; [ $HPCSCHED_RESUME = 1 ] && exit 0
        : > ready.$HPCSCHED_ATTEMPT
        while :; do sleep 0.05; done
    """
    jobs = bench.set_of(job("a", slow, gpus={"min": 1, "max": 2}), saves("b", steps=5, gpus=1))
    agent = bench.start(jobs, *CPU)
    bench.ready("a")
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states()["a"] == "SUSPENDING")
    agent.kill()
    agent.wait()
    (bench.folder / "go").touch()
    # The user wanted it suspended, and so it stays until he says otherwise.
    words = ["--devices", "cpu:1", "--policy", "exclusive", "--json"]
    second = bench.start("--resume", *words)
    bench.until(lambda: bench.states().get("a") == "SUSPENDED")
    bench.until(lambda: bench.states()["b"] == "COMPLETED")
    assert bench.status()["run"]["policy"] == "exclusive"
    assert bench("resume", "a").returncode == 0
    assert second.wait() == 0, second.said
    machine, actions = bench.replayed()
    assert launched_once(actions)
    assert machine.run.jobs[1].current.gpus == (0,)


def test_too_few_devices_are_said_and_nothing_is_lost(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("a", steps=FOREVER, gpus=2)), *CPU)
    bench.ready("a")
    agent.kill()
    agent.wait()
    done = bench("run", "--resume", "--devices", "cpu:1")
    assert done.returncode == 75
    assert "no job that is left can run on the CPU slots, cores and memory that are left" in done.stderr
    assert "job a.gpus: 2 CPU slots; accepted: at most 1: so many are here" in done.stderr
    assert bench.states() == {"a": "SUSPENDED"}


@pytest.mark.slow
def test_policy_options_that_do_not_fit_the_run_are_refused_before_they_are_on_record(bench: Bench) -> None:
    script = "[ $HPCSCHED_ATTEMPT = 2 ] || sleep 600"
    agent = bench.start(bench.set_of(job("a", script, gpus=1)), *CPU, "--policy", "exclusive")
    bench.until(lambda: bench.states().get("a") == "RUNNING")
    agent.kill()
    agent.wait()
    done = bench("run", "--resume", *CPU, "--policy-option", "promote=always")
    assert done.returncode == 2
    assert "promote" in done.stderr
    resumed(bench, *CPU)


def test_a_run_must_be_asked_for_to_go_on(bench: Bench) -> None:
    jobs = bench.set_of(job("a", "true", gpus=1))
    assert bench("run", jobs, *CPU, "-q").returncode == 0
    again = bench("run", jobs, *CPU)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "--resume" in again.stderr


def test_a_torn_journal_tail_is_cut(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("a", steps=FOREVER, gpus=1)), *CPU)
    bench.ready("a")
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75
    with bench.rundir.journal.open("ab") as file:
        file.write(b'{"v":1,"seq":99,"crc":"12')
    before = bench.rundir.journal.read_bytes()
    agent = bench.start("--resume", *CPU)
    bench.ready("a")
    assert bench.rundir.journal.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75, agent.said
    # Damage in the middle is no torn tail.
    data = bytearray(bench.rundir.journal.read_bytes())
    data[40] ^= 1
    bench.rundir.journal.write_bytes(data)
    done = bench("run", "--resume", *CPU)
    assert done.returncode not in (0, 75)
    assert "damaged at byte 0" in done.stderr
    assert done.stderr.count("\n") == 1
