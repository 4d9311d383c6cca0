"""Whole runs under the stand-in of LSF: what signals to the whole job leave of them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from lsfsite import Site

import hpcsched

HERE = socket.gethostname()

PLAIN = Path(hpcsched.__file__).parent / "examples" / "plain.sh"

SHELL = """
[[job]]
name = "{name}"
command = ["bash", "{program}"]
gpus = 1
steps = {steps}
"""


def shell(name: str, steps: int) -> str:
    """A [[job]] that runs the shell program of the examples."""
    return SHELL.format(name=name, steps=steps, program=PLAIN)


SLOW = """
[[job]]
name = "slow"
command = ["bash", "-c", '''
trap "asked=1" TSTP TERM
: > $HPCSCHED_JOB_DIR/ready.1
until [ "$asked" ]; do (trap "" TSTP TERM; sleep 0.05); done
(trap "" TERM; sleep 14.5)  # longer than from SIGINT to SIGTERM
echo "{\\"step\\": 1, \\"attempt\\": 1}" > $HPCSCHED_JOB_DIR/STATE.json
exit 75''']
gpus = 1
"""

TRAINER = """
[[job]]
name = "digits"
trainer = "hpcsched.examples.digits:Digits"
gpus = 1
steps = 1000000
"""


def running(site: Site) -> Callable[[], bool]:
    """Whether all jobs run, and have said that they can be suspended."""

    def look() -> bool:
        jobs = site.jobs()
        return bool(jobs) and all(job["state"] == "RUNNING" for job in jobs) and site.ready() == len(jobs)

    return look


def ends(site: Site) -> list[tuple[str, int, int]]:
    """Of each job its state, how often it was suspended, and its attempts."""
    return [(job["state"], job["suspensions"], job["attempt"]) for job in site.jobs()]


@pytest.mark.torch
def test_bkill_saves_all_and_does_not_bring_it_back(site: Callable[..., Site]) -> None:
    user = site(HERE, interval_s=14.0)
    jobs = shell("shell", 100000) + SLOW + TRAINER
    job = user.submit(jobs, "--devices", "cpu:3", "--gpus", "3", "--time", "60")
    user.wait(job, running(user))
    user.run("bkill", job.id)
    user.wait(job, lambda: "is asked to save" in user.log(job))
    user.run("bkill", job.id)  # as people do who do not see that anything happens
    said = user.ended(job)
    assert job.codes == [75] and job.lives == 1, said
    assert [number for number, _ in job.sent] == [signal.SIGINT, signal.SIGINT, signal.SIGTERM], said
    assert ends(user) == [("SUSPENDED", 1, 1)] * 3, said
    assert user.steps().keys() == {"1", "2", "3"}
    assert not user.cluster.processes(job)


@pytest.mark.slow
def test_two_hosts_bear_a_warning_and_a_bkill(site: Callable[..., Site]) -> None:
    user = site(HERE, "lava2", interval_s=5.0, speaks="l")
    jobs = shell(name="shell", steps=100000) + shell(name="both", steps=100000) + "nodes = 2\n"
    job = user.submit(jobs, "--devices", "cpu:2", "--gpus", "2", "--nodes", "2", "--time", "60")
    user.wait(job, running(user))
    user.run("bkill", "-s", "USR2", job.id)  # as `-wa USR2` does
    user.wait(job, lambda: "SIGUSR2 from the batch system; saving begins in" in user.log(job))
    user.run("bkill", job.id)
    said = user.ended(job)
    assert "lost" not in said and job.codes == [75], said
    assert ends(user) == [("SUSPENDED", 1, 1)] * 2, said
    assert user.steps().keys() == {"1", "2"}
    assert not user.cluster.processes(job)


@pytest.mark.slow
def test_at_the_run_limit_it_saves_and_comes_back(site: Callable[..., Site]) -> None:
    user = site(HERE, interval_s=5.0, speaks="o", minute_s=1.0, linger_s=2.0)
    job = user.submit(
        shell("shell", steps=220), *("--devices", "cpu:1", "--gpus", "1", "--time", "10", "--margin", "3")
    )
    said = user.ended(job)
    assert "no end that is known" not in said
    assert job.lives > 1 and {*job.codes[:-1]} == {99} and job.stat == "DONE", said
    assert ends(user) == [("COMPLETED", job.lives - 1, job.lives)]
