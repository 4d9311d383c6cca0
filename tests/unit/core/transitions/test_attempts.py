"""How attempts end, and what becomes of their jobs."""

from __future__ import annotations

import pytest

from hpcsched.cli.run.results import lost_work_s, overhead_s
from hpcsched.core import events as ev
from hpcsched.core.actions import Kill, Launch, Suspend, Terminate
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState, Progress, Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.transitions.endings import MAX_LOSSES
from hpcsched.core.view import Resize, Start
from hpcsched.errors import InvalidTransition
from hpcsched.policy import make_policy
from hpcsched.testing.builders import Driver, a_job, a_profile, some_devices

PROFILES = (a_profile("m", [1, 2, 3, 2.5]), a_profile("wide", [1, 2, 3, 4, 5, 6]))


def kinds(actions):
    return [type(action) for action in actions]


def one(**rest):
    driver = Driver(a_job("x", "m", **rest), profiles=PROFILES)
    driver.runs(1)
    return driver


def promoting():
    driver = Driver(a_job("other", "m"), a_job("x", "wide"), profiles=PROFILES, promote="always")
    driver.runs("other", "x")
    driver.exits("other", 0)
    return driver


# --- exits --------------------------------------------------------------------------------------


def test_exit_0_is_done_also_after_a_suspend():
    """The last step was reached before the signal was."""
    driver = one()
    driver.suspend(1)
    driver.exits(1, 0, 100, 100)
    assert driver.states() == ["COMPLETED"]
    assert driver.job(1).suspensions == 0


def test_a_program_that_reports_nothing_has_done_its_steps_when_it_is_done():
    driver = one()
    driver.exits(1, 0)
    assert driver.job(1).step == 100
    assert driver.job(1).steps_repeated is None


def test_a_failing_job_is_tried_again_and_then_failed():
    driver = one(retries=2)
    for _ in range(2):
        (launch,) = driver.exits(1, 3, detail="no such file")
        assert isinstance(launch, Launch) and not launch.resume
    assert driver.exits(1, 3) == []
    assert driver.states() == ["FAILED"]
    assert driver.job(1).exit == 3
    assert [attempt.ended for attempt in driver.job(1).attempts] == ["failed"] * 3


def test_failures_count_in_a_row_progress_forgives_them():
    driver = one(retries=1)
    driver.exits(1, 3)
    driver.saves(1, 10)
    (launch,) = driver.exits(1, 3, 15)
    assert launch.resume
    assert driver.job(1).repeated == 5
    assert kinds(driver.exits(1, 3)) == []
    assert driver.states() == ["FAILED"]


def test_exit_75_unasked_with_something_saved_is_a_suspension():
    driver = one(retries=0)
    (launch,) = driver.exits(1, 75, 20, 20)
    assert launch.resume
    assert driver.job(1).suspensions == 1
    assert driver.job(1).failures == 0


def test_exit_75_unasked_whose_save_was_told_before_is_a_suspension_too():
    driver = one(retries=0)
    driver.saves(1, 20)
    (launch,) = driver.exits(1, 75, 20, 20)
    assert launch.resume
    assert driver.job(1).failures == 0


def test_exit_75_unasked_with_nothing_new_saved_is_a_failure():
    driver = one(retries=1)
    driver.exits(1, 75, 20, 20)
    driver.exits(1, 75, 20, 20)
    assert driver.job(1).failures == 1
    driver.exits(1, 75, 20, 20)
    assert driver.states() == ["FAILED"]


def test_a_job_that_leaves_when_asked_without_saving_goes_on_from_its_checkpoint():
    driver = one()
    driver.saves(1, 30)
    driver.reports(1, 45)
    driver.suspend(1)
    driver.exits(1, 75, 45, 30)
    driver.resume(1)
    assert (driver.job(1).current.from_step, driver.job(1).repeated) == (30, 15)


