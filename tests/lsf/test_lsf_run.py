"""Whole runs under the stand-in of LSF: what signals to the whole job leave of them."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from conftest import Site

HERE = socket.gethostname()

SHELL = """
[[job]]
name = "{name}"
command = ["bash", "-c", 'exec bash "$(python -c "import hpcsched.examples as e; print(e.__path__[0])")/plain.sh"']
gpus = 1
steps = {steps}
"""

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
        jobs = site.status().get("jobs", [])
        return bool(jobs) and all(job["state"] == "RUNNING" and (job["step"] or 0) >= least for job in jobs)

    return look


def test_bkill_saves_all_and_does_not_bring_it_back(site: Callable[..., Site]) -> None:
    user = site(HERE, interval_s=5.0)
    job = user.submit(SHELL.format(name="shell", steps=100000) + TRAINER, "--devices", "cpu:2", "--gpus", "2", "--time", "60")
    user.wait(job, running(user, 5))
    user.run("bkill", job.id)
    said = user.ended(job)
    assert job.codes == [75] and job.lives == 1, said
    jobs = user.status()["jobs"]
    assert [(found["state"], found["suspensions"], found["attempt"]) for found in jobs] == [("SUSPENDED", 1, 1)] * 2, said
    assert all(step >= 5 for step in user.steps().values()) and len(user.steps()) == 2
    assert not user.cluster.processes(job)
