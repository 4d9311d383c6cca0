"""A GPU that was lost is well again: it is used again, by whoever needs it."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Terminate
from hpcsched.core.reasons import Why
from hpcsched.testing.builders import Driver, a_job, a_profile, simulate, state_of
from hpcsched.testing.invariants import check

PROFILES = (a_profile("m", [1.0, 2.0]),)


def two_jobs() -> Driver:
    """On a GPU each; that of job a is lost, and a has ended because of it."""
    driver = Driver(a_job("a", gpus=1), a_job("b", gpus=1), gpus=2, profiles=PROFILES)
    driver.runs("a", "b")
    driver.lose(0)
    driver.exits("a", 143)
    return driver


def test_a_gpu_that_is_found_goes_to_who_waits() -> None:
    driver = two_jobs()
    assert driver.states() == ["PENDING", "RUNNING"]
    (launch,) = driver.find(0)
    assert isinstance(launch, Launch) and (launch.job_id, launch.gpus) == (1, (0,))
    assert driver.machine.ledger.lost == {}
    assert list(driver.machine.ledger.devices) == [0, 1], "in their order"
    check(driver.machine)


def test_the_job_that_lost_it_is_told() -> None:
    driver = two_jobs()
    driver.find(0)
    told = [str(note.reason) for note in driver.job("a").story if note.reason.why is Why.DEVICE_FOUND]
    assert told == ["GPU 0 is used again: well for 30 s"]
    assert all(note.reason.why is not Why.DEVICE_FOUND for note in driver.job("b").story)


def test_it_is_not_free_while_the_job_that_lost_it_still_ends() -> None:
    driver = Driver(a_job("a", gpus=1), a_job("b", gpus=1), gpus=1, profiles=PROFILES)
    driver.runs("a")
    assert [type(action) for action in driver.lose(0)][:1] == [Terminate]
    assert driver.find(0) == []
    assert not driver.machine.ledger.free
    check(driver.machine)
    launches = [action.job_id for action in driver.exits("a", 143) if isinstance(action, Launch)]
    assert launches == [1], "it goes on, on the same GPU: its attempt was lost"
    check(driver.machine)


def test_a_guest_that_still_ends_does_not_keep_the_foreground_out() -> None:
    driver = Driver(a_job("g", gpus=1, background=True), gpus=1, profiles=PROFILES)
    driver.runs("g")
    driver.lose(0)
    driver.find(0)
    check(driver.machine)
    actions = driver.submit(a_job("f", gpus=1))
    assert [action.gpus for action in actions if isinstance(action, Launch)] == [(0,)]
    check(driver.machine)


@pytest.mark.parametrize("gpu", [1, 7], ids=["well all the time", "no GPU of this run"])
def test_what_is_not_lost_is_not_found(gpu: int) -> None:
    driver = two_jobs()
    before = state_of(driver.machine)
    assert driver.find(gpu) == []
    assert state_of(driver.machine) == before


def test_the_next_life_knows_nothing_of_what_was_lost_before() -> None:
    driver = two_jobs()
    driver.start_agent(1)
    driver.find(0)
    assert list(driver.machine.ledger.devices) == [0]
    check(driver.machine)


def test_it_can_be_lost_and_found_again() -> None:
    driver = two_jobs()
    for _ in range(2):
        driver.find(0)
        driver.runs("a")
        driver.lose(0)
        driver.exits("a", 143)
        check(driver.machine)
    assert driver.machine.ledger.lost == {0: "Xid 79"}


def test_in_a_simulation() -> None:
    happenings = [ev.DeviceLost(at=10.0, gpu=0, why="Xid 79"), ev.DeviceFound(at=40.0, gpu=0, why="well")]
    _, story = simulate(
        [a_job("a", "m", 60, gpus=1), a_job("b", "m", 60, gpus=1)], PROFILES, gpus=1, happenings=happenings
    )
    assert story == [
        "0: start a primary on 0",
        "10: a exits 143",
        "40: start a primary on 0",
        "100: a is done",
        "100: start b primary on 0",
        "160: b is done",
    ]
