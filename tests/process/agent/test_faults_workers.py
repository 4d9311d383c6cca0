"""What goes wrong in workers: they do not answer, die early, late, or one of them alone."""

from __future__ import annotations

import time

from livebench import Bench, job, saves

from hpcsched.cli.run.last_words import FAILURES

CPU = ["--devices", "cpu:2"]


def test_a_worker_that_ignores_all_is_killed_and_goes_on_from_its_last_checkpoint(bench: Bench) -> None:
    program = """
        cd "$HPCSCHED_JOB_DIR"
        if [ $HPCSCHED_RESUME = 1 ]; then
            sed 's/.*step": *\\([0-9]*\\).*/resumed at \\1/' STATE.json; exit 0
        fi
        trap 'echo asked to save' TSTP; trap 'echo asked to end' TERM
        printf '{"step": 10, "attempt": 1}' > STATE.json
        echo '{"step": 25, "t": 0}' >&$HPCSCHED_PROGRESS_FD; : > ready.1
        while :; do sleep 0.02; done
    """
    # A shell that is asked twice before it runs again says the second first.
    agent = bench.start(bench.set_of(job("a", program, steps=30, gpus=1)), *CPU, "--grace", "3")
    bench.ready("a")
    bench.until(lambda: bench("submit", "--gpus", "1", "--", "true").returncode == 0)
    bench.until(lambda: bench.job("a").get("step") == 25)
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states()["a"] == "SUSPENDED")
    assert bench.all_gone()
    assert "SIGTERM" in agent.said
    assert "SIGKILL" in agent.said
    assert bench("resume", "a").returncode == 0
    assert agent.wait() == 0, agent.said
    told = bench.output().split("\n")
    assert told.index("asked to save") < told.index("asked to end") < told.index("resumed at 10")
    assert bench.replayed()[0].run.jobs[1].steps_repeated == 15


def test_a_worker_that_dies_while_saving_goes_on_from_its_last_checkpoint(bench: Bench) -> None:
    program = """
        cd "$HPCSCHED_JOB_DIR"
        [ $HPCSCHED_RESUME = 1 ] && exit 0
        trap 'printf "{\\"step\\": 1" > STATE.tmp; kill -9 $$' TSTP
        printf '{"step": 4, "attempt": 1}' > STATE.json; : > ready.1
        while :; do sleep 0.02; done
    """
    agent = bench.start(bench.set_of(job("a", program, steps=9, gpus=1)), *CPU)
    bench.ready("a")
    assert bench("suspend", "a").returncode == 0
    bench.until(lambda: bench.states()["a"] == "SUSPENDED")
    assert (bench.job("a")["step"], bench.job("a")["exit"]) == (4, 137)
    assert bench("resume", "a").returncode == 0
    assert agent.wait() == 0, agent.said


def test_a_program_that_dies_at_start_is_tried_again_and_its_last_words_are_shown(bench: Bench) -> None:
    dies = job("dies", "echo attempt $HPCSCHED_ATTEMPT; printf 'a bar\\rno such data'; exit 3", gpus=1)
    none = job("none", command=["no-such-command"], gpus=1)
    done = bench("run", bench.set_of(dies, none, job("fine", "true", gpus=1)), *CPU)
    assert done.returncode == 1
    assert bench.states() == {"dies": "FAILED", "none": "FAILED", "fine": "COMPLETED"}
    tries = [line for line in bench.output().splitlines() if line.startswith("attempt")]
    assert tries == ["attempt 1", "attempt 2", "attempt 3"]
    assert bench.job("none")["attempt"] == 1, "trying again cannot help"
    assert "job 1 (dies) failed: " in done.stderr
    assert "exit code 3" in done.stderr
    assert "starts again in 10 s" in done.stderr + done.stdout
    assert "    attempt 3\n" in done.stderr and "    attempt 2\n" not in done.stderr
    assert "exit code 3: no such data" in done.stderr
    assert "command not found: 'no-such-command'" in done.stderr
    assert "Traceback" not in done.stderr


