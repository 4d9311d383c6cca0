"""What users may ask for, in every state a job can be in."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Kill, Launch, Suspend, Terminate
from hpcsched.core.model import JobState
from hpcsched.testing.builders import Driver, a_job, a_profile, state_of

PROFILES = (a_profile("m", [1, 2, 3, 2.5]), a_profile("wide", [1, 2, 3, 4, 5, 6]))


def kinds(actions):
    return [type(action) for action in actions]


def pending():
    """Job 1 waits for GPUs that another has."""
    driver = Driver(gpus=1, profiles=PROFILES)
    driver.submit(a_job("x", "m", gpus=2), a_job("other", "m"))
    return driver


def dependent():
    return Driver(a_job("x", "m", after=("other",)), a_job("other", "m"), profiles=PROFILES)


def held():
    driver = pending()
    driver.hold(1)
    return driver


def starting():
    return Driver(a_job("x", "m"), profiles=PROFILES)


def running():
    driver = starting()
    driver.tell(ev.WorkersSpawned, 1, processes=((100, 1),))
    return driver


def ready():
    driver = starting()
    driver.runs(1)
    return driver


def suspending():
    """For the user."""
    driver = ready()
    driver.suspend(1)
    return driver


def promoting():
    """A secondary on 3 GPUs is saving to go on with all 6."""
    driver = Driver(a_job("other", "m"), a_job("x", "wide"), profiles=PROFILES, promote="always")
    driver.runs("other", "x")
    driver.exits("other", 0)
    assert driver.job("x").target.gpus == (0, 1, 2, 3, 4, 5)
    return driver


def suspended():
    driver = suspending()
    driver.leaves(1, 40)
    return driver


def completed():
    driver = ready()
    driver.exits(1, 0, 100)
    return driver


def failed():
    driver = Driver(a_job("x", "m", retries=0), profiles=PROFILES)
    driver.exits(1, 1)
    return driver


def cancelled():
    driver = pending()
    driver.cancel(1)
    return driver


FINAL = [completed, failed, cancelled]


@pytest.mark.parametrize("make", [pending, dependent, held, suspended])
def test_a_job_without_processes_is_cancelled_at_once(make):
    driver = make()
    assert driver.cancel("x") == []
    assert driver.job("x").state is JobState.CANCELLED
    assert driver.job("x").ended_s == driver.now


@pytest.mark.parametrize("make", [starting, running, ready, suspending, promoting])
def test_a_job_with_processes_is_terminated_then_killed_then_cancelled(make):
    driver = make()
    assert Terminate in kinds(driver.cancel("x"))
    assert driver.job("x").target is None
    assert kinds(driver.ring("term", "x")) == [Kill]
    driver.exits("x", 137)
    assert driver.job("x").state is JobState.CANCELLED
    assert driver.job("x").current.ended == "cancelled"


def test_cancelling_again_does_not_put_off_the_kill():
    driver = ready()
    driver.cancel(1)
    due = driver.due("term", 1)
    driver.now += 10
    assert driver.cancel(1) == []
    assert driver.due("term", 1) == due


def test_what_waited_for_an_agent_is_carried_out_before_anything_starts():
    """Cancelled, held and released between two allocations; foreground and background."""
    jobs = [a_job(name, "m", gpus=1) for name in ("x", "y", "z")] + [a_job("b", "m", background=True)]
    driver = Driver(*jobs, gpus=1, profiles=PROFILES)
    driver.runs("x")
    driver.hold("z")
    assert driver.start_agent(2, {1: 10}, reads_inbox=True) == []
    for command, name in ((driver.cancel, "x"), (driver.hold, "y"), (driver.release, "z")):
        assert command(name) == []
    launches = driver.tell(ev.InboxRead)
    assert [action.job_id for action in launches if isinstance(action, Launch)] == [3, 4]
    assert driver.states() == ["CANCELLED", "HELD", "STARTING", "STARTING"]
    assert driver.start_agent(2) != []  # the next one has nothing to read


def test_a_cancel_frees_the_larger_lease_at_once():
    driver = promoting()
    actions = driver.tell(ev.JobsSubmitted, first_id=3, jobs=(a_job("third", "m"),))
    assert actions == []
    launches = [action for action in driver.cancel("x") if isinstance(action, Launch)]
    assert [(launch.job_id, launch.gpus) for launch in launches] == [(3, (0, 1, 2))]


@pytest.mark.parametrize("code", [0, 75, 143])
def test_a_cancelled_job_does_not_count_as_completed_however_it_leaves(code):
    """A program that ends cleanly when terminated has not done its work: dependents do not start."""
    driver = Driver(a_job("x", "m"), a_job("then", "m", after=("x",)), profiles=PROFILES)
    driver.runs("x")
    driver.reports("x", 40)
    driver.cancel("x")
    driver.exits("x", code, 41)
    assert driver.states() == ["CANCELLED", "CANCELLED"]


def test_a_job_that_was_done_when_the_cancel_came_is_completed():
    driver = ready()
    driver.cancel(1)
    driver.exits(1, 0, 100)
    assert driver.states() == ["COMPLETED"]


@pytest.mark.parametrize("command", ["cancel", "hold", "release", "suspend", "resume"])
@pytest.mark.parametrize("make", FINAL)
def test_a_final_state_stays(make, command):
    driver = make()
    before = state_of(driver.machine)["jobs"][1]
    assert getattr(driver, command)(1) == []
    assert state_of(driver.machine)["jobs"][1] == before


@pytest.mark.parametrize("make", [pending, dependent])
def test_hold_and_release(make):
    driver = make()
    driver.hold("x")
    assert driver.job("x").state is JobState.HELD
    driver.exits("other", 0, 100)
    assert driver.job("x").attempt == 0
    driver.release("x")
    assert driver.job("x").state is (JobState.STARTING if make is dependent else JobState.PENDING)


def test_a_released_job_starts_at_once_when_there_is_room():
    driver = Driver(gpus=2, profiles=PROFILES)
    driver.submit(a_job("x", "m", submit_at=5.0))
    driver.hold(1)
    driver.ring("arrival", 1)
    assert driver.states() == ["HELD"]
    assert kinds(driver.release(1)) == [Launch]


@pytest.mark.parametrize("make", [starting, running, ready, suspending, promoting])
@pytest.mark.parametrize("command", ["hold"])
def test_hold_does_nothing_to_a_job_that_runs(make, command):
    driver = make()
    state = driver.job("x").state
    assert getattr(driver, command)("x") == []
    assert driver.job("x").state is state


@pytest.mark.parametrize("make", [pending, dependent, held])
def test_suspend_does_nothing_to_a_job_that_never_ran(make):
    driver = make()
    state = driver.job("x").state
    assert driver.suspend("x") == []
    assert driver.job("x").state is state


def test_suspend_and_resume():
    driver = ready()
    assert kinds(driver.suspend(1)) == [Suspend]
    driver.leaves(1, 40)
    assert driver.states() == ["SUSPENDED"]
    assert driver.machine.waiting_reason(driver.job(1)).why == "UserSuspended"
    (launch,) = driver.resume(1)
    assert isinstance(launch, Launch) and launch.resume
    assert driver.job(1).current.from_step == 40


@pytest.mark.parametrize("make", [starting, running])
def test_a_job_not_ready_yet_is_suspended_when_it_is(make):
    driver = make()
    assert driver.suspend(1) == []
    driver.tell(ev.WorkersSpawned, 1, processes=())
    assert kinds(driver.tell(ev.WorkersReady, 1)) == [Suspend]


def test_ready_before_spawned_is_news_too():
    driver = starting()
    driver.suspend(1)
    assert kinds(driver.tell(ev.WorkersReady, 1)) == [Suspend]
    driver.tell(ev.WorkersSpawned, 1, processes=())
    driver.leaves(1, 10)
    assert driver.states() == ["SUSPENDED"]


def test_a_suspend_taken_back_before_the_job_was_ready():
    driver = running()
    driver.suspend(1)
    driver.resume(1)
    assert driver.tell(ev.WorkersReady, 1) == []
    assert driver.states() == ["RUNNING"]


def test_a_suspend_taken_back_while_the_job_saves_lets_it_start_again():
    driver = suspending()
    assert driver.resume(1) == []
    assert kinds(driver.leaves(1, 40)) == [Launch]


def test_suspend_while_being_promoted_gives_the_larger_lease_up():
    driver = promoting()
    driver.submit(a_job("third", "m"))
    (launch,) = driver.suspend("x")
    assert (launch.job_id, launch.gpus) == (3, (0, 1, 2))
    driver.leaves("x", 30)
    assert driver.job("x").state is JobState.SUSPENDED
    assert driver.machine.ledger.free == {3, 4, 5}
    assert kinds(driver.resume("x")) == [Launch]


def test_suspend_while_draining_is_not_forgotten():
    driver = ready()
    driver.drain()
    driver.suspend(1)
    driver.leaves(1, 40)
    driver.start_agent(6)
    assert driver.states() == ["SUSPENDED"]


def test_a_suspended_job_can_be_kept_away_by_hold_and_by_suspend():
    for command in ("hold", "suspend"):
        driver = ready()
        driver.submit(a_job("big", "m", gpus=6))
        driver.drain()
        driver.leaves(1, 40)
        assert not driver.job(1).held
        driver.machine.run.take_changed()
        getattr(driver, command)(1)
        assert driver.machine.run.changed == {1}
        driver.start_agent(6)
        assert driver.job(1).state is JobState.SUSPENDED
        assert driver.job(2).state is JobState.STARTING


@pytest.mark.parametrize("command", ["resume", "release"])
def test_a_job_suspended_before_its_first_checkpoint_can_be_let_go(command):
    """When its agent dies there is nothing to be suspended from: it is HELD."""
    driver = ready()
    driver.suspend(1)
    driver.start_agent(6)
    assert driver.states() == ["HELD"]
    assert kinds(getattr(driver, command)(1)) == [Launch]


def test_drain_saves_what_runs_and_starts_nothing():
    driver = Driver(
        a_job("a", "m"), a_job("b", "m"), a_job("c", "m"), a_job("d", "m"), gpus=5, profiles=PROFILES
    )
    driver.runs("a")
    # b has not said that it can be suspended: it is told to end.
    assert kinds(driver.drain()) == [Suspend, Terminate]
    driver.leaves("a", 10)
    assert not driver.machine.stopped
    driver.exits("b", 143)
    assert driver.machine.stopped and not driver.machine.run.finished
    assert driver.states() == ["SUSPENDED", "PENDING", "PENDING", "PENDING"]
    assert driver.submit(a_job("e", "m")) == []
    assert driver.machine.waiting_reason(driver.job("e")).why == "Draining"


def test_drain_while_being_promoted():
    driver = promoting()
    assert driver.drain() == []
    assert driver.job("x").target is None
    assert driver.leaves("x", 20) == []
    assert driver.machine.stopped
    assert driver.job("x").state is JobState.SUSPENDED and not driver.job("x").held
    (launch,) = driver.start_agent(6)
    assert launch.gpus == (0, 1, 2, 3, 4, 5) and launch.resume


def test_drain_ends_a_job_too_whose_suspend_waits_for_ready():
    driver = running()
    driver.suspend(1)
    assert kinds(driver.drain()) == [Terminate]
    driver.exits(1, 143)
    assert driver.machine.stopped
    driver.start_agent(6)
    assert driver.states() == ["HELD"]


def test_a_second_drain_changes_nothing():
    driver = running()
    driver.drain()
    due = driver.due("term", 1)
    driver.now += 5
    assert driver.drain() == []
    assert driver.due("term", 1) == due


def test_a_cancel_acknowledged_before_the_agent_died_holds():
    driver = ready()
    driver.cancel(1)
    driver.start_agent(6, {1: 50})
    assert driver.states() == ["CANCELLED"]