def test_steps_that_an_attempt_repeats_as_its_program_goes_back_are_counted_once():
    driver = one(retries=2)
    driver.saves(1, 50)
    driver.reports(1, 80)
    driver.reports(1, 60, again=40)  # from 90, of which nothing had been heard
    driver.reports(1, 70, again=40)
    job = driver.job(1)
    assert (job.step, job.repeated, job.current.again) == (70, 40, 40)
    driver.exits(1, 3, 75)  # those after 75 that were to be repeated are counted already
    assert (job.repeated, job.step, job.attempts[0].to_step) == (40 + 25, 50, 75)
    driver.reports(1, 60)
    driver.exits(1, 0, 100, 100, again=20)  # of which nothing had been heard, either
    assert (job.state, job.step, job.repeated) == ("COMPLETED", 100, 40 + 25 + 20)


def test_what_the_last_snapshot_says_of_a_program_that_went_back_may_be_of_before():
    driver = one()
    driver.saves(1, 70)
    driver.reports(1, 100)
    driver.reports(1, 72, again=30)
    assert driver.job(1).story[-1].reason.said("GPU") == (
        "its program went back to a checkpoint without ending: steps done again 30"
    )
    driver.start_agent(6, {1: 70}, seen_steps={1: 100})
    assert driver.job(1).repeated == 30 + 2


def test_what_a_program_that_went_back_did_again_is_lost_work():
    driver = one()
    driver.runs(1)
    job = driver.job(1)
    driver.reports(1, 50, again=25)
    driver.now += 125.0
    driver.exits(1, 0, 100, 100, again=25)
    trained_s = 125.0 - overhead_s(driver.machine, job, job.attempts[0])
    assert lost_work_s(driver.machine, job, job.attempts[0]) == pytest.approx(trained_s * 25 / 125)
    assert trained_s > 100.0


def test_the_time_that_going_back_takes_says_nothing_of_the_speed():
    driver = one(steps=1000)
    driver.trains(1, 1.0)
    driver.now += 5.0
    driver.reports(1, 20, again=20)  # the agent tells no times of the steps that are done again
    for step in range(30, 120, 10):  # first of all those that were done before
        driver.now += 10.0
        done_s = driver.now if step > 40 else None
        news = Progress(job_id=1, attempt=1, step=step, done_s=done_s, again=20)
        driver.tell(ev.ProgressObserved, progress=(news,))
    ((seen,),) = (points.values() for points in driver.machine.estimates.observed.seen.values())
    assert len(seen.rates) > 4 and set(seen.rates) == {1.0}


def test_a_program_that_goes_back_further_than_it_had_saved_has_no_newer_checkpoint():
    driver = one(retries=2)
    driver.saves(1, 50)
    driver.exits(1, 3, 55)
    driver.reports(1, 60)
    driver.reports(1, 30, again=30)  # 50 could not be read
    job = driver.job(1)
    assert (job.step, job.saved_step, job.repeated, job.current.from_step) == (30, 30, 5 + 30, 50)
    driver.saves(1, 40)  # it has said itself where it went on
    assert (job.saved_step, job.repeated) == (40, 5 + 30)
    driver.exits(1, 0, 100, 100, again=30)
    assert (job.state, job.repeated) == ("COMPLETED", 5 + 30)


def test_death_while_saving_is_a_loss_and_costs_the_steps_since_the_checkpoint():
    driver = promoting()
    driver.saves("x", 10)
    driver.reports("x", 25)
    (launch,) = driver.exits("x", 139)
    assert launch.resume and launch.gpus == (0, 1, 2, 3, 4, 5)
    job = driver.job("x")
    assert (job.repeated, job.traits.losses, job.failures) == (15, 1, 0)
    assert job.attempts[0].ended == "lost"


def test_too_many_losses_in_a_row_fail_the_job():
    driver = Driver(a_job("x", "wide", retries=9), gpus=6, profiles=PROFILES, promote="always")
    for _ in range(MAX_LOSSES + 1):
        other = len(driver.machine.run.jobs) + 1
        if driver.job("x").role is Role.PRIMARY:
            driver.runs("x")
            driver.suspend("x")
            driver.leaves("x", 0)
            driver.submit(a_job(f"o{other}", "m", gpus=3))
            driver.resume("x")
            driver.runs("x", other)
            driver.exits(other, 0)
        assert driver.job("x").state is JobState.SUSPENDING
        driver.exits("x", 1)
    assert driver.job("x").state is JobState.FAILED


