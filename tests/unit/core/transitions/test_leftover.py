"""The end of a set: GPUs that nothing can use any more are known, and hosts of them alone are given back."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Action, Launch, ReleaseHosts
from hpcsched.core.machine import Machine
from hpcsched.core.needs import Needs
from hpcsched.core.transitions.hosts import GivenBack
from hpcsched.core.transitions.leftover import Idle
from hpcsched.core.transitions.outcome import RELEASE
from hpcsched.policy import make_policy
from hpcsched.report.idle import idle_of
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile, state_of

PROFILES = (a_profile("m", [1.0, 2.0, 3.0, 4.0]),)
AFTER_S = 600.0


def a_set(*more: str, release_after_s: float | None = AFTER_S, **rest: object) -> Driver:
    """Jobs a, b and c on the two GPUs of a host each; c has completed at 100 s."""
    jobs = [a_job(name, "m", 10_000, gpus=2) for name in ("a", "b", "c", *more)]
    driver = Driver(*jobs, gpus=2, hosts=3, profiles=PROFILES, release_after_s=release_after_s, **rest)
    driver.runs("a", "b", "c")
    driver.now = 100.0
    driver.exits("c", 0)
    return driver


def rings(driver: Driver, at: float) -> list[Action]:
    driver.now = at
    return driver.tell(ev.TimerFired, key=RELEASE)


def released(actions: list[Action]) -> list[tuple[str, ...]]:
    return [action.hosts for action in actions if isinstance(action, ReleaseHosts)]


def test_gpus_that_nothing_can_use_are_left_over() -> None:
    driver = a_set(release_after_s=None)
    assert driver.machine.leftover.idle() == [Idle("n3", (4, 5), 100.0, True)]
    driver.now = 160.0
    driver.exits("b", 0)
    assert [idle.host for idle in driver.machine.leftover.could_go()] == ["n2", "n3"]
    driver.now = 200.0
    driver.reports("a", 50)
    assert driver.machine.leftover.gpu_seconds() == {"n3": 200.0, "n2": 80.0}
    assert driver.machine.leftover.idle()[0].since == 160.0
    assert rings(driver, 5000.0) == [], "the run was not told to give anything back"


def test_a_job_that_waits_and_could_use_them_keeps_them() -> None:
    driver = a_set("d")
    assert not driver.machine.leftover.idle(), "d has started there"
    driver.submit(a_job("late", "m", 10, gpus=2, submit_at=500.0))
    driver.now = 110.0
    driver.runs("d")
    driver.exits("d", 0)
    assert not driver.machine.leftover.idle(), "a job is still to come"
    driver.now = 500.0
    driver.tell(ev.TimerFired, key=("arrival", driver.job("late").id, 0))
    driver.runs("late")
    driver.exits("late", 0)
    assert [idle.since for idle in driver.machine.leftover.idle()] == [500.0]


def test_a_job_that_waits_for_something_else_may_use_them_yet() -> None:
    driver = a_set()
    driver.submit(a_job("w", "m", 10, gpus=1, after=("a",)))
    assert not driver.machine.leftover.idle(), "it waits for another job"
    driver.hold("w")
    assert not driver.machine.leftover.idle(), "and for its user"
    assert released(rings(driver, 5000.0)) == []
    driver.cancel("w")
    assert [idle.since for idle in driver.machine.leftover.idle()] == [5000.0]


def test_what_waits_and_cannot_run_there_does_not_keep_them() -> None:
    driver = a_set()
    driver.submit(a_job("large", "m", 10, gpus=1, needs=Needs(gpu_memory_mib=80_000.0)))
    assert driver.states()[-1] == "PENDING"
    assert [idle.host for idle in driver.machine.leftover.idle()] == ["n3"]


def test_a_host_that_was_left_over_long_enough_is_given_back() -> None:
    driver = a_set()
    assert released(rings(driver, 699.0)) == [], "an older timer"
    assert released(rings(driver, 700.0)) == [("n3",)]
    ledger = driver.machine.ledger
    assert (list(ledger.devices), ledger.host_names, ledger.lost) == ([0, 1, 2, 3], ("n1", "n2"), {})
    driver.now = 705.0
    driver.tell(ev.HostsReleased, hosts=("n3",))
    assert driver.machine.hosts.given_back == [GivenBack("n3", (4, 5), 705.0)]
    (launches,) = [
        [action for action in driver.submit(a_job(name, "m", 10, gpus=2)) if isinstance(action, Launch)]
        for name in ("e",)
    ]
    assert launches == [], "it waits for the hosts that are left"
    driver.now = 900.0
    driver.exits("a", 0)
    assert driver.states()[-1] == "STARTING"


def test_a_host_that_is_not_taken_is_used_as_before() -> None:
    driver = a_set()
    rings(driver, 700.0)
    driver.now = 701.0
    driver.tell(ev.ReleaseFailed, hosts=("n3",), error="disabled")
    assert list(driver.machine.ledger.devices) == [0, 1, 2, 3, 4, 5], "in their order"
    assert driver.machine.leftover.idle() == [Idle("n3", (4, 5), 701.0, True)], (
        "it is tried again in its time"
    )
    assert not driver.machine.hosts.given_back
    (launch,) = driver.submit(a_job("e", "m", 10, gpus=2))
    assert isinstance(launch, Launch) and launch.gpus == (4, 5)
    assert released(rings(driver, 5000.0)) == []


def test_cores_of_a_host_that_is_not_taken_are_there_again() -> None:
    driver = a_set(cores=(0, 1, 2, 3))
    rings(driver, 700.0)
    driver.tell(ev.ReleaseFailed, hosts=("n3",), error="disabled")
    for name in ("x", "y", "z"):
        driver.submit(a_core_job(name, 4.0))
    assert driver.states()[-3:] == ["STARTING"] * 3
    assert not driver.machine.leftover.could_go(), "cores of all hosts are in use"


def test_the_host_of_the_agent_stays() -> None:
    driver = a_set()
    driver.now = 200.0
    driver.exits("a", 0)
    assert released(rings(driver, 800.0)) == [("n3",)]
    assert [idle.host for idle in driver.machine.leftover.idle()] == ["n1"]
    assert driver.machine.leftover.gpu_seconds()["n1"] == 1200.0
    assert driver.machine.leftover.gpu_seconds(whole=True) == {"n3": 1400.0}
    assert driver.machine.leftover.could_go() == []


def test_a_job_that_has_all_that_it_may_get_keeps_nothing() -> None:
    driver = Driver(a_job("a", "m", 100_000), gpus=2, hosts=2, profiles=PROFILES, release_after_s=5.0)
    driver.submit(a_job("b", "m", 10, gpus=2))
    driver.runs("a", "b")
    driver.exits("b", 0)
    assert driver.job("a").width == 2, "all that one host has"
    assert released(rings(driver, 5.0)) == [("n2",)]


def test_a_job_that_has_not_said_that_it_can_be_changed_may_still_say_so() -> None:
    jobs = a_job("a", "m", 1000, gpus=2), a_job("d", "m", 100, gpus=4), a_job("b", "m", 100_000)
    driver = Driver(*jobs, gpus=4, hosts=2, profiles=PROFILES, release_after_s=30.0)
    driver.runs("a", "d")
    driver.tell(ev.WorkersSpawned, "b", processes=((100, 1),))
    assert driver.job("b").gpus == (2, 3)
    driver.now = 10.0
    driver.exits("d", 0)
    assert released(rings(driver, 40.0)) == [], "it could go over to the four GPUs"
    assert not driver.machine.leftover.idle()
    assert released(rings(driver, 100.0)) == [("n2",)], "a program that could would have said so by now"


def test_draining_ends_it() -> None:
    driver = a_set()
    driver.now = 150.0
    driver.drain()
    assert not driver.machine.leftover.idle()
    assert released(rings(driver, 5000.0)) == []
    assert driver.machine.leftover.gpu_seconds() == {"n3": 100.0}


def test_the_next_life_has_what_it_is_given_and_remembers_what_was_given_back() -> None:
    driver = a_set()
    rings(driver, 700.0)
    driver.tell(ev.HostsReleased, hosts=("n3",))
    driver.now = 1000.0
    driver.start_agent(2, hosts=3)
    assert len(driver.machine.ledger.devices) == 6 and driver.machine.hosts.gone == []
    driver.runs("a", "b")
    driver.now = 1100.0
    driver.exits("a", 0)
    driver.exits("b", 0)
    idle = idle_of(driver.machine)
    assert idle.given_back_gpu_hours == pytest.approx(2 * 300 / 3600)
    assert idle.hosts["n3"].gpu_hours == pytest.approx(2 * (600 + 100) / 3600)
    assert idle.hosts["n3"].left_over_gpu_hours == pytest.approx(2 * (600 + 100) / 3600)
    assert idle.hosts["n1"].gpu_hours == 0.0


def test_a_replay_comes_to_the_same() -> None:
    driver = a_set()
    rings(driver, 700.0)
    driver.tell(ev.ReleaseFailed, hosts=("n3",), error="disabled")
    rings(driver, 1300.0)
    driver.tell(ev.HostsReleased, hosts=("n3",))
    driver.exits("a", 0)
    again = Machine(make_policy)
    for event in driver.events:
        again.handle(event)
    assert state_of(again) == state_of(driver.machine)
    assert again.leftover.gpu_seconds() == driver.machine.leftover.gpu_seconds()


def test_a_simulation_gives_hosts_back_too() -> None:
    jobs = [a_job(name, "m", steps, gpus=2) for name, steps in (("a", 100), ("b", 4000), ("c", 300))]
    machine = Simulation(jobs, PROFILES, gpus=2, nodes=3, release_after_s=60.0).run()
    (back,) = machine.hosts.given_back
    assert (back.host, back.gpus, back.at) == ("node3", (4, 5), 210.0)
    assert idle_of(machine).given_back_gpu_hours == pytest.approx(2 * (2000 - 210) / 3600)
    kept = Simulation(jobs, PROFILES, gpus=2, nodes=3).run()
    assert (kept.hosts.given_back, kept.run.now) == ([], machine.run.now)
