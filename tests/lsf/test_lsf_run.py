"""Whole runs under the stand-in of LSF: what signals to the whole job leave of them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from conftest import Site

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


TRAINER = """
[[job]]
name = "digits"
trainer = "hpcsched.examples.digits:Digits"
gpus = 1
steps = 1000000
"""


def running(site: Site, least: int) -> Callable[[], bool]:
    """Whether all jobs run and have done so many steps."""

    def look() -> bool:
        jobs = site.jobs()
        return bool(jobs) and all(job["state"] == "RUNNING" and (job["step"] or 0) >= least for job in jobs)

    return look


def test_bkill_saves_all_and_does_not_bring_it_back(site: Callable[..., Site]) -> None:
    user = site(HERE, interval_s=5.0)
    job = user.submit(
        shell(name="shell", steps=100000) + TRAINER,
        "--devices",
        "cpu:2",
        "--gpus",
        "2",
        "--time",
        "60",
    )
    user.wait(job, running(user, 5))
    user.run("bkill", job.id)
    said = user.ended(job)
    assert job.codes == [75] and job.lives == 1, said
    jobs = user.jobs()
    assert [(found["state"], found["suspensions"], found["attempt"]) for found in jobs] == [
        ("SUSPENDED", 1, 1)
    ] * 2, said
    assert all(step >= 5 for step in user.steps().values()) and len(user.steps()) == 2
    assert not user.cluster.processes(job)


def test_two_hosts_bear_a_warning_and_a_bkill(site: Callable[..., Site]) -> None:
    user = site(HERE, "lava2", interval_s=5.0, speaks="l")
    jobs = shell(name="shell", steps=100000) + shell(name="both", steps=100000) + "nodes = 2\n"
    job = user.submit(jobs, "--devices", "cpu:2", "--gpus", "2", "--nodes", "2", "--time", "60", "--once")
    user.wait(job, running(user, 5))
    user.run("bkill", "-s", "USR2", job.id)  # as `-wa USR2` does
    user.wait(job, lambda: "SIGUSR2 from the batch system; saving begins in" in user.log(job))
    before = max(found["step"] for found in user.jobs())
    user.wait(job, running(user, before + 20))
    user.run("bkill", job.id)
    said = user.ended(job)
    assert "lost" not in said and job.codes == [75], said
    ends = [(found["state"], found["suspensions"], found["attempt"]) for found in user.jobs()]
    assert ends == [("SUSPENDED", 1, 1)] * 2, said
    assert all(step >= before for step in user.steps().values()) and len(user.steps()) == 2
    assert not user.cluster.processes(job)


def test_at_the_run_limit_it_saves_and_comes_back(site: Callable[..., Site]) -> None:
    user = site(HERE, interval_s=5.0, speaks="o", minute_s=1.0, linger_s=2.0)
    job = user.submit(
        shell("shell", steps=260), *("--devices", "cpu:1", "--gpus", "1", "--time", "10", "--margin", "3")
    )
    said = user.ended(job)
    assert "no end that is known" not in said
    assert job.lives > 1 and {*job.codes[:-1]} == {99} and job.stat == "DONE", said
    found = user.jobs()[0]
    assert (found["state"], found["suspensions"], found["attempt"]) == ("COMPLETED", job.lives - 1, job.lives)