def test_a_device_lost_or_an_agent_gone_never_fails_a_job():
    driver = one(retries=0)
    for _ in range(MAX_LOSSES + 2):
        driver.start_agent(6)
        driver.runs(1)
    assert driver.states() == ["RUNNING"]
    assert driver.job(1).traits.losses == 0


def test_a_launch_that_may_work_later_counts_as_a_failure():
    driver = Driver(a_job("x", "m", retries=1), profiles=PROFILES)
    (launch,) = driver.tell(ev.LaunchFailed, 1, error="no memory", transient=True)
    assert launch.attempt == 2
    driver.tell(ev.LaunchFailed, 1, error="no memory", transient=True)
    assert driver.states() == ["FAILED"]


def test_a_launch_that_never_works_fails_the_job_and_its_dependents():
    driver = Driver(a_job("x", "m"), a_job("then", "m", after=("x",)), profiles=PROFILES)
    driver.tell(ev.LaunchFailed, "x", error="no such program", transient=False)
    assert driver.states() == ["FAILED", "CANCELLED"]
    assert str(driver.job("x").reason) == "could not be started: no such program"


def test_a_launch_that_failed_after_a_cancel_is_a_cancelled_job():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.cancel(1)
    driver.tell(ev.LaunchFailed, 1, error="no memory", transient=True)
    assert driver.states() == ["CANCELLED"]


# --- news of attempts that are over ----------------------------------------------------------------


@pytest.mark.parametrize("attempt", [0, 2])
def test_news_of_another_attempt_is_ignored_and_counted(attempt):
    driver = one()
    news = [
        (ev.WorkersSpawned, {"processes": ()}),
        (ev.WorkersReady, {}),
        (ev.CheckpointSaved, {"step": 99}),
        (ev.WorkersExited, {"code": 0}),
        (ev.LaunchFailed, {"error": "no"}),
    ]
    for kind, rest in news:
        assert driver.tell(kind, 1, attempt=attempt, **rest) == []
    assert driver.states() == ["RUNNING"]
    assert driver.machine.run.stale == len(news)
    assert driver.job(1).saved_step is None


def test_news_of_a_job_without_processes_is_ignored():
    driver = one()
    driver.exits(1, 0, 100)
    driver.exits(1, 1)
    assert driver.states() == ["COMPLETED"]


# --- timers ----------------------------------------------------------------------------------------


def test_grace_then_sigterm_then_sigkill():
    driver = one()
    driver.suspend(1)
    assert driver.due("grace", 1) == 30.0
    assert kinds(driver.ring("grace", 1)) == [Terminate]
    assert driver.due("term", 1) == 45.0
    assert kinds(driver.ring("term", 1)) == [Kill]
    driver.exits(1, 137)
    assert driver.states() == ["HELD"]
    assert [str(note.reason) for note in driver.job(1).story if note.reason.why is Why.ESCALATED] == [
        "did not leave within 30 s: SIGTERM",
        "did not leave within 15 s: SIGKILL",
    ]


def test_grace_is_thrice_the_longest_save_seen():
    driver = one()
    driver.suspend(1)
    driver.now += 20
    driver.leaves(1, 10)
    driver.resume(1)
    driver.runs(1)
    driver.suspend(1)
    assert driver.due("grace", 1) == driver.now + 60


def test_grace_is_thrice_what_the_profile_says():
    slow = a_profile("slow", [1, 2], suspend_s={1: 10.0, 2: 50.0})
    driver = Driver(a_job("x", "slow"), profiles=[slow])
    driver.runs(1)
    driver.suspend(1)
    assert driver.due("grace", 1) == 150


def test_a_timer_of_an_attempt_that_is_over_does_nothing():
    driver = one()
    driver.suspend(1)
    due = driver.due("grace", 1)
    driver.leaves(1, 10)
    driver.resume(1)
    driver.runs(1)
    driver.now = due
    assert driver.tell(ev.TimerFired, key=("grace", 1, 1)) == []
    assert driver.tell(ev.TimerFired, key=("grace", 77, 1)) == []
    assert driver.states() == ["RUNNING"]


