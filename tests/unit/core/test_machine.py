"""News that comes too late, twice, or of nobody changes nothing."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Terminate
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Why
from hpcsched.testing.builders import Driver, a_job, a_profile, state_of

PROFILES = (a_profile("m", [1.0, 2.0]),)


def running() -> Driver:
    driver = Driver(a_job("a", "m", gpus=1), gpus=2, profiles=PROFILES)
    driver.runs("a")
    return driver


@pytest.mark.parametrize("job_id", [None, 7])
def test_a_void_that_is_about_no_job_of_the_run_changes_nothing(job_id: int | None) -> None:
    driver = running()
    before = state_of(driver.machine)
    about = {"job_id": job_id, "attempt": None, "record": 9, "error": "KeyError: 3"}
    assert driver.handle(ev.EventVoided(at=driver.now, kind="DeviceLost", **about)) == []
    assert state_of(driver.machine) == before


@pytest.mark.parametrize("attempt", [1, None], ids=["of an attempt that is over", "of none"])
def test_a_void_that_is_not_about_the_newest_attempt_is_told_and_leaves_it_alone(attempt: int | None) -> None:
    driver = running()
    driver.exits("a", 1)
    assert driver.job("a").attempt == 2
    about = {"job_id": 1, "attempt": attempt, "record": 9, "error": "KeyError: 3"}
    assert driver.handle(ev.EventVoided(at=driver.now, kind="WorkersExited", ended=True, **about)) == []
    assert driver.job("a").story[-1].reason.why is Why.VOIDED
    assert (driver.states(), driver.job("a").attempt) == (["STARTING"], 2)


def test_a_void_about_a_job_that_is_being_cancelled_leaves_it_cancelled() -> None:
    driver = running()
    driver.cancel("a")
    about = {"job_id": 1, "attempt": 1, "record": 9, "error": "KeyError: 3"}
    assert driver.handle(ev.EventVoided(at=driver.now, kind="WorkersReady", **about)) == []
    assert driver.job("a").story[-1].reason.why is Why.VOIDED
    driver.exits("a", 143)
    assert driver.states() == ["CANCELLED"]


def test_a_void_about_a_job_that_runs_has_its_attempt_ended() -> None:
    driver = running()
    about = {"job_id": 1, "attempt": 1, "record": 9, "error": "KeyError: 3"}
    actions = driver.handle(ev.EventVoided(at=driver.now, kind="WorkersReady", **about))
    assert [type(action) for action in actions] == [Terminate]
    driver.exits("a", 143)
    assert driver.job("a").state is JobState.STARTING and driver.job("a").attempt == 2


def test_copies_of_an_attempt_that_is_over_may_meet_or_not() -> None:
    driver = running()
    driver.exits("a", 1)
    assert driver.job("a").attempt == 2
    driver.tell(ev.WorkersApart, "a", attempt=1, processes=2, seconds=60.0)
    assert driver.job("a").reason is None
