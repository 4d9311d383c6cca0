"""What policies would have made of a run: on its page, and the reasons why that is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hpcsched.cli.run import report_policies
from hpcsched.cli.run.report_policies import POLICIES, under_policies
from hpcsched.cli.run.results import result_of
from hpcsched.core.machine import Machine
from hpcsched.testing.builders import Driver, a_job, a_profile, makespan, simulate


def a_set(*, gpus: int = 2, seen: Mapping[int, float] | None = None) -> Machine:
    """Three jobs that are over; `seen`: speeds that nobody has measured on purpose."""
    profile = a_profile("m", seen or [10.0, 16.0])
    profiles = [replace(profile, source="learned") if seen else profile]
    jobs = [a_job(name, "m", steps=1000) for name in "abc"]
    return simulate(jobs, profiles, gpus=gpus)[0]


def test_the_jobs_of_a_run_are_simulated_as_they_were() -> None:
    machine = a_set()
    results, about = under_policies(machine)
    assert [result.title for result in results] == list(POLICIES) and not about
    assert results[1].makespan_s == pytest.approx(makespan(machine))
    assert results[1].gpu_hours == pytest.approx(result_of(machine).gpu_hours)
    # One after the other on both GPUs.
    assert results[0].makespan_s == pytest.approx(3 * 1000 / 16)


def test_speeds_are_not_guessed() -> None:
    assert "of a and 2 other jobs are not known" in under_policies(a_set(seen={1: 10.0}))[1]
    assert under_policies(a_set(seen={1: 10.0}, gpus=1))[0]
    assert under_policies(a_set(seen={1: 10.0, 2: 16.0}))[0]
    assert under_policies(a_set(seen={2: 16.0}, gpus=2))[1]
    assert "are not known" in under_policies(a_set(gpus=3))[1], "measured on up to 2"


def test_what_cannot_be_told_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [a_job("a", "m"), a_job("b", "m", gpus=1, background=True)]
    shares, _ = simulate(jobs, [a_profile("m", [10.0])], gpus=1)
    assert "share a GPU" in under_policies(shares)[1]
    machine = a_set()
    monkeypatch.setattr(report_policies, "WITHIN_S", -1.0)
    assert under_policies(machine) == (
        (),
        "Not simulated: it takes more than -1 s; hpcsched simulate --run does it.",
    )
    monkeypatch.setattr(report_policies, "MOST_SIMULATED", 2)
    assert "more than 2 jobs" in under_policies(machine)[1]


def test_what_no_policy_knows_of_has_its_reason() -> None:
    driver = Driver(a_job("a"), a_job("b"), gpus=1, profiles=[a_profile(name, [10.0]) for name in "ab"])
    driver.runs("a")
    driver.hold("b")
    driver.now = 10.0
    driver.exits("a", 0, 100, 100)
    driver.now = 99.0
    driver.release("b")
    driver.runs("b")
    driver.exits("b", 0, 100, 100)
    assert "held or suspended jobs" in under_policies(driver.machine)[1]
    machine = a_set()
    first = machine.hosts.devices[0]
    machine.hosts.devices.append(tuple(replace(device, host="other") for device in first))
    assert under_policies(machine)[0], "hosts that are alike"
    machine.hosts.devices.append(tuple(replace(device, kind="V100") for device in first))
    assert "the same GPUs all the time" in under_policies(machine)[1]


def test_a_run_that_goes_on_is_not_compared() -> None:
    driver = Driver(a_job("a"), gpus=1, profiles=(a_profile("a", [10.0]),))
    assert under_policies(driver.machine) == ((), "")


def test_jobs_that_failed_are_left_out_and_said() -> None:
    driver = Driver(a_job("a"), a_job("b", retries=0), gpus=1, profiles=[a_profile(n, [10.0]) for n in "ab"])
    driver.runs("a")
    driver.now = 10.0
    driver.exits("a", 0, 100, 100)
    driver.runs("b")
    driver.exits("b", 1)
    results, about = under_policies(driver.machine)
    assert results[0].makespan_s == 10.0 and about == "Jobs that are not simulated, but measured: 1 failed."