def test_a_second_cancel_does_not_put_the_kill_off():
    driver = one()
    driver.cancel(1)
    first = driver.due("term", 1)
    assert driver.cancel(1) == []
    assert driver.due("term", 1) == first
    driver.now = first
    assert kinds(driver.ring("term", 1)) == [Kill]


def test_a_checkpoint_that_cannot_be_used_costs_the_steps_since_the_one_before():
    driver = one()
    driver.saves(1, 42)
    driver.exits(1, 1, step=50)
    assert driver.job(1).repeated == 8
    driver.tell(ev.WorkersSpawned, 1, processes=())
    driver.saves(1, 30)
    assert (driver.job(1).repeated, driver.job(1).step, driver.job(1).saved_step) == (20, 30, 30)
    driver.exits(1, 0, step=100)
    assert driver.states() == ["COMPLETED"]


@pytest.mark.parametrize(("step", "state"), [(30, "PENDING"), (100, "COMPLETED")])
def test_exit_code_0_after_a_sigterm_is_believed_only_if_no_steps_are_left(step, state):
    driver = Driver(a_job("x", "m", steps=100), profiles=PROFILES)
    driver.tell(ev.WorkersSpawned, 1, processes=())
    driver.drain()
    driver.exits(1, 0, step=step)
    assert driver.states() == [state]


def test_a_job_told_to_end_on_drain_is_not_asked_to_save_as_well():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.tell(ev.WorkersSpawned, 1, processes=())
    assert kinds(driver.drain()) == [Terminate]
    assert driver.tell(ev.WorkersReady, 1) == []
    driver.exits(1, 75, step=30, saved=30)
    assert driver.states() == ["SUSPENDED"]


# --- devices ---------------------------------------------------------------------------------------


def test_a_job_on_a_lost_device_goes_on_elsewhere():
    driver = one()
    driver.saves(1, 30)
    driver.reports(1, 42)
    assert kinds(driver.lose(1)) == [Terminate]
    assert driver.lose(1) == []
    (launch,) = driver.exits(1, 143)
    assert launch.gpus == (0, 2, 3) and launch.resume
    assert (driver.job(1).repeated, driver.job(1).failures, driver.job(1).traits.losses) == (12, 0, 0)


def test_a_job_that_does_not_notice_that_its_device_is_lost_is_killed():
    driver = one()
    driver.lose(0)
    assert kinds(driver.ring("term", 1)) == [Kill]


@pytest.mark.parametrize("wanted", ["suspend", "drain"])
def test_a_lost_device_under_a_job_that_is_to_leave(wanted):
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.tell(ev.WorkersSpawned, 1, processes=())
    actions = driver.suspend(1) if wanted == "suspend" else driver.drain()
    assert kinds([*actions, *driver.lose(0)]) == [Terminate]
    driver.exits(1, 143)
    assert driver.states() == ["HELD" if wanted == "suspend" else "PENDING"]


def test_a_lost_device_of_the_larger_lease_only_ends_the_promotion():
    driver = promoting()
    assert driver.lose(0) == []
    assert driver.job("x").target is None
    assert driver.machine.ledger.free == {1, 2}
    assert driver.job("x").wanted == ""
    (launch,) = driver.leaves("x", 30)
    assert launch.gpus == (1, 2, 3, 4, 5)
    assert driver.job("x").repeated == 0


def test_a_lost_device_under_a_job_that_is_saving_leaves_it_its_grace():
    driver = promoting()
    assert driver.lose(4) == []
    assert kinds(driver.ring("grace", "x")) == [Terminate]
    driver.exits("x", 143)
    assert driver.job("x").traits.losses == 0
    assert driver.job("x").gpus == (0, 1, 2, 3, 5)


def test_stuck_when_no_device_is_left_that_could_ever_do():
    driver = Driver(a_job("x", "m", gpus=(2, None)), gpus=2, profiles=PROFILES)
    driver.runs(1)
    assert not driver.machine.stuck
    driver.lose(0)
    assert not driver.machine.stuck
    driver.exits(1, 143)
    assert driver.machine.stuck
    assert str(driver.machine.waiting_reason(driver.job(1))) == "waits for GPUs: needs 2, 1 free"
    driver.drain()
    assert driver.machine.stopped
    driver.start_agent(2)
    assert driver.states() == ["STARTING"]


