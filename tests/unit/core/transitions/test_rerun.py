"""Jobs that have ended run again, definitions change, and a failure that would only be repeated is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch
from hpcsched.core.definitions import differing
from hpcsched.core.model import JobState, Kind, Training
from hpcsched.core.packed import Jobs
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.rerun import coming_back
from hpcsched.testing.builders import Driver, a_job, a_profile

PROFILES = (a_profile("m", [1, 2, 3, 2.5]),)


def failed(*more, **keys):
    """Job 1 has failed at step 45, with a checkpoint of step 40."""
    driver = Driver(a_job("x", "m", retries=0, **keys), *more, profiles=PROFILES)
    driver.runs("x")
    driver.saves("x", 40)
    driver.exits("x", 1, 45, 40)
    assert driver.job("x").state is JobState.FAILED
    return driver


def test_a_failed_job_goes_on_from_its_checkpoint_with_all_its_retries():
    driver = failed()
    (launch,) = driver.retry("x")
    assert isinstance(launch, Launch)
    assert (launch.attempt, launch.resume, launch.anew) == (2, True, False)
    job = driver.job("x")
    assert (job.step, job.repeated, job.failures, job.reason) == (40, 5, 0, None)
    assert [attempt.number for attempt in job.attempts] == [1, 2]
    driver.exits("x", 0, 100, 100)
    assert driver.states() == ["COMPLETED"]


def test_from_scratch_nothing_that_was_saved_counts_until_it_has_saved_anew():
    driver = failed()
    (launch,) = driver.retry("x", from_scratch=True)
    assert (launch.resume, launch.anew) == (False, True)
    assert (driver.job("x").step, driver.job("x").repeated) == (0, 45)
    driver.exits("x", 1)  # before its first checkpoint, which retries = 0 forgives no more
    (launch,) = driver.retry("x")
    assert (launch.resume, launch.anew) == (False, True)
    driver.saves("x", 10)
    driver.exits("x", 1, 12, 10)
    (launch,) = driver.retry("x")
    assert (launch.resume, launch.anew) == (True, False)


def test_who_was_cancelled_for_its_sake_comes_back_with_it_and_nobody_else():
    driver = failed(
        a_job("next", "m", after=("x",)), a_job("last", "m", after=("next",)), a_job("other", "m")
    )
    assert driver.states()[1:3] == ["CANCELLED", "CANCELLED"]
    driver.cancel("other")
    driver.exits("other", 143)
    assert driver.retry("next") == [], "what it waits for has failed"
    driver.retry("x")
    assert driver.states() == ["STARTING", "PENDING", "PENDING", "CANCELLED"]
    driver.exits("x", 0, 100, 100)
    assert driver.states() == ["COMPLETED", "STARTING", "PENDING", "CANCELLED"]


def test_one_cancelled_while_it_waited_waits_once_when_it_comes_back():
    driver = Driver(a_job("x", "m"), a_job("y", "m", after=("x",)), profiles=PROFILES)
    driver.cancel("y")
    driver.retry("y")
    assert driver.job("y").unmet == 1
    driver.exits("x", 0, 100, 100)
    assert (driver.job("y").unmet, driver.job("y").state) == (0, JobState.STARTING)


def test_one_that_waits_for_two_that_failed_comes_back_with_both_only():
    driver = failed(a_job("y", "m", retries=0), a_job("z", "m", after=("x", "y")))
    driver.exits("y", 1)
    driver.retry("x")
    assert driver.job("z").state is JobState.CANCELLED
    driver.exits("x", 1)
    driver.retry("x", "y")
    assert driver.job("z").state is JobState.PENDING


def test_a_completed_job_begins_once_more_and_who_waits_for_it_waits_again():
    driver = Driver(a_job("x", "m"), a_job("y", "m", after=("x",)), profiles=PROFILES)
    driver.runs("x")
    driver.hold("y")
    driver.exits("x", 0, 100, 100)
    driver.release("y")
    driver.exits("y", 143)
    driver.start_agent(6)
    driver.submit(a_job("z", "m", after=("x",), submit_at=1000.0))
    driver.machine.run.take_changed()
    (launch,) = driver.retry("x")
    assert (launch.anew, driver.job("x").repeated) == (True, 100)
    assert driver.job("z").unmet == 1
    assert driver.job("z").id in driver.machine.run.changed  # what it waits for is another
    driver.exits("x", 0, 100, 100)
    assert driver.job("z").unmet == 0


def test_a_completed_job_that_is_given_more_steps_goes_on():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.runs("x")
    driver.exits("x", 0, 100, 100)
    driver.define(a_job("x", "m", steps=150))
    assert driver.states() == ["COMPLETED"], "only if asked"
    assert driver.machine.run.updated == {1: ("steps",)}
    (launch,) = driver.retry("x")
    assert (launch.resume, launch.anew, driver.job("x").step) == (True, False, 100)
    assert driver.machine.run.updated == {}


def test_a_definition_counts_from_the_next_start_on():
    driver = Driver(a_job("x", "m", gpus=1), a_job("y", "m", gpus=1), gpus=1, profiles=PROFILES)
    driver.define(a_job("y", "m", gpus=2, after=("x",)))
    assert driver.job("y").unmet == 1
    driver.exits("x", 0, 100, 100)
    assert driver.job("y").state is JobState.PENDING, "it wants two GPUs now"
    driver.define(a_job("y", "m", gpus=1))
    assert driver.job("y").state is JobState.STARTING


def test_a_life_begins_with_what_the_job_file_says_then():
    driver = failed(a_job("y", "m", gpus=6, after=()))
    driver.tell(
        ev.AgentStarted,
        wall=2e9,
        devices=tuple(driver.machine.ledger.devices.values()),
        policy="marble",
        updated={1: a_job("x", "m", gpus=2), 2: a_job("y", "m", gpus=3)},
        kept={2: ("retries",)},
        again=(1,),
    )
    assert [len(job.gpus) for job in driver.machine.run.jobs.values()] == [2, 3]
    driver.tell(ev.DefinitionsCompared, kept={2: ()})
    assert driver.machine.run.kept == {}


def test_steps_that_only_the_last_snapshot_told_of_are_counted():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.runs("x")
    driver.reports("x", 12)
    started = {"wall": 2e9, "devices": tuple(driver.machine.ledger.devices.values()), "policy": "marble"}
    driver.tell(ev.AgentStarted, **started, saved_steps={1: 10}, seen_steps={1: 29})
    assert driver.job("x").steps_repeated == 19
    lost = next(note.reason for note in driver.job("x").story if note.reason.why is Why.LOST)
    assert "at least 19 steps done again" in str(lost)


def tried_again(driver):
    """Let the time pass that job x waits after its failures; how long it was."""
    pause = driver.machine.waiting.delays[1].until - driver.now
    driver.now += pause
    driver.tell(ev.TimerFired, key=("arrival", 1, driver.job("x").attempt))
    return pause


def again_and_again(*failures):
    """How many attempts there were when a job that may fail four times in a row failed in these ways."""
    driver = Driver(a_job("x", "m", retries=4), profiles=PROFILES)
    for code, detail, lasted_s in failures:
        if driver.job("x").state is JobState.PENDING:
            tried_again(driver)
        driver.exits("x", code, detail=detail, lasted_s=lasted_s)
    return driver.job("x")


def test_a_failure_that_comes_again_and_again_in_the_same_way_is_not_repeated():
    failure = 2, "unknown argument", 0.3
    assert again_and_again(failure, failure).state is JobState.PENDING
    job = again_and_again(failure, failure, failure)
    assert job.state is JobState.FAILED
    assert job.reason.why is Why.SAME_FAILURE
    assert "hpcsched retry x" in str(job.reason)


@pytest.mark.parametrize(
    "other",
    [
        (3, "unknown argument", 0.3),
        (2, "another argument", 0.3),
        (2, "unknown argument", 11.0),
        (2, "unknown argument", None),
    ],
)
def test_any_other_failure_is(other):
    failure = 2, "unknown argument", 0.3
    assert again_and_again(failure, failure, other).failures == 3
    assert again_and_again(failure, failure, other).state in (JobState.STARTING, JobState.PENDING)


@pytest.mark.parametrize("failure", [(137, "loading", 0.3), (2, "", 0.3), (74, "no space left", 0.3)])
def test_so_is_one_that_says_nothing_of_the_next_time(failure):
    assert again_and_again(failure, failure, failure).state is JobState.PENDING


def test_who_fails_at_once_and_again_waits_longer_each_time_and_leaves_its_gpus_to_others():
    driver = Driver(a_job("x", "m", retries=9), a_job("y", "m", gpus=4), gpus=4, profiles=PROFILES)
    driver.exits("x", 1, lasted_s=0.1)
    assert driver.states() == ["STARTING", "PENDING"], "once may be chance"
    pauses = []
    for _ in range(8):
        driver.exits("x", 1, lasted_s=0.1)
        assert driver.job("x").state is JobState.PENDING
        reason = driver.machine.waiting_reason(driver.job("x"))
        assert reason.why is Why.FAILED_AT_ONCE and not driver.machine.stuck
        pauses.append(tried_again(driver))
        if driver.job("y").state is not JobState.PENDING:
            driver.exits("y", 0, 100, 100)
        assert driver.job("x").state is JobState.STARTING
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    assert driver.job("y").state is JobState.COMPLETED


def test_the_next_life_does_not_let_it_wait():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    for _ in range(2):
        driver.exits("x", 1, lasted_s=0.1)
    assert driver.states() == ["PENDING"]
    driver.start_agent(6)
    assert driver.states() == ["STARTING"]


def test_one_that_is_cancelled_meanwhile_waits_for_nothing():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    for _ in range(2):
        driver.exits("x", 1, lasted_s=0.1)
    driver.cancel("x")
    assert driver.states() == ["CANCELLED"] and driver.machine.waiting.delays == {}


def launch_fails(driver):
    driver.tell(ev.LaunchFailed, "x", error="out: Input/output error", transient=True)


def test_a_launch_that_fails_again_waits_too():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    launch_fails(driver)
    assert driver.states() == ["STARTING"]
    launch_fails(driver)
    assert driver.states() == ["PENDING"] and tried_again(driver) == 10
    launch_fails(driver)
    assert driver.states() == ["FAILED"]


def test_a_failure_is_the_same_only_after_a_wait():
    driver = Driver(a_job("x", "m", retries=9), profiles=PROFILES)
    driver.exits("x", 2, detail="why", lasted_s=50.0)
    driver.exits("x", 2, detail="why", lasted_s=0.1)
    assert tried_again(driver) == 10
    launch_fails(driver)
    assert tried_again(driver) == 20
    driver.exits("x", 2, detail="why", lasted_s=0.1)
    assert driver.states() == ["PENDING"], "it is not known to be the same"
    assert tried_again(driver) == 40


def test_another_definition_does_not_wait():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    for _ in range(2):
        driver.exits("x", 2, detail="why", lasted_s=0.1)
    driver.define(a_job("x", "m", retries=9))
    assert driver.states() == ["STARTING"]


def pauses_of_two_failures(driver):
    """How long job x waits after its second failure at once in a row."""
    for _ in range(2):
        driver.exits("x", 1, lasted_s=0.1)
    return tried_again(driver)


def test_retry_begins_with_the_shortest_wait():
    driver = Driver(a_job("x", "m", retries=2), profiles=PROFILES)
    assert pauses_of_two_failures(driver) == 10
    driver.exits("x", 1, lasted_s=0.1)
    assert driver.states() == ["FAILED"]
    driver.retry("x")
    assert pauses_of_two_failures(driver) == 10


def test_so_does_who_has_saved_meanwhile():
    driver = Driver(a_job("x", "m", retries=2), profiles=PROFILES)
    assert pauses_of_two_failures(driver) == 10
    driver.runs("x")
    driver.saves("x", 40)
    assert pauses_of_two_failures(driver) == 10


def test_a_run_of_before_tries_at_once():
    driver = Driver(a_job("x", "m", retries=4), rules=3, profiles=PROFILES)
    for _ in range(2):
        driver.exits("x", 1, detail="why", lasted_s=0.1)
    assert driver.job("x").reason.why is Why.SAME_FAILURE


def test_what_differs_is_named_in_the_words_of_a_job_file():
    old = a_job("x", "m", kind=Kind.COMMAND, command=("a",), workdir="/here")
    assert differing(old, replace(old, user="me")) == ()
    new = replace(old, command=("b",), gpus_max=3, retries=1, checkpoint_every_s=5.0)
    assert set(differing(old, new)) == {"command", "gpus", "retries", "checkpoint_every"}
    assert differing(old, replace(old, workdir="/there")) == ("workdir",)
    assert differing(old, replace(old, workdir="/there"), called_in="/there") == ()
    assert differing(replace(old, workdir="/here/below"), old, called_in="/here") == ("workdir",)
    assert differing(old, a_job("x", "m", workdir="/here")) == ("command", "replay")
    trainer = replace(old, training=Training(continues="y"), after=("y",))
    assert differing(old, trainer) == ("continues",)


def test_one_that_is_to_wait_for_a_job_that_was_cancelled_is_cancelled_too():
    driver = Driver(a_job("x", "m", gpus=6), a_job("y", "m"), a_job("z", "m"), profiles=PROFILES)
    driver.cancel("y")
    assert driver.states() == ["STARTING", "CANCELLED", "PENDING"]
    driver.define(a_job("z", "m", after=("y",)))
    assert driver.job("z").state is JobState.CANCELLED
    assert str(driver.job("z").reason).count("y") and driver.job("z").reason.why is (
        Why.DEPENDENCY_NEVER_SATISFIED
    )


def test_where_nothing_comes_back_not_all_that_were_cancelled_are_gone_through(monkeypatch):
    driver = failed(a_job("next", "m", after=("x",)))
    assert list(coming_back(driver.machine.run, (1,))) == [1, 2]
    monkeypatch.setattr(Jobs, "in_state", lambda *_: pytest.fail("all of them"))
    assert coming_back(driver.machine.run, ()) == {}
