"""How programs that know nothing of hpcsched are started, from the command line to their processes."""

from __future__ import annotations

import resource
import subprocess
import sys

from livebench import Bench, job

CPU = ["--devices", "cpu:4"]
SAYS = (
    # As a whole: an empty one says that it is ready, and no more.
    "cd $HPCSCHED_JOB_DIR; echo {} > .ready.$$; mv .ready.$$ ready.$HPCSCHED_ATTEMPT; "
    'echo "${{RANK-none}} of ${{WORLD_SIZE-none}}"; sleep 1'
)
RANK = 'echo "${RANK-none} of ${WORLD_SIZE-none} with $HPCSCHED_DEVICES"; sleep 0.1'


def program(name: str, script: str, **keys: object) -> str:
    return job(name, command=["sh", "-c", script], **keys)


def test_a_program_is_one_process_until_it_says_that_it_is_parallel(bench: Bench) -> None:
    launcher = bench.folder / "torchrun"
    launcher.write_text('#!/bin/sh\necho "$* for $PET_NPROC_PER_NODE, rank ${RANK-none}"\n')
    launcher.chmod(0o755)
    parallel = SAYS.format("'{\"parallel\": true}'")
    jobs = [
        program("plain", RANK),
        program("sees-both", RANK, gpus=2),
        program("ranks", RANK, gpus=2, processes="per-gpu"),
        job("launched", command=[str(launcher), "--n={gpus}", "${gpus}", "{{gpus}}"], gpus=2),
        program("bare", SAYS.format(":"), model="bare"),
        program("parallel", parallel, model="parallel"),
    ]
    assert bench("run", bench.set_of(*jobs), *CPU).returncode == 0
    assert bench("logs", "plain").stdout.splitlines() == ["none of none with 0"]
    (line,) = bench("logs", "sees-both").stdout.splitlines()
    assert line.startswith("none of none with ")
    assert 'processes = "per-gpu"' in bench("explain", "sees-both").stdout
    ranks = bench("logs", "ranks").stdout.splitlines()
    assert sorted(line[:6] for line in ranks) == ["0 of 2", "1 of 2"]
    assert bench("logs", "launched").stdout == "--n=2 ${gpus} {gpus} for 2, rank none\n"
    assert bench("logs", "bare").stdout == bench("logs", "parallel").stdout == "none of none\n"
    # In the next run the one that has said so starts wide, the bare one does not.
    again = bench.set_of(program("bare", SAYS.format(":")), program("parallel", parallel), name="again.toml")
    assert bench("run", again, *CPU, "--dir", bench.folder / "again").returncode == 0
    there = ["--dir", bench.folder / "again"]
    assert bench("logs", "bare", *there).stdout == "none of none\n"
    assert sorted(bench("logs", "parallel", *there).stdout.splitlines()) == ["0 of 2", "1 of 2"]


def test_an_agent_may_open_all_the_files_it_can_and_programs_as_many_as_before(bench: Bench) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # It is given its limit as it begins: on busy cores it may look before that.
    waits = "n=0; until [ $(ulimit -n) = 300 ] || [ $((n += 1)) -gt 1000 ]; do sleep 0.01; done"
    shows = program("shows", f"{waits}; ulimit -n; grep 'open files' /proc/$HPCSCHED_NOTIFY_PID/limits")
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        agent = bench.start(bench.set_of(shows), *CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert agent.wait() == 0, agent.said
    programs, agents = bench("logs", "shows").stdout.splitlines()
    assert programs == "300" and int(agents.split()[3]) == min(hard, 2**16)


def test_what_a_batch_system_is_asked_with_has_the_limit_of_before() -> None:
    """`sbatch` hands its limits on to the job that it submits."""
    program = """
import os, resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
from hpcsched.batch.command import run_command
from hpcsched.launch.bounded_run import run_bounded
from hpcsched.open_files import raise_limit
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
waits = "n=0; until [ $(ulimit -n) = 300 ] || [ $((n += 1)) -gt 1000 ]; do sleep 0.01; done"
asks = ["sh", "-c", waits + "; ulimit -n"]
print(run_command(asks, environ=os.environ).out, run_bounded(asks, environ=os.environ, within_s=60)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["300", "b'300\\n'"], done.stderr