def test_not_stuck_while_a_job_is_still_to_come():
    driver = Driver(a_job("x", "m", gpus=2), a_job("later", "m", submit_at=50.0), gpus=2, profiles=PROFILES)
    driver.lose(0)
    driver.exits("x", 143)
    assert not driver.machine.stuck
    assert kinds(driver.ring("arrival", "later")) == [Launch]


def test_a_later_agent_may_have_fewer_devices():
    driver = Driver(a_job("x", "wide"), a_job("y", "wide", gpus=4), profiles=PROFILES)
    driver.runs(1)
    driver.saves(1, 20)
    (launch,) = driver.start_agent(3, {1: 25})
    assert (launch.job_id, launch.gpus, launch.resume) == (1, (0, 1, 2), True)
    assert driver.job(1).current.from_step == 25
    assert driver.states() == ["STARTING", "PENDING"]


# --- arrivals and dependencies ---------------------------------------------------------------------


def test_a_job_comes_at_its_time():
    driver = Driver(a_job("x", "m", submit_at=50.0), profiles=PROFILES)
    assert driver.states() == ["PENDING"]
    assert str(driver.machine.waiting_reason(driver.job(1))) == "starts not before 50 s into the run"
    assert kinds(driver.ring("arrival", 1)) == [Launch]


def test_its_time_is_not_missed_by_rounding():
    """0.1 + (0.3 - 0.1) is not 0.3; a timer that rings too early would be the last."""
    for now, at in ((0.1, 0.3), (0.7, 0.9), (1 / 3, 1e6 / 7)):
        driver = Driver(profiles=PROFILES)
        driver.now = now
        driver.submit(a_job("x", "m", submit_at=at))
        assert driver.due("arrival", 1) == at
        driver.handle(ev.TimerFired(at=at, key=("arrival", 1, 0)))
        assert driver.states() == ["STARTING"]


def test_any_event_after_its_time_lets_a_job_come():
    """A crash between its time and the timer must not lose it."""
    driver = Driver(a_job("x", "m", submit_at=50.0), profiles=PROFILES)
    driver.now = 50.5
    assert kinds(driver.start_agent(6)) == [Launch]


def test_a_later_agent_sets_the_timers_again():
    driver = Driver(a_job("x", "m", submit_at=50.0), a_job("y", "m", submit_at=60.0), profiles=PROFILES)
    driver.cancel("y")
    driver.actions.clear()
    driver.start_agent(6)
    assert [action.key for action in driver.actions] == [("arrival", 1, 0)]


def test_dependents_wait_for_all_and_may_be_named_before_them():
    specs = [a_job("last", "m", after=("a", "b")), a_job("a", "m"), a_job("b", "m")]
    driver = Driver(*specs, profiles=PROFILES)
    reason = driver.machine.waiting_reason(driver.job("last"))
    assert str(reason) == "waits for a, b to complete"
    driver.exits("a", 0)
    assert str(driver.machine.waiting_reason(driver.job("last"))) == "waits for b to complete"
    assert [a.job_id for a in driver.exits("b", 0)] == [1]


def test_dependents_of_a_job_that_is_tried_again_wait_on():
    driver = Driver(a_job("x", "m"), a_job("then", "m", after=("x",)), profiles=PROFILES)
    driver.exits("x", 1)
    assert driver.states() == ["STARTING", "PENDING"]
    driver.exits("x", 0)
    assert driver.states() == ["COMPLETED", "STARTING"]


