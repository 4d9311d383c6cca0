"""Running jobs again: a job file that was edited, failures that were mended, programs that are rigid."""

from __future__ import annotations

import json

import pytest
from livebench import Bench, job

CPU = ["--devices", "cpu:2"]

COUNTS = """
cd "$HPCSCHED_JOB_DIR"; mkdir -p "$HPCSCHED_CHECKPOINT_DIR"
echo "attempt $HPCSCHED_ATTEMPT found $(cat "$HPCSCHED_CHECKPOINT_DIR/count" || echo nothing)"
echo "$HPCSCHED_STEPS" > "$HPCSCHED_CHECKPOINT_DIR/count"
printf '{"step": %d, "attempt": %d}' $HPCSCHED_STEPS $HPCSCHED_ATTEMPT > STATE.json
"""
"""Does all its steps at once, and leaves a checkpoint that its next attempt can find."""


@pytest.mark.slow
def test_an_edited_job_file_is_never_ignored_in_silence(bench: Bench) -> None:
    def edited(script: str, steps: int) -> object:
        return bench.set_of(
            job("broken", script, gpus=1, retries=5),
            job("after", "echo after", gpus=1, after=["broken"]),
            job("counts", COUNTS, gpus=1, steps=steps),
        )

    assert bench("run", edited("echo no such option; exit 2", 5), *CPU).returncode == 1
    assert bench.states() == {"broken": "FAILED", "after": "CANCELLED", "counts": "COMPLETED"}
    assert bench.job("broken")["attempt"] == 3, "the next would say the same"
    jobs = edited("echo mended", 5)
    kept = bench("run", jobs, "--resume", *CPU)
    assert kept.returncode == 2
    assert "job broken: command differs from the run's (kept; --update takes the file's)" in kept.stderr
    assert "job broken: command differs in the job file" in bench("status").stdout
    assert {j["name"]: j.get("kept") for j in bench.status()["jobs"]}["broken"] == ["command"]
    taken = bench("run", jobs, "--resume", "--update", *CPU)
    assert taken.returncode == 0, taken.stderr
    assert set(bench.states().values()) == {"COMPLETED"}
    *_, mark, mended = bench.output().splitlines()
    assert mark.startswith("hpcsched: ---- attempt 4, ")
    assert mark.endswith(", CPU slot 0, from its beginning ----")
    assert mended == "mended"
    # A completed job runs again only if asked, and then with what was taken.
    jobs = edited("echo mended", 8)
    assert bench("submit", jobs).returncode == 2
    assert bench("submit", jobs, "--update").returncode == 0
    assert bench("run", "--resume", *CPU).returncode == 0
    assert bench("status").stdout.splitlines()[-1].startswith("job counts: steps taken since it ended")
    assert bench("retry", "counts", "--from-scratch").returncode == 0
    again = bench("run", jobs, "--resume", "--json", "-q", *CPU)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["jobs"][2]["steps_repeated"] == 5
    said = [line for line in bench.output(3).splitlines() if line.startswith("attempt")]
    assert said == ["attempt 1 found nothing", "attempt 2 found nothing"]
    assert (bench.dir / "jobs" / "3" / "checkpoint.before.2" / "count").read_text() == "5\n"


def test_one_command_runs_again_what_has_failed(bench: Bench) -> None:
    jobs = bench.set_of(job("fails", "[ -e go ]", gpus=1, retries=0), job("good", "true", gpus=1))
    assert bench("run", jobs, *CPU).returncode == 1
    assert bench("run", "--retry").returncode == 2
    # What is refused leaves no retry behind.
    assert bench("run", "--resume", "--retry", "--devices", "none").returncode == 2
    assert bench("run", "--resume", *CPU).returncode == 1 and bench.job("fails")["attempt"] == 1
    (bench.folder / "go").touch()
    for _ in range(2):  # the second time nothing has failed
        assert bench("run", "--resume", "--retry", *CPU).returncode == 0
        assert set(bench.states().values()) == {"COMPLETED"}
    assert [bench.job(name)["attempt"] for name in ("fails", "good")] == [2, 1]


def test_commands_of_a_living_run_that_could_not_be_obeyed_are_refused(bench: Bench) -> None:
    rigid = job("rigid", "trap 'exit 0' TERM; while :; do sleep 0.1; done", gpus=1)
    fails = job("fails", "[ -e ../../../go ] || exit 1", gpus=1, retries=0, workdir="run/jobs/2")
    agent = bench.start(bench.set_of(rigid, fails), *CPU)
    bench.until(lambda: bench.states().get("fails") == "FAILED" and bench.states()["rigid"] == "RUNNING")
    refused = bench("suspend", "rigid")
    assert refused.returncode == 1
    assert "cannot be suspended: its program has not said that it can" in refused.stderr
    (bench.folder / "go").touch()
    assert bench("retry", "rigid").returncode == 1
    retried = bench("retry", "--failed")
    assert (retried.returncode, retried.stderr) == (0, "job 2 (fails): runs again from its beginning\n")
    bench.until(lambda: bench.states()["fails"] == "COMPLETED")
    edited = bench("submit", bench.set_of(job("rigid", "true", gpus=1)), "--update")
    assert edited.returncode == 2
    assert "kept, as it runs" in edited.stderr
    assert bench("drain").returncode == 0
    assert agent.wait() == 75
    assert "job 1 (rigid) ended with exit code 0, as it was told to end: that counts as no completion" in (
        agent.said
    )
    assert bench.job("rigid")["reason"] == "Draining", "nobody holds it"
