"""The end of the allocation: when saving begins, what is not started any more, and leaving in time."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Kill, Launch, SetTimer, Suspend, Terminate
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.outcome import DRAIN, HURRY
from hpcsched.testing.builders import Driver, a_job, a_profile, simulate

MODEL = a_profile("m", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start_s=10.0, suspend_s=5.0, resume_s=8.0)
SLOW = a_profile("slow", [0.05, 0.1, 0.2], start_s=100.0, suspend_s=5.0)


def due(driver: Driver, key=DRAIN) -> float:
    """When the timer is set to, by the last word."""
    return [action.due for action in driver.actions if isinstance(action, SetTimer) and action.key == key][-1]


def test_saving_begins_by_the_longest_save_times_the_jobs_that_save_together():
    driver = Driver(a_job("a", "m", gpus=2), gpus=6, profiles=(MODEL,), deadline=1000.0, reserve_s=60.0)
    assert due(driver) == 1000 - 60 - 5
    driver.submit(a_job("b", "m", gpus=2), a_job("c", "m", gpus=2))
    assert due(driver) == 1000 - 60 - 3 * 5


def test_a_slower_save_than_known_widens_the_margin():
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), profiles=(MODEL,), deadline=1000.0)
    driver.runs("a", "b")
    driver.now = 100.0
    driver.suspend("a")
    driver.now = 120.0
    driver.leaves("a", 50)
    driver.resume("a")
    assert due(driver) == 1000 - 60 - 2 * 20


def test_when_the_time_is_up_all_jobs_save_and_nothing_starts():
    driver = Driver(
        a_job("a", "m", gpus=3), a_job("b", "m", gpus=3), a_job("c", "m"), profiles=(MODEL,), deadline=500.0
    )
    driver.runs("a", "b")
    driver.now = due(driver)
    actions = driver.tell(ev.TimerFired, key=DRAIN)
    assert [type(action) for action in actions] == [Suspend, Suspend]
    assert driver.machine.deadline.cause == "deadline"
    assert [type(a) for a in (*driver.leaves("a", 10), *driver.leaves("b", 20))] == []
    assert driver.machine.stopped
    assert driver.machine.waiting_reason(driver.job("c")).why is Why.DRAINING


def test_a_timer_of_an_earlier_deadline_does_nothing():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0)
    driver.runs("a")
    first = due(driver)
    driver.tell(ev.DeadlineMoved, deadline=5000.0)
    driver.now = first
    assert driver.tell(ev.TimerFired, key=DRAIN) == []
    assert not driver.machine.deadline.draining


def test_a_deadline_that_comes_nearer_counts_at_once():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=5000.0)
    driver.runs("a")
    driver.tell(ev.DeadlineMoved, deadline=400.0)
    assert due(driver) == 400 - 60 - 5


def test_a_deadline_that_is_told_again_sets_no_timer_again():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0)
    driver.runs("a")
    driver.actions.clear()
    driver.tell(ev.DeadlineMoved, deadline=500.0)
    assert driver.actions == []


def test_no_job_is_started_that_cannot_reach_its_first_checkpoint():
    driver = Driver(
        a_job("slow", "slow"), a_job("quick", "m", gpus=6), profiles=(MODEL, SLOW), deadline=180.0
    )
    assert driver.job("slow").state is JobState.PENDING
    assert driver.job("quick").state is JobState.STARTING
    reason = driver.machine.waiting_reason(driver.job("slow"))
    assert reason.why is Why.WALLTIME_TOO_SHORT
    assert str(reason) == (
        "its first checkpoint needs about 120 s, saving begins in 110 s: it waits for the next allocation"
    )


def test_more_time_lets_it_in():
    driver = Driver(a_job("slow", "slow"), profiles=(MODEL, SLOW), deadline=180.0)
    assert driver.machine.stuck  # nothing else to do: come back with more time
    actions = driver.tell(ev.DeadlineMoved, deadline=900.0)
    assert [type(action) for action in actions] == [Launch]


def test_so_does_the_next_allocation():
    driver = Driver(a_job("slow", "slow"), profiles=(MODEL, SLOW), deadline=180.0)
    driver.drain()
    driver.now = 200.0
    actions = driver.start_agent(6, deadline=3000.0)
    assert [type(action) for action in actions] == [Launch]


def test_a_job_set_aside_can_be_cancelled_held_and_released():
    driver = Driver(a_job("a", "slow"), a_job("b", "slow"), profiles=(SLOW,), deadline=180.0)
    driver.cancel("a")
    driver.hold("b")
    assert (driver.job("a").state, driver.job("b").state) == (JobState.CANCELLED, JobState.HELD)
    driver.release("b")
    assert driver.machine.waiting_reason(driver.job("b")).why is Why.WALLTIME_TOO_SHORT


def test_nothing_is_promoted_that_would_not_come_back_in_time():
    jobs = (a_job("b", "m", 10_000, gpus=4), a_job("a", "m", 10_000))
    driver = Driver(*jobs, gpus=6, profiles=(MODEL,), promote="always", deadline=300.0)
    driver.runs("b", "a")
    driver.now = 300 - 60 - 5 - 12  # 12 s until saving begins, 13 s for a switch
    driver.exits("b", 0, 10_000, 10_000)
    assert driver.job("a").target is None
    assert driver.job("a").story[-1].reason.why is Why.TIME_TOO_SHORT


def test_a_promotion_pays_by_the_steps_until_the_allocation_ends():
    def at(now: float) -> bool:
        driver = Driver(a_job("b", "m", gpus=4), a_job("a", "m", 10_000), profiles=(MODEL,), deadline=400.0)
        driver.runs("b", "a")
        driver.reports("a", 100)
        driver.now = now
        driver.exits("b", 0, 100, 100)
        return driver.job("a").target is not None

    # 2 -> 6 GPUs, 2 -> 6 steps/s; 13 s of switching: (left - 13) * 6 > left * 2 from left = 19.5 s on.
    assert at(400 - 60 - 5 - 25)
    assert not at(400 - 60 - 5 - 19.5)  # just as far: not worth a restart
    assert not at(400 - 60 - 5 - 18)


def test_who_does_not_save_in_time_is_ended_before_the_batch_system_does_it():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0, reserve_s=60.0, grace_s=300.0)
    driver.runs("a")
    driver.now = due(driver)
    driver.tell(ev.TimerFired, key=DRAIN)
    assert due(driver, HURRY) == 500 - 40
    driver.now = due(driver, HURRY)
    assert [type(action) for action in driver.tell(ev.TimerFired, key=HURRY)] == [Terminate]
    told = [note.reason for note in driver.job("a").story if note.reason.why is Why.TIME_IS_UP]
    assert told[-1].facts == {"left": 40.0, "how": "SIGTERM"}
    driver.now = due(driver, ("term", 1, 1))
    assert driver.now == 500 - 20
    assert [type(action) for action in driver.tell(ev.TimerFired, key=("term", 1, 1))] == [Kill]


def test_without_a_deadline_nothing_of_this_happens():
    driver = Driver(a_job("a", "slow"), profiles=(SLOW,))
    assert driver.job("a").state is JobState.STARTING
    assert not [a for a in driver.actions if isinstance(a, SetTimer) and a.key in (DRAIN, HURRY)]
    assert driver.machine.deadline.left_s() == float("inf")


def test_a_simulated_allocation_ends_in_time_with_all_steps_saved():
    jobs = [a_job(f"j{i}", "m", 2000) for i in range(4)]
    machine, story = simulate(jobs, (MODEL,), happenings=[ev.DeadlineMoved(at=0.0, deadline=400.0)])
    assert machine.stopped
    assert all(a.end_s < 400.0 - 59.0 for job in machine.run.jobs.values() for a in job.attempts)
    assert all(job.repeated == 0 for job in machine.run.jobs.values())
    assert any("has left" in line for line in story)


SAVER = a_profile("saver", [1.0], start_s=10.0, suspend_s=30.0)


def test_jobs_that_start_together_leave_each_other_time_to_save():
    jobs = [a_job(f"j{i}", "saver", 10_000, gpus=1) for i in range(6)]
    driver = Driver(*jobs, profiles=(SAVER,), deadline=200.0)
    # 60 in reserve, 11 until a first step can be saved, and 30 for each save: four saves, not six.
    running = [job for job in driver.machine.run.jobs.values() if job.state is JobState.STARTING]
    assert len(running) == 4
    assert driver.machine.deadline.left_s() > 0
    assert not driver.machine.deadline.draining


def test_a_job_set_aside_is_looked_at_again_when_others_have_ended():
    jobs = [a_job(f"j{i}", "saver", 10_000, gpus=1) for i in range(5)]
    driver = Driver(*jobs, a_job("slow", "slow", gpus=1), profiles=(SAVER, SLOW), deadline=330.0)
    assert driver.machine.waiting_reason(driver.job("slow")).why is Why.WALLTIME_TOO_SHORT
    driver.runs(*[job.name for job in jobs])
    driver.now = 20.0
    for job in jobs:
        driver.exits(job.name, 0, 10_000, 10_000)
    assert driver.job("slow").state is JobState.STARTING


def test_a_deadline_taken_away_drains_nothing():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0)
    driver.runs("a")
    first = due(driver)
    driver.tell(ev.DeadlineMoved, deadline=None)
    driver.now = first
    assert driver.tell(ev.TimerFired, key=DRAIN) == []
    assert not driver.machine.deadline.draining
    # And when it is back, the timer that has run out is set anew.
    driver.actions.clear()
    driver.tell(ev.DeadlineMoved, deadline=500.0)
    assert due(driver) == first


def test_a_nearer_end_while_draining_hurries():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=5000.0, grace_s=600.0)
    driver.runs("a")
    driver.now = 100.0
    driver.drain()
    driver.tell(ev.DeadlineMoved, deadline=125.0)
    driver.now = due(driver, HURRY)
    assert driver.now == pytest.approx(100 + 25 / 2 + 25 / 6)
    assert [type(action) for action in driver.tell(ev.TimerFired, key=HURRY)] == [Terminate]


def test_a_person_who_asks_to_stop_while_time_is_up_anyway_is_heard():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0)
    driver.runs("a")
    driver.now = due(driver)
    driver.tell(ev.TimerFired, key=DRAIN)
    driver.tell(ev.DrainRequested, cause="SIGUSR2")
    assert driver.machine.deadline.cause == "deadline"
    driver.tell(ev.DrainRequested, cause="inbox:x")
    assert driver.machine.deadline.cause == "inbox:x"


def test_what_survives_being_killed_does_not_hold_us_for_ever():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0)
    assert driver.machine.deadline.leave_by == float("inf")
    driver.now = due(driver)
    driver.tell(ev.TimerFired, key=DRAIN)
    assert due(driver, ("term", 1, 1)) < driver.machine.deadline.leave_by < 500.0


def test_a_launch_that_a_lost_host_spoils_is_not_the_jobs_failure():
    driver = Driver(a_job("a", "m", retries=0, gpus=2), gpus=2, hosts=2, profiles=(MODEL,))
    driver.lose(0)
    driver.lose(1)
    driver.tell(ev.LaunchFailed, "a", error="n1 is lost", host_fault=True)
    assert driver.job("a").state is JobState.STARTING
    assert driver.job("a").current.gpus == (2, 3)
    assert (driver.job("a").failures, driver.job("a").traits.losses) == (0, 0)


def test_not_even_when_the_host_is_not_known_to_be_lost_yet():
    driver = Driver(a_job("a", "m", retries=0), profiles=(MODEL,))
    driver.tell(ev.LaunchFailed, "a", error="n1 is lost", host_fault=True)
    assert driver.job("a").state is JobState.STARTING
    assert (driver.job("a").failures, driver.job("a").traits.losses) == (0, 1)  # not for ever, though


def test_one_that_was_told_to_end_shortly_before_is_not_told_twice():
    driver = Driver(a_job("a", "m"), profiles=(MODEL,), deadline=500.0, reserve_s=60.0, grace_s=300.0)
    driver.runs("a")
    driver.now = due(driver)
    driver.tell(ev.TimerFired, key=DRAIN)
    driver.now = due(driver, HURRY) - 1
    assert [type(action) for action in driver.cancel("a")] == [Terminate]
    driver.now += 1
    assert driver.tell(ev.TimerFired, key=HURRY) == []