def test_what_waits_for_a_job_that_did_not_complete_is_cancelled_all_the_way():
    """A chain longer than Python's stack, part of it held."""
    chain = [a_job("j0", "m")] + [a_job(f"j{i}", "m", after=(f"j{i - 1}",)) for i in range(1, 3000)]
    machine = Machine(make_policy)
    machine.handle(ev.AgentStarted(at=0, wall=0, devices=some_devices(1), policy="marble"))
    machine.handle(ev.JobsSubmitted(at=0, first_id=1, jobs=tuple(chain)))
    machine.handle(ev.HoldRequested(at=0, job_id=7))
    machine.handle(ev.CancelRequested(at=1, job_id=1))
    machine.handle(ev.WorkersExited(at=2, job_id=1, attempt=1, code=143))
    assert machine.run.finished
    assert str(machine.run.jobs[3000].reason) == "cancelled: j2998 did not complete"


@pytest.mark.parametrize("order", [("b", "c"), ("c", "b")])
def test_jobs_that_come_after_the_one_they_wait_for_has_failed(order):
    """c waits for a job that failed, b for c."""
    driver = Driver(a_job("x", "m", retries=0), profiles=PROFILES)
    driver.exits("x", 1)
    specs = {"b": a_job("b", "m", after=("c",)), "c": a_job("c", "m", after=("x",))}
    driver.submit(*(specs[name] for name in order))
    assert driver.states() == ["FAILED", "CANCELLED", "CANCELLED"]
    assert driver.machine.run.finished


def test_a_job_that_comes_after_the_one_it_waits_for_has_completed():
    driver = Driver(a_job("x", "m"), profiles=PROFILES)
    driver.exits("x", 0)
    assert kinds(driver.submit(a_job("then", "m", after=("x",)))) == [Launch]


# --- decisions that cannot be ----------------------------------------------------------------------


class Stubborn:
    """Asks for what it was told to, whatever the view."""

    name, work_conserving, acts_when_full = "stubborn", False, False

    def __init__(self):
        self.ask = None

    def decide(self, view):
        return [self.ask(view)] if self.ask else []


@pytest.mark.parametrize("gpus", [0, 1, 5, 7])
def test_an_impossible_start_prints_the_story(gpus):
    policy = Stubborn()
    machine = Machine(lambda name, options: policy)
    machine.handle(ev.AgentStarted(at=0, wall=0, devices=some_devices(6), policy="stubborn"))
    spec = a_job("stubborn-one", "m", gpus=(2, 4))
    machine.handle(ev.JobsSubmitted(at=0, first_id=1, jobs=(spec,)))
    reason = Reason(Why.FIXED, {"gpus": gpus})
    policy.ask = lambda view: Start(
        job=machine.run.jobs[1], gpus=gpus, hosts=("n1",), role=Role.PRIMARY, reason=reason
    )
    with pytest.raises(InvalidTransition) as caught:
        machine.handle(ev.ProfilesLoaded(at=3, profiles=()))
    text = str(caught.value)
    assert text.startswith("job 1 (stubborn-one), on ProfilesLoaded: cannot start on")
    assert "0.0  submitted" in text


def test_an_impossible_resize_prints_the_story():
    driver = promoting()
    ask = Resize(
        job=driver.job("x"),
        gpus=6,
        hosts=("n1",),
        role=Role.PRIMARY,
        reason=Reason(Why.EXCLUSIVE, {"gpus": 6}),
    )
    driver.lose(0)
    policy = Stubborn()
    policy.ask = lambda view: ask
    driver.machine.decisions.policy = policy
    with pytest.raises(InvalidTransition, match=r"cannot be resized to 6 GPUs(.|\n)*promoted from 3 to 6"):
        driver.machine.handle(ev.ProfilesLoaded(at=3, profiles=()))


def test_a_job_can_shrink_and_the_rest_is_free_when_it_has_left():
    driver = one()
    policy = Stubborn()
    reason = Reason(Why.FIXED, {"gpus": 2})
    policy.ask = lambda view: Resize(
        job=view.running[0], gpus=2, hosts=("n1",), role=Role.SECONDARY, reason=reason
    )
    driver.machine.decisions.policy = policy
    assert kinds(driver.tell(ev.ProfilesLoaded, profiles=())) == [Suspend]
    policy.ask = None
    (launch,) = driver.leaves(1, 10)
    assert launch.gpus == (0, 1)
    assert driver.machine.ledger.free == {2, 3, 4, 5}
