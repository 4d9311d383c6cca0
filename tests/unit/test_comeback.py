"""Whether a run that stopped with work left comes back by itself, and what SIGTERM means at the end."""

from __future__ import annotations

import pytest

from hpcsched.agent.clock import RunClock
from hpcsched.agent.comeback import Plan, Standing, why_not
from hpcsched.agent.ending import Ending
from hpcsched.core import events as ev
from hpcsched.core.moves import DRAIN
from hpcsched.testing.builders import Driver, a_job, a_profile

MODEL = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
REQUEUE = Plan(how="requeue", most=3)


def stopped(*, saves: int = 10) -> tuple[Driver, Standing]:
    """A run whose time was up: job a has saved, b has not begun; and its standing before."""
    driver = Driver(a_job("a", "m", 1000), a_job("b", "m"), gpus=2, profiles=(MODEL,), deadline=500.0)
    before = Standing.of(driver.machine)
    driver.runs("a")
    driver.now = 450.0
    driver.tell(ev.TimerFired, key=DRAIN)
    driver.leaves("a", saves)
    assert driver.machine.stopped
    return driver, before


def test_it_comes_back_when_time_was_up_and_something_advanced():
    driver, before = stopped()
    assert why_not(driver.machine, REQUEUE, before=before) is None


def test_not_when_nothing_advanced():
    driver, before = stopped(saves=0)
    assert "nothing advanced" in why_not(driver.machine, REQUEUE, before=before)


def test_one_job_that_fell_back_does_not_hide_that_another_advanced():
    driver, _ = stopped(saves=10)
    before = Standing(ended=0, suspensions=0, saved_steps={1: 5, 2: 500})
    assert Standing.of(driver.machine).is_past(before)


def test_not_when_all_that_is_left_is_held():
    driver, before = stopped()
    driver.hold("a")
    assert why_not(driver.machine, REQUEUE, before=before) is None  # b may still run
    driver.hold("b")
    assert "held by the user" in why_not(driver.machine, REQUEUE, before=before)


def test_not_for_ever():
    driver, before = stopped()
    for lives in range(2, 5):
        driver.start_agent(2)
        driver.runs("a")
        driver.tell(ev.DrainRequested, cause="SIGUSR2")
        driver.leaves("a", 10 * lives)
        reason = why_not(driver.machine, REQUEUE, before=before)
        assert (reason is None) == (lives - 1 < REQUEUE.most), lives
    assert "3 of 3 times" in reason


@pytest.mark.parametrize("cause", ["SIGTERM", "SIGINT", "inbox:1"])
def test_not_when_somebody_wanted_it_to_stop(cause):
    driver, before = stopped()
    driver.machine.drain_cause = cause
    assert "asked to stop" in why_not(driver.machine, REQUEUE, before=before)


class Silent:
    """A watch that never hears anything."""

    comment = ""

    def ask_now(self) -> None: ...

    def take(self) -> None:
        return None


@pytest.mark.parametrize(
    ("warned", "deadline", "cause"), [(False, 900.0, "SIGTERM"), (True, 900.0, "deadline")]
)
def test_sigterm_after_a_warning_is_the_end_whatever_our_clock_shows(warned, deadline, cause):
    driver = Driver(a_job("a", "m"), gpus=2, profiles=(MODEL,), deadline=deadline)
    ending = Ending(
        driver.machine, RunClock(at=0.0), watch=Silent(), tell=lambda text: None, publish=lambda at: None
    )
    if warned:
        assert ending.warned("SIGUSR2") == []
    moved, drain = ending.told_to_end()
    assert drain.cause == cause
    assert moved.deadline < 30.0


def test_sigterm_at_the_limit_is_the_end():
    driver = Driver(a_job("a", "m"), gpus=2, profiles=(MODEL,), deadline=100.0)
    clock = RunClock(at=100.0)
    ending = Ending(driver.machine, clock, watch=Silent(), tell=lambda text: None, publish=lambda at: None)
    moved, drain = ending.told_to_end()
    assert drain.cause == "deadline"
    assert moved.deadline > 120.0  # until the batch system kills


def test_without_a_batch_system_sigterm_is_a_wish():
    driver = Driver(a_job("a", "m"), gpus=2, profiles=(MODEL,))
    ending = Ending(
        driver.machine, RunClock(at=0.0), watch=None, tell=lambda text: None, publish=lambda at: None
    )
    assert [event.cause for event in ending.told_to_end()] == ["SIGTERM"]
