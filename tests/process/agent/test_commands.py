"""Commands on a living run, on a stopped one, and on none; signals to the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from livebench import COMMAND, FOREVER, PATIENCE_S, SLOW_AT_FIRST, Bench, job, saves

CPU = ["--devices", "cpu:2"]


def test_jobs_come_in_and_are_told_what_to_do(bench: Bench) -> None:
    agent = bench.start(bench.set_of(saves("a", steps=FOREVER, gpus=1)), *CPU)
    bench.ready("a")
    # submit: a command, a file; ids in order
    held = bench("submit", "--name", "b", "--gpus", "2", "--parsable", "--", "sh", "-c", "echo b")
    assert held.stdout == "2\n", held.stderr
    more = bench.set_of(job("c", "echo c", gpus=2), job("d", "true", gpus=2, after=["c"]), name="more.toml")
    assert bench("submit", more).stdout == "submitted job 3 (c)\nsubmitted job 4 (d)\n"
    twice = bench("submit", more)
    assert twice.returncode == 2
    assert twice.stderr.count("\n") == 1
    large = bench("submit", "--gpus", "9", "--", "true")
    assert large.returncode == 2
    assert "at most 2" in large.stderr
    # hold, release; cancel of one that waits, with what depends on it
    assert bench("hold", "b").returncode == 0
    bench.until(lambda: bench.states().get("b") == "HELD")
    assert "held" in bench("explain", "b").stdout.lower()
    assert bench("cancel", "3-4").returncode == 0
    bench.until(lambda: bench.states()["c"] == bench.states()["d"] == "CANCELLED")
    # suspend, and another has its GPUs
    assert bench("suspend", "1").returncode == 0
    bench.until(lambda: bench.states()["a"] == "SUSPENDED")
    assert bench("release", "b").returncode == 0
    bench.until(lambda: bench.states()["b"] == "COMPLETED")
    assert bench("resume", "a").returncode == 0
    bench.until(lambda: bench.states()["a"] == "RUNNING" and bench.job("a").get("ready"))
    _questions(bench)
    # cancel of one that runs: the run is over
    assert bench("cancel", "a").returncode == 0
    assert agent.wait() == 0, agent.said
    assert bench.states() == {"a": "CANCELLED", "b": "COMPLETED", "c": "CANCELLED", "d": "CANCELLED"}
    assert bench.all_gone()
    assert bench("wait", "b").returncode == 0
    assert bench("wait").returncode == 1
    gone = bench("cancel", "a")
    assert gone.returncode == 3
    assert "it is FINISHED" in gone.stderr


def _questions(bench: Bench) -> None:
    lines = bench("status").stdout.splitlines()
    assert lines[0].split()[:4] == ["JOBID", "NAME", "USER", "ST"]
    assert lines[1].split()[0] == "1"
    assert lines[-1] == "finished: 2 cancelled, 1 completed"
    every = bench("status", "--states", "all", "-o", "%i,%t", "--noheader").stdout.split()
    assert every == ["1", "R", "2", "CD", "3", "CA", "4", "CA"]
    assert bench("status", "--states", "CD", "-o", "%j", "--noheader").stdout == "b\n"
    assert bench("status", "-j", "2-3", "-o", "%j", "--noheader").stdout == "b\nc\n"
    page = json.loads(bench("status", "--json").stdout)
    assert page["schema"] == 1
    assert page["run"]["stale"] is False
    assert [j["suspensions"] for j in page["jobs"]] == [1, 0, 0, 0]
    assert page["gpus"][0]["job"] == 1
    assert bench("logs", "b").stdout == "b\n", "one process, which sees both GPUs"
    assert "1 CPU slot" in bench("explain", "a").stdout
    for words in (
        ["cancel", "9"],
        ["explain", "nobody"],
        ["logs", "9"],
        ["status", "-j", "x"],
        ["wait", "9"],
    ):
        unknown = bench(*words)
        assert unknown.returncode == 4, words
        assert unknown.stderr.count("\n") == 1


def test_a_users_signal_reaches_a_job_and_changes_nothing_of_the_run(bench: Bench) -> None:
    program = "trap 'echo had it' USR1; echo there; while :; do sleep 0.1; done"
    bench.start(bench.set_of(job("a", program)), *CPU)
    bench.until(lambda: "there" in bench("logs", "a").stdout)
    sent = bench("cancel", "--signal", "usr1", "a")
    assert sent.returncode == 0 and "job 1 (a): was sent SIGUSR1" in sent.stderr
    bench.until(lambda: "had it" in bench("logs", "a").stdout)
    assert bench.states() == {"a": "RUNNING"}
    wrong = bench("cancel", "-s", "TERM", "a")
    assert wrong.returncode == 2 and "--signal: 'TERM'; accepted: SIGUSR1" in wrong.stderr
    assert bench("cancel", "a").returncode == 0
    bench.until(lambda: bench.states() == {"a": "CANCELLED"})
    late = bench("cancel", "-s", "USR1", "a")
    assert late.returncode in (1, 3)


def test_logs_follow_a_job_to_its_end(bench: Bench) -> None:
    script = "for n in 1 2 3; do echo $n; sleep 0.3; done; printf end"
    agent = bench.start(bench.set_of(job("a", script, gpus=1)), *CPU)
    bench.until(lambda: "a" in bench.states())
    assert bench("logs", "-f", "a").stdout == "1\n2\n3\nend"
    assert agent.wait() == 0


def test_drain_saves_all_and_resume_finishes(bench: Bench) -> None:
    agent = bench.start(
        bench.set_of(saves("a", steps=30, gpus=2, pause=SLOW_AT_FIRST), saves("b", steps=3, gpus=2)), *CPU
    )
    bench.ready("a")
    waiting = subprocess.Popen([COMMAND, "wait"], env=bench.env, stderr=subprocess.DEVNULL)
    assert bench("drain").returncode == 0
    assert agent.wait() == 75, agent.said
    assert "run --resume" in agent.said
    assert waiting.wait(PATIENCE_S) == 3
    assert bench.status()["run"]["state"] == "STOPPED"
    assert bench.states() == {"a": "SUSPENDED", "b": "PENDING"}
    assert {j["reason"] for j in bench.status()["jobs"]} == {"Draining"}
    assert bench("suspend", "a").returncode == 3
    assert "next: the run has stopped: `hpcsched run --resume --dir" in bench("explain", "b").stdout
    done = bench("run", "--resume", "--json", "-q", *CPU)
    assert done.returncode == 0, done.stderr
    assert {j["steps_repeated"] for j in json.loads(done.stdout)["jobs"]} == {0}


def test_an_interrupt_drains(bench: Bench) -> None:
    for n, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        words = ["--resume"] if n else [bench.set_of(saves("a", steps=FOREVER, gpus=1))]
        agent = bench.start(*words, *CPU)
        bench.until(lambda n=n: bench.job("a").get("attempt") == n + 1 and bench.job("a").get("ready"))
        agent.kill(number)
        assert agent.wait() == 75, agent.said
        assert number.name in agent.said
        assert bench.states() == {"a": "SUSPENDED"}
    assert bench.all_gone()
    starts = [int(x.split()[1]) for x in bench.output().splitlines() if x.startswith("from")]
    assert starts == sorted(starts)


def test_a_second_interrupt_kills(bench: Bench) -> None:
    script = "trap '' TSTP TERM; : > $HPCSCHED_JOB_DIR/ready.1; while :; do sleep 0.05; done"
    jobs = bench.set_of(job("a", script, gpus=1, retries=0), job("b", "sleep 600", gpus=1))
    agent = bench.start(jobs, *CPU)
    bench.ready("a")
    agent.kill(signal.SIGINT)
    bench.until(lambda: bench.states()["a"] == "SUSPENDING")
    agent.kill(signal.SIGINT)
    assert agent.wait(25) == 130, agent.said
    assert bench.all_gone()
    assert bench.status()["run"]["state"] == "STOPPED"
    assert set(bench.states().values()) == {"PENDING"}, "none of them has failed"
    assert "Traceback" not in agent.said


def test_commands_without_an_agent(bench: Bench) -> None:
    for words in (["status"], ["cancel", "1"], ["drain"], ["wait"], ["logs", "a"], ["explain", "a"]):
        done = bench(*words)
        assert done.returncode == 3, words
        assert done.stderr.count("\n") == 1
    assert not bench.dir.exists()
    # What is submitted before the run exists waits for it.
    first = bench("submit", "--name", "a", "--gpus", "1", "--parsable", "--", "sleep", "60")
    assert first.stdout == "1\n"
    assert bench("submit", "--name", "b", "--gpus", "1", "--parsable", "--", "true").stdout == "2\n"
    assert bench("submit", "--name", "never", "--", "true").returncode == 0
    assert bench("cancel", "never").returncode == 0
    agent = bench.start(*CPU)
    bench.until(lambda: bench.states() == {"a": "RUNNING", "b": "COMPLETED", "never": "CANCELLED"})
    agent.kill()
    agent.wait()
    for words in (["drain"], ["wait"]):
        assert bench(*words).returncode == 3, words
    assert bench("status", "-o", "%i").returncode == 3
    assert bench("submit", "--name", "c", "--gpus", "1", "--parsable", "--", "true").stdout == "4\n"
    # What is cancelled between two agents does not start again.
    left = bench("cancel", "a")
    assert left.returncode == 0 and "the next `hpcsched run --resume" in left.stderr
    assert "a cancel of a waits" in bench("status").stderr
    assert "a cancel waits" in bench("explain", "a").stdout
    # What does not fit is refused by the agent, and nobody is there to hear it but the one who runs it.
    assert bench("submit", "--name", "big", "--gpus", "99", "--", "true").returncode == 0
    agent = bench.start("--resume", *CPU, "--grace", "1")
    assert agent.wait() == 2, agent.said
    assert "not taken from what waited: submit: job big.gpus" in agent.said
    assert bench.states() == {"a": "CANCELLED", "b": "COMPLETED", "never": "CANCELLED", "c": "COMPLETED"}
    assert bench.job("a")["attempt"] == 1


def test_nobody_reading_standard_error_does_not_stop_the_run(bench: Bench) -> None:
    jobs = bench.set_of(job("a", "sleep 0.5", gpus=1), job("b", "true", gpus=2))
    reader, writer = os.pipe()
    process = subprocess.Popen([COMMAND, "run", str(jobs), *CPU], env=bench.env, stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    process.wait(PATIENCE_S)
    assert bench.states() == {"a": "COMPLETED", "b": "COMPLETED"}
    assert bench.status()["run"]["state"] == "FINISHED"


@pytest.mark.slow
def test_a_batch_script_goes_on_also_if_a_job_of_its_file_was_submitted_meanwhile(bench: Bench) -> None:
    again = ("--requeue", "--batch", "none")
    agent = bench.start(bench.set_of(saves("a", steps=100)), "--devices", "cpu:1", *again)
    bench.ready("a")
    agent.kill(signal.SIGINT)
    assert agent.wait() == 75
    both = bench.set_of(saves("a", steps=100), job("b", "true"))
    assert bench("submit", both).returncode == 0
    done = bench("run", both, *again)
    assert done.returncode == 0 and bench.states() == {"a": "COMPLETED", "b": "COMPLETED"}


def test_a_command_beside_one_that_waits_gets_another_name(bench: Bench) -> None:
    assert bench("submit", "--", "true").returncode == 0
    assert bench("run", "--devices", "cpu:1", "--", "true").returncode == 0
    assert bench.states() == {"true-2": "COMPLETED", "true": "COMPLETED"}


def test_an_array_is_told_apart_by_its_numbers_and_addressed_by_its_name(bench: Bench) -> None:
    agent = bench.start("--devices", "cpu:2", "--stay")
    bench.until(bench.rundir.status.exists, "it runs")
    script = 'echo "$HPCSCHED_ARRAY_INDEX of {index}"; case {index} in 4) exit 3 ;; 6) sleep 600 ;; esac'
    sent = bench("submit", "--name", "arr", "--array", "2-6:2", "-o", "o-%a", "--", "sh", "-c", script)
    assert sent.stdout == "submitted jobs 1-3 (arr)\n"
    ended = {"arr-2": "COMPLETED", "arr-4": "FAILED", "arr-6": "RUNNING"}
    bench.until(lambda: bench.states() == ended, "two have ended")
    assert (bench.dir / "jobs" / "1" / "o-2").read_text() == "2 of 2\n"
    cancelled = bench("cancel", "arr")
    assert cancelled.returncode == 0 and cancelled.stderr == "job 3 (arr-6): is told to end\n"
    bench.until(lambda: bench.states()["arr-6"] == "CANCELLED", "cancelled")
    assert "3 jobs ended so far in this run" in bench("history").stderr
    again = bench("retry", "arr")
    assert again.returncode == 0 and [line[:5] for line in again.stderr.splitlines()] == ["job 2", "job 3"]
    agent.kill(signal.SIGINT)
    agent.wait()
