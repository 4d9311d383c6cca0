"""A job's time limit: counted while it runs, over all its attempts."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Kill, Launch, Suspend, Terminate
from hpcsched.core.model import Ended, JobState, Kind, Restart
from hpcsched.core.needs import Needs
from hpcsched.core.reasons import Why
from hpcsched.testing.builders import Driver, a_job, a_profile, simulate

TWO_MINUTES = Needs(time_s=120.0)
PROFILE = a_profile("m", [1, 2])


def a_timed(name: str = "x", **rest):
    return a_job(name, "m", needs=TWO_MINUTES, **rest)


def kinds(actions):
    return [type(action) for action in actions]


def test_who_can_save_is_asked_to_then_has_timed_out():
    driver = Driver(a_timed(), a_job("next", "m", after=("x",)), profiles=[PROFILE])
    driver.runs(1)
    (asked,) = driver.ring("time", 1)
    assert isinstance(asked, Suspend) and not asked.quick, "nobody would wait for a state in memory"
    assert (driver.now, driver.job(1).state) == (120.0, JobState.SUSPENDING)
    driver.leaves(1, 90)
    job = driver.job(1)
    assert (job.state, job.state.code, job.saved_step) == (JobState.TIMEOUT, "TO", 90)
    assert str(job.reason) == "its time limit of 2m is over: saved at step 90"
    assert job.current.ended is Ended.SUSPENDED
    assert driver.job("next").state is JobState.CANCELLED


def test_who_cannot_save_is_told_to_end():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.tell(ev.WorkersSpawned, 1, processes=((100, 1),))
    assert kinds(driver.ring("time", 1)) == [Terminate]
    assert kinds(driver.ring("term", 1)) == [Kill]
    driver.exits(1, 137)
    job = driver.job(1)
    assert (job.state, job.exit, job.current.ended) == (JobState.TIMEOUT, 137, Ended.CANCELLED)
    assert "nothing is saved" in str(job.reason)
    assert driver.machine.run.finished


def test_time_in_which_it_does_not_run_does_not_count():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.now = 50.0
    driver.suspend(1)
    driver.now = 60.0
    driver.leaves(1, 50)
    driver.now = 1000.0
    driver.resume(1)
    assert driver.due("time", 1) == 1060.0
    driver.ring("time", 1, attempt=1)  # of the attempt that is over
    assert driver.job(1).state is JobState.STARTING


def test_time_before_its_processes_are_started_does_not_count():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.now = 50.0
    driver.tell(ev.StartWaited, 1, seconds=50.0)
    driver.tell(ev.LaunchFailed, 1, error="not loaded within 60 s")
    assert driver.job(1).time_left_s(driver.now) == 120.0
    driver.now = 70.0
    driver.tell(ev.StartWaited, 1, seconds=20.0)
    driver.runs(1)
    assert driver.due("time", 1) == 190.0
    driver.ring("time", 1)
    assert (driver.now, driver.job(1).wanted) == (190.0, "time")


def test_time_goes_on_over_a_resize_in_place():
    driver = Driver(
        a_job("o", "m", gpus=1, steps=10), a_timed(), gpus=2, profiles=[PROFILE], promote="always"
    )
    driver.runs("o")
    driver.runs("x", in_place=True)
    driver.now = 30.0
    driver.exits("o", 0, 10)
    assert driver.job("x").resizing
    driver.now = 40.0
    driver.resized("x", 30)
    assert driver.due("time", "x") == 120.0


def test_who_is_done_at_the_last_moment_has_completed():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.ring("time", 1)
    driver.exits(1, 0, 100)
    assert driver.states() == ["COMPLETED"]


@pytest.mark.parametrize(("step", "state"), [(90, "TIMEOUT"), (100, "COMPLETED")])
def test_exit_code_0_after_sigterm_says_nothing_but_for_the_steps(step, state):
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.tell(ev.WorkersSpawned, 1, processes=((100, 1),))
    assert kinds(driver.ring("time", 1)) == [Terminate]
    driver.exits(1, 0, step)
    assert driver.states() == [state]


def test_a_drain_under_way_is_followed_by_no_next_attempt():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.now = 110.0
    driver.drain()
    assert driver.ring("time", 1) == []  # it is saving
    driver.leaves(1, 80)
    assert driver.states() == ["TIMEOUT"]


def test_a_lost_attempt_that_used_all_of_it_is_not_repeated():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.ring("time", 1)
    driver.start_agent(2, {1: 40})
    job = driver.job(1)
    assert (job.state, job.saved_step) == (JobState.TIMEOUT, 40)


def test_a_suspended_job_waits_for_its_gpus_with_what_is_left():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.now = 100.0
    driver.tell(ev.DeviceLost, gpu=driver.job(1).gpus[0], why="Xid 79")
    driver.now = 130.0
    driver.exits(1, 143, 100, 90)
    assert driver.states() == ["TIMEOUT"]


def test_a_cancelled_job_is_cancelled():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.runs(1)
    driver.cancel(1)
    driver.ring("time", 1)
    driver.exits(1, 143)
    assert driver.states() == ["CANCELLED"]


@pytest.mark.parametrize("longer", [None, 600.0])
def test_retry_gives_it_its_time_anew_and_it_goes_on(longer):
    driver = Driver(a_timed(), a_job("next", "m", after=("x",)), profiles=[PROFILE])
    driver.runs(1)
    driver.ring("time", 1)
    driver.leaves(1, 90)
    if longer:
        driver.define(a_job("x", "m", needs=Needs(time_s=longer)))
    (launch,) = [a for a in driver.retry(1) if isinstance(a, Launch)]
    assert launch.resume
    assert driver.due("time", 1) == 120.0 + (longer or 120.0)
    driver.runs(1)
    driver.exits(1, 0, 100)
    assert driver.states() == ["COMPLETED", "STARTING"]


def test_retry_forgets_how_long_starts_before_it_have_waited():
    driver = Driver(a_timed(), profiles=[PROFILE])
    driver.now = 30.0
    driver.tell(ev.StartWaited, 1, seconds=30.0)
    driver.runs(1)
    driver.ring("time", 1)
    driver.leaves(1, 90)
    driver.retry(1)
    assert driver.job(1).time_left_s(driver.now) == 120.0


def test_the_simulator_ends_it_too():
    machine, _ = simulate([a_job("x", "m", steps=1000, needs=TWO_MINUTES)], [PROFILE], gpus=1)
    job = machine.run.jobs[1]
    assert (job.state, job.ended_s, job.step) == (JobState.TIMEOUT, 120.0, 120)
    assert job.reason is not None
    assert job.reason.why is Why.TIME_LIMIT


class TestOutOfMemory:
    def test_over_its_own_limit_it_is_not_repeated(self):
        driver = Driver(a_timed(), profiles=[PROFILE])
        driver.runs(1)
        driver.exits(1, 137, 10, oom="it used 17G of the 16G that it may use", over_limit=True)
        job = driver.job(1)
        assert (job.state, job.state.code) == (JobState.OUT_OF_MEMORY, "OOM")
        assert str(job.reason) == "out of memory: it used 17G of the 16G that it may use"
        driver.retry(1)
        assert driver.states() == ["STARTING"]

    def test_by_the_kernel_it_is_repeated_once(self):
        driver = Driver(a_job("x", "m"), profiles=[PROFILE])
        driver.runs(1)
        driver.exits(1, 137, oom="the kernel's OOM killer ended it")
        assert driver.states() == ["STARTING"]
        driver.exits(1, 137, oom="the kernel's OOM killer ended it")
        assert driver.states() == ["OUT_OF_MEMORY"]

    def test_while_it_is_cancelled_it_is_cancelled(self):
        driver = Driver(a_timed(), profiles=[PROFILE])
        driver.runs(1)
        driver.cancel(1)
        driver.exits(1, 137, oom="too much", over_limit=True)
        assert driver.states() == ["CANCELLED"]


@pytest.mark.parametrize("code", [0, 143])
def test_a_program_that_saves_by_itself_is_asked_by_its_signal(code):
    job = a_job("x", "m", kind=Kind.COMMAND, command=("x",), needs=TWO_MINUTES, restart=Restart())
    driver = Driver(job, profiles=[PROFILE])
    driver.tell(ev.WorkersSpawned, 1, processes=((100, 1),))
    driver.tell(ev.RestartSeen, 1, handles=True)
    assert kinds(driver.ring("time", 1)) == [Suspend]
    driver.exits(1, code, 50, 50)
    ended = driver.job(1)
    assert (ended.state, ended.saved_step, ended.current.ended) == (JobState.TIMEOUT, 50, Ended.SUSPENDED)
    (launch,) = [action for action in driver.retry(1) if isinstance(action, Launch)]
    assert launch.resume