def test_of_many_that_fail_a_few_say_why_and_a_command_lists_the_others(bench: Bench) -> None:
    none = [job(f"none{n}", command=["no-such-command"], gpus=1) for n in range(FAILURES + 3)]
    done = bench("run", bench.set_of(*none), *CPU)
    assert done.returncode == 1
    assert sum(line.startswith("hpcsched: job ") for line in done.stderr.splitlines()) == FAILURES
    told = f"hpcsched: 3 more failed: `hpcsched status --dir {bench.dir} --states F` lists them\n"
    assert told in done.stderr
    assert bench("status", "--states", "F").stdout.count("\n") >= FAILURES + 3


def test_when_one_rank_dies_the_others_are_ended(bench: Bench) -> None:
    script = """
        if [ "$RANK" = 1 ]; then while [ ! -e listening ]; do sleep 0.01; done; exit 5; fi
        trap "echo told; exit 1" TERM; : >listening; sleep 600 & wait
    """
    ranks = {"gpus": 2, "processes": "per-gpu"}
    bench.set_of(job("a", command=["sh", "-c", script], retries=0, **ranks))
    began = time.monotonic()
    done = bench("run", "set.toml", *CPU)
    assert done.returncode == 1
    assert bench.job("a")["exit"] == 5, "the one that died first tells"
    assert "told" in bench.output()
    assert time.monotonic() - began < 50
    assert bench.all_gone()


def test_ranks_that_end_at_the_same_moment(bench: Bench) -> None:
    script = 'trap "exit 75" TSTP; while [ ! -e go ]; do sleep 0.01; done'
    keys = {"gpus": 4, "processes": "per-gpu", "workdir": str(bench.folder)}
    jobs = [job(f"j{n}", command=["sh", "-c", script], **keys) for n in range(3)]
    agent = bench.start(bench.set_of(*jobs), "--devices", "cpu:12")
    bench.until(lambda: list(bench.states().values()) == ["RUNNING"] * 3)
    (bench.folder / "go").touch()
    assert agent.wait() == 0, agent.said


def test_what_a_program_leaves_running_is_ended_with_it(bench: Bench) -> None:
    done = bench("run", bench.set_of(job("a", "sleep 61 & sleep 62 & exit 0", gpus=1)), *CPU)
    assert done.returncode == 0
    assert bench.all_gone()


def test_reports_that_make_no_sense_do_no_harm(bench: Bench) -> None:
    lines = [
        "nonsense",
        '{"step": -4, "t": 1}',
        '{"step": 1' + "0" * 400 + ', "t": 1}',
        '{"step": 1, "t": 1e308}',
        '{"step": 9, "t": -1e308}',
        '{"step": 20, "t": 1e308}',
        '{"step": 20, "t": 1e999}',
        '{"step": "x", "t": 1}',
    ]
    said = "\n".join(lines)
    program = f"""
        printf '%s\\n' '{said}' >&$HPCSCHED_PROGRESS_FD
        echo '{{"step": 99' > "$HPCSCHED_JOB_DIR/STATE.json"
        head -c 3000000 /dev/zero >&$HPCSCHED_PROGRESS_FD
        eval "exec $HPCSCHED_PROGRESS_FD>&-"
        : > "$HPCSCHED_JOB_DIR/ready.1"; sleep 0.3
    """
    done = bench("run", bench.set_of(job("a", program, gpus=1), saves("b", steps=5, gpus=1)), *CPU)
    assert done.returncode == 0, done.stderr
    assert bench.job("a")["step"] == 20


def test_output_that_cannot_be_written_fails_the_job_and_nothing_else(bench: Bench) -> None:
    bad = job("bad", "true", gpus=1, output="/proc/nothing/x.out")
    gone = job("gone", "true", gpus=1, workdir="/nowhere/at/all")
    done = bench("run", bench.set_of(bad, gone, job("fine", "true", gpus=1)), *CPU)
    assert done.returncode == 1
    assert bench.states() == {"bad": "FAILED", "gone": "FAILED", "fine": "COMPLETED"}
    assert "/proc/nothing" in done.stderr
    assert "/nowhere/at/all" in done.stderr
