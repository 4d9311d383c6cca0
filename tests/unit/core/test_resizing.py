"""Jobs that change their GPU count in place: what is asked for, and all that may come between."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Kill, Launch, Resize, Suspend, Terminate
from hpcsched.core.machine import Machine
from hpcsched.core.model import Ended, JobState, Role
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.estimates import DEFAULT_RESIZE_S, MIN_RESIZE_LIMIT_S
from hpcsched.planning.jobs.problem import Problem
from hpcsched.policy import make_policy
from hpcsched.policy.baselines.targets import coming
from hpcsched.testing.builders import Driver, a_job, a_profile, state_of

THREE = a_profile("three", [1, 2, 3, 2.5], start_s=4.0, suspend_s=6.0)
WIDE = a_profile("wide", [1, 2, 3, 4, 5, 6], start_s=4.0, suspend_s=6.0)
PROFILES = (THREE, WIDE)


def kinds(actions):
    return [type(action) for action in actions]


def two(**rest):
    """`other` runs on GPUs 0 to 2, `x` as a secondary on 3 to 5; both can be resized in place."""
    options = {"profiles": PROFILES, "promote": "always"} | rest
    driver = Driver(a_job("other", "three", 1000), a_job("x", "wide", 1000), **options)
    driver.runs("other", "x", in_place=True)
    return driver


def promoting(**rest):
    """`x` is being promoted in place to all six."""
    driver = two(**rest)
    driver.reports("x", 30, rate=3.0)
    driver.now = 100.0
    driver.exits("other", 0)
    assert driver.job("x").resizing
    return driver


def shared():
    """`equal`: `b` had GPUs 2 and 3 of four, and grew to all."""
    jobs = [a_job("a", "wide", 1000), a_job("b", "wide", 1000)]
    driver = Driver(*jobs, gpus=4, policy="equal", resize="always", profiles=PROFILES)
    driver.runs("a", "b", in_place=True)
    driver.exits("a", 0)
    driver.resized("b", 10)
    return driver


def whys(driver, job):
    return [note.reason.why for note in driver.job(job).story]


# --- how it goes --------------------------------------------------------------------------------


def test_a_promotion_in_place():
    driver = two()
    driver.now = 100.0
    (resize,) = driver.exits("other", 0)
    assert (type(resize), resize.attempt, resize.gpus) == (Resize, 1, (3, 4, 5, 0, 1, 2))
    assert resize.role is Role.PRIMARY
    job = driver.job("x")
    assert job.state is JobState.RUNNING and job.resizing and not job.settled
    assert (job.gpus, job.current.gpus, job.role) == ((0, 1, 2, 3, 4, 5), (3, 4, 5), Role.SECONDARY)

    driver.now = 107.0
    assert driver.resized("x", 40, stopped_s=0.041, built_s=6.5) == []
    assert job.settled and job.attempt == 2 and job.role is Role.PRIMARY and job.width == 6
    assert driver.machine.run.secondaries == []
    first, second = job.attempts
    assert (first.end_s, first.ended, first.to_step, first.stopped_s) == (107.0, Ended.RESIZED, 40, 0.041)
    assert (second.start_s, second.from_step, second.ready_s) == (107.0, 40, 107.0)
    assert second.gpus == (3, 4, 5, 0, 1, 2) and second.in_place and not first.in_place
    assert (job.suspensions, job.repeated, job.step, job.rate) == (0, 0, 40, None)
    assert whys(driver, "x")[-2:] == [Why.PROMOTED, Why.RESIZED_IN_PLACE]
    words = "resized in place from 3 to 6 GPUs at step 40; training stood still for 0.04 s"
    assert str(job.story[-1].reason) == words


def test_the_first_ranks_stay_when_it_shrinks_and_the_others_are_free_after_that():
    driver = shared()
    assert driver.job("b").current.gpus == (2, 3, 0, 1)
    (shrink,) = driver.submit(a_job("c", "wide", 1000))
    assert shrink.gpus == (2, 3)
    assert driver.states()[2] == "PENDING"
    (start,) = driver.resized("b", 20, stopped_s=0.02)
    assert (type(start), start.gpus) == (Launch, (0, 1))
    assert driver.job("b").gpus == (2, 3)
    assert str(driver.job("b").story[-1].reason).startswith("resized in place from 4 to 2 GPUs at step 20;")


def test_what_was_not_measured_is_not_told():
    driver = promoting()
    driver.resized("x", 40)
    assert str(driver.job("x").story[-1].reason) == "resized in place from 3 to 6 GPUs at step 40"


def test_a_program_that_cannot_be_resized_saves_and_starts_again():
    driver = Driver(a_job("other", "three"), a_job("x", "wide"), profiles=PROFILES, promote="always")
    driver.runs("other")
    driver.runs("x", in_place=False)
    assert kinds(driver.exits("other", 0)) == [Suspend]
    assert driver.job("x").target.gpus == (0, 1, 2, 3, 4, 5)


def test_a_job_whose_first_rank_has_to_move_saves_and_starts_again():
    jobs = [a_job("a", "three", gpus=1), a_job("y", "three", gpus=2), a_job("x", "wide")]
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=PROFILES, promote="always")
    driver.runs("a", "x", "y", in_place=True)
    assert driver.job("x").gpus == (1,)
    assert kinds(driver.exits("y", 0)) == [Suspend]
    assert driver.job("x").target.gpus == (2, 3)


def test_on_several_hosts_each_gives_its_share():
    jobs = [a_job("a", "three", gpus=1, nodes=2), a_job("x", "wide", nodes=2)]
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=PROFILES, promote="always")
    driver.runs("a", "x", in_place=True)
    assert driver.job("x").current.gpus == (1, 3)
    (resize,) = driver.exits("a", 0)
    assert (type(resize), resize.gpus) == (Resize, (1, 3, 0, 2))
    driver.resized("x", 5)
    assert driver.job("x").width == 2


def test_after_a_resize_the_attempt_that_is_over_has_no_say():
    driver = promoting()
    driver.resized("x", 40)
    stale = driver.machine.run.stale
    driver.tell(ev.ResizeFailed, "x", attempt=1, error="late")
    driver.tell(ev.WorkersResized, "x", attempt=1, step=50)
    assert driver.exits("x", 1, attempt=1) == []
    assert driver.machine.run.stale == stale + 3
    assert driver.job("x").settled and driver.job("x").attempt == 2
    driver.exits("x", 0, 1000, 1000)
    assert driver.states() == ["COMPLETED", "COMPLETED"]


def test_news_of_a_resize_that_nobody_asked_for_changes_nothing():
    driver = two()
    before = state_of(driver.machine)
    assert driver.resized("x", 40) == [] and driver.stays("x") == []
    after = state_of(driver.machine)
    assert {**after, "stale": 0} == {**before, "stale": 0}
    assert after["stale"] == before["stale"] + 2


def test_steps_reported_before_the_news_of_the_resize_are_the_new_stretchs():
    """The program goes on before we hear of it."""
    driver = promoting()
    driver.reports("x", 45)
    driver.resized("x", 40)
    job = driver.job("x")
    assert (job.attempts[0].to_step, job.current.from_step, job.step) == (40, 40, 45)
    driver.exits("x", 0, 1000, 1000)
    assert job.repeated == 0


def test_a_step_before_the_stretch_began_is_not_believed():
    driver = shared()
    driver.submit(a_job("c", "wide", 1000))
    driver.resized("b", 5)
    job = driver.job("b")
    assert [(a.from_step, a.to_step) for a in job.attempts] == [(0, 10), (10, 10), (10, None)]
    driver.exits("b", 0, 1000, 1000)
    assert (job.step, job.repeated) == (1000, 0)


def test_a_checkpoint_begun_before_the_resize_is_no_fall_back():
    driver = promoting()
    driver.resized("x", 40)
    driver.saves("x", 35)
    job = driver.job("x")
    assert Why.FELL_BACK not in whys(driver, "x")
    assert (job.saved_step, job.step, job.repeated, job.current.from_step) == (35, 40, 0, 40)
    driver.exits("x", 1, 44, 35)
    assert (job.repeated, job.step) == (9, 35)


def test_policies_leave_a_job_alone_that_is_being_resized():
    driver = promoting()
    seen = len(driver.actions)
    driver.reports("x", 35)
    driver.submit(a_job("y", "three", 10))
    driver.tell(ev.ProfilesLoaded, profiles=PROFILES)
    assert [type(a) for a in driver.actions[seen:]] == []
    driver = shared()
    driver.submit(a_job("c", "wide", 1000))
    assert driver.submit(a_job("d", "wide", 1000)) == []  # c and d wait until b has shrunk
    assert kinds(driver.resized("b", 20)) == [Launch, Launch]


def test_a_job_that_is_being_resized_teaches_nothing_of_its_rate():
    profiles = (THREE, a_profile("wide", [9, 18, 27, 36, 45, 54]))
    driver = promoting(profiles=profiles)
    driver.trains("x", 3.0, seconds=60.0)
    assert driver.machine.estimates.observed.seen == {}
    driver.resized("x", 200)
    driver.trains("x", 6.0, seconds=60.0)
    (seen,) = driver.machine.estimates.observed.seen.values()
    assert set(seen) == {6}


def test_a_job_that_is_being_promoted_is_not_promoted_again():
    """Though more GPUs than it is to get are free."""
    four = a_profile("four", [1, 2, 3, 4, 3.5, 3])
    driver = Driver(a_job("a", "three"), a_job("x", "four"), profiles=(THREE, four), promote="always")
    driver.runs("a", "x", in_place=True)
    (resize,) = driver.exits("a", 0)
    assert resize.gpus == (3, 4, 5, 0) and driver.machine.ledger.free == {1, 2}
    assert driver.tell(ev.ProfilesLoaded, profiles=PROFILES) == []
    (start,) = driver.submit(a_job("y", "three"))
    assert start.gpus == (1, 2)


def test_others_wait_for_gpus_that_a_shrinking_job_is_about_to_give_up():
    driver = shared()
    assert not coming(driver.machine.decisions.view())
    driver.submit(a_job("c", "wide", 1000))
    assert coming(driver.machine.decisions.view())
    driver.resized("b", 20)
    driver.exits("c", 0)
    assert driver.job("b").resizing and not coming(driver.machine.decisions.view()), "it grows"


def test_planners_count_a_job_as_what_it_becomes():
    driver = promoting()
    (work,) = Problem(driver.machine.decisions.view()).works
    assert (work.width, work.hosts, work.resizable, work.in_place) == (6, ("n1",), False, True)
    assert work.begin == work.busy_until == driver.now + 4.0 + DEFAULT_RESIZE_S
    driver.resized("x", 40)
    (work,) = Problem(driver.machine.decisions.view()).works
    assert (work.width, work.resizable, work.begin) == (6, True, driver.now)


def test_planners_count_on_what_a_shrinking_job_gives_up():
    driver = shared()
    driver.submit(a_job("c", "wide", 1000))
    problem = Problem(driver.machine.decisions.view())
    assert problem.works[0].width == 2
    assert problem.leaving == [(driver.now + DEFAULT_RESIZE_S, "n1", 2)]


def test_planners_count_on_all_of_a_job_that_leaves_while_it_is_resized():
    driver = promoting()
    driver.suspend("x")
    problem = Problem(driver.machine.decisions.view())
    assert problem.works == [] and problem.leaving == [(driver.now + 6.0, "n1", 6)]


# --- when it does not work ----------------------------------------------------------------------


def test_a_resize_that_fails_is_done_by_a_restart():
    driver = promoting()
    job = driver.job("x")
    (suspend,) = driver.stays("x")
    assert (type(suspend), suspend.quick) == (Suspend, True)
    assert str(job.story[-1].reason) == "could not be resized in place: no memory"
    assert not job.resizing and not job.in_place and job.gpus == (0, 1, 2, 3, 4, 5)
    (launch,) = driver.leaves("x", 44)
    assert (type(launch), launch.attempt, launch.gpus) == (Launch, 2, (0, 1, 2, 3, 4, 5))
    assert launch.role is Role.PRIMARY and launch.resume
    assert job.repeated == 0 and not job.current.in_place


def test_a_job_that_cannot_train_on_so_many_gpus_stays_as_it_is():
    driver = promoting()
    job = driver.job("x")
    for most in (5, 4):
        (resize,) = driver.stays("x", refused=True)
        assert (type(resize), len(resize.gpus)) == (Resize, most), "fewer may do, and to ask costs nothing"
    assert driver.stays("x", refused=True) == []
    assert (job.state, job.gpus, job.attempt, job.target) == (JobState.RUNNING, (3, 4, 5), 1, None)
    assert job.limits(6) == (1, 3)


def test_a_state_that_was_only_in_memory_is_gone_with_its_agent():
    driver = two()
    driver.reports("x", 40, rate=3.0)
    driver.tell(ev.SuspendRequested, "x")
    driver.exits("x", 75, step=40, saved=40, held=True)
    job = driver.job("x")
    assert "in memory" in str(job.story[-1].reason)
    assert (job.state, job.saved_step, job.repeated) == (JobState.SUSPENDED, 40, 0)
    driver.start_agent(6, {2: 25})
    assert (job.state, job.step, job.saved_step, job.repeated) == (JobState.SUSPENDED, 25, 25, 15)
    assert whys(driver, "x")[-1] is Why.FELL_BACK
    driver.start_agent(6, {2: 0})
    assert (job.step, job.saved_step, job.repeated) == (0, None, 40), "nothing is left to resume from"


def test_a_resize_that_takes_too_long_is_done_by_a_restart():
    driver = promoting()
    job = driver.job("x")
    assert driver.due("resize", "x") == 100.0 + MIN_RESIZE_LIMIT_S
    (suspend,) = driver.ring("resize", "x")
    assert (type(suspend), suspend.attempt) == (Suspend, 1)
    assert str(job.story[-1].reason) == "could not be resized in place: not done within 60 s"
    assert job.target.gpus == (3, 4, 5, 0, 1, 2) and job.resizing
    assert driver.ring("resize", "x") == []
    (launch,) = driver.leaves("x", 44)
    assert launch.gpus == (0, 1, 2, 3, 4, 5)


def test_a_resize_may_take_thrice_what_a_start_and_a_step_take():
    slow = a_profile("wide", {6: 0.1}, start_s=40.0, suspend_s=6.0)
    driver = promoting(profiles=(THREE, slow))
    assert driver.due("resize", "x") == pytest.approx(100.0 + 3 * (40.0 + 20.0))


def test_the_timer_of_a_resize_that_is_done_is_void():
    driver = promoting()
    driver.resized("x", 40)
    driver.now += 1000.0
    assert driver.tell(ev.TimerFired, key=("resize", 2, 1)) == []
    assert driver.tell(ev.TimerFired, key=("resize", 2, 2)) == []
    assert driver.job("x").settled


def test_one_that_leaves_while_it_is_resized_need_not_have_come_further():
    """Else code 75 without being asked, and without a new checkpoint, is a failure."""
    driver = promoting()
    (launch,) = driver.exits("x", 75, 0, 0)
    assert (type(launch), launch.gpus) == (Launch, (0, 1, 2, 3, 4, 5))
    assert driver.job("x").failures == 0
    driver.runs("x", in_place=True)
    driver.exits("x", 75, 0, 0)
    assert driver.job("x").failures == 1


@pytest.mark.parametrize("code", [75, 0, 1])
def test_an_attempt_that_ends_while_it_is_resized(code):
    driver = promoting()
    job = driver.job("x")
    actions = driver.exits("x", code, 44, 44 if code == 75 else None)
    if code == 75:  # it has saved and left unasked: it goes on where it was to go on
        assert [(type(a), a.gpus, a.resume) for a in actions] == [(Launch, (0, 1, 2, 3, 4, 5), True)]
        assert (job.step, job.repeated, job.failures) == (44, 0, 0)
    elif code == 0:
        assert driver.states() == ["COMPLETED", "COMPLETED"] and len(driver.machine.ledger.free) == 6
    else:
        assert kinds(actions) == [Launch] and job.failures == 1
    stale = driver.machine.run.stale
    driver.tell(ev.ResizeFailed, "x", attempt=1, error="late")
    driver.tell(ev.WorkersResized, "x", attempt=1, step=44)
    assert driver.machine.run.stale == stale + 2
    assert not job.resizing


def test_a_crash_in_the_middle():
    driver = promoting()
    driver.start_agent(6, {2: 25})
    job = driver.job("x")
    assert (job.attempt, job.current.from_step, job.repeated) == (2, 25, 5)
    assert not job.resizing and not job.in_place
    driver.tell(ev.WorkersResized, "x", attempt=1, step=44)
    assert job.attempt == 2


# --- when something else is wanted meanwhile ----------------------------------------------------


def lose_joining(driver):
    return driver.lose(1)


def lose_its_own(driver):
    return driver.lose(4)


def end_of_allocation(driver):
    driver.tell(ev.DeadlineMoved, deadline=driver.now + 100.0)
    driver.now += 65.0
    return driver.tell(ev.TimerFired, key=("drain", 0, 0))


OTHERWISE = {
    "suspend": (lambda driver: driver.suspend("x"), [Suspend]),
    "cancel": (lambda driver: driver.cancel("x"), [Terminate]),
    "drain": (lambda driver: driver.drain(), [Suspend]),
    "lose one that joins": (lose_joining, [Suspend]),
    "lose one of its own": (lose_its_own, [Terminate]),
    "overdue": (lambda driver: driver.ring("resize", "x"), [Suspend]),
}
ENDS = {
    "suspend": ["COMPLETED", "SUSPENDED"],
    "cancel": ["COMPLETED", "CANCELLED"],
    "drain": ["COMPLETED", "SUSPENDED"],
    "lose one that joins": ["COMPLETED", "STARTING"],
    "lose one of its own": ["COMPLETED", "STARTING"],
    "overdue": ["COMPLETED", "STARTING"],
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_else_is_wanted_is_done_at_once_and_the_lease_is_kept(what):
    driver = promoting()
    do, asked = OTHERWISE[what]
    assert kinds(do(driver)) == asked
    job = driver.job("x")
    assert job.resizing and job.gpus == (0, 1, 2, 3, 4, 5)
    assert (job.target is None) == (what != "overdue")
    driver.submit(a_job("y", "three", 10))
    assert driver.states()[2] == "PENDING", "ranks that were to join may live on all of them"


@pytest.mark.parametrize("answer", ["ended", "failed", "resized"])
@pytest.mark.parametrize("what", OTHERWISE)
def test_an_answer_that_crosses_with_what_else_is_wanted(what, answer):
    driver = promoting()
    do, asked = OTHERWISE[what]
    do(driver)
    job = driver.job("x")
    if answer == "failed":
        assert driver.stays("x") == []
        kept = (0, 1, 2, 3, 4, 5) if what == "overdue" else (3, 4, 5)
        assert job.gpus == kept and not job.resizing and job.attempt == 1
    elif answer == "resized":
        again = driver.resized("x", 40)
        assert kinds(again) == asked and [a.attempt for a in again] == [2]
        assert job.attempt == 2 and job.current.gpus == (3, 4, 5, 0, 1, 2) and not job.resizing
        assert job.timers.keys() == ({"grace"} if asked == [Suspend] else {"term"})
    code = 75 if asked == [Suspend] else 143
    driver.exits("x", code, 44, 44 if code == 75 else None)
    assert driver.states() == ENDS[what]
    assert job.attempts[-1].number == job.attempt
    if driver.states()[1] == "STARTING":
        assert set(job.gpus) == set(driver.machine.ledger.devices)
    else:
        assert len(driver.machine.ledger.free) == 6


def test_one_that_was_told_to_save_and_then_to_end_is_told_both_again():
    driver = promoting()
    driver.suspend("x")
    driver.ring("grace", "x")
    assert kinds(driver.resized("x", 40)) == [Suspend, Terminate]
    assert kinds(driver.ring("term", "x")) == [Kill]


def test_ranks_that_have_joined_on_a_lost_gpu():
    """It was lost just before they said that they are there: the job may still manage to save."""
    driver = promoting()
    driver.lose(1)
    assert kinds(driver.resized("x", 40)) == [Suspend]
    assert driver.job("x").wanted == "GPU 1 was lost"
    driver.exits("x", 1)
    assert driver.job("x").current.gpus == (0, 2, 3, 4, 5)


def test_gpus_of_a_failed_resize_go_to_others_when_the_job_is_to_leave():
    driver = promoting()
    driver.submit(a_job("y", "three", 10))
    driver.suspend("x")
    (start,) = driver.stays("x")
    assert (type(start), start.gpus) == (Launch, (0, 1, 2))


@pytest.mark.parametrize("order", list(permutations(["suspend", "cancel", "drain"])), ids="-".join)
@pytest.mark.parametrize("news", ["failed", "resized"])
@pytest.mark.parametrize("when", range(4))
def test_crossings_in_every_order(order, news, when):
    """Whatever comes first, the job ends cancelled with all GPUs free, and a replay says the same."""
    driver = promoting()
    wishes = [OTHERWISE[what][0] for what in order]
    wishes.insert(when, driver_resized if news == "resized" else lambda driver: driver.stays("x"))
    for wish in wishes:
        wish(driver)
    driver.exits("x", 143)
    assert driver.states() == ["COMPLETED", "CANCELLED"] and len(driver.machine.ledger.free) == 6
    again = Machine(make_policy)
    actions = [action for event in driver.events for action in again.handle(event)]
    assert actions == driver.actions and state_of(again) == state_of(driver.machine)


def driver_resized(driver):
    return driver.resized("x", 40)


# --- how quickly it has to leave ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "quick"),
    [
        pytest.param(lambda d: d.suspend("x"), True, id="the user"),
        pytest.param(lambda d: d.drain(), False, id="drain"),
        pytest.param(end_of_allocation, False, id="the allocation ends"),
    ],
)
def test_only_who_has_time_waits_until_its_save_is_durable(do, quick):
    driver = two(reserve_s=30.0)
    asked = [action for action in do(driver) if action.job_id == driver.job("x").id]
    assert [(type(a), a.quick) for a in asked] == [(Suspend, quick)]


def test_a_promotion_by_a_restart_is_quick():
    driver = Driver(a_job("other", "three"), a_job("x", "wide"), profiles=PROFILES, promote="always")
    driver.runs("other", "x")
    (suspend,) = driver.exits("other", 0)
    assert suspend.quick


# --- the journal --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rest", "new"),
    [
        (ev.WorkersReady, "", {"in_place": False, "took_s": None}),
        (ev.WorkersExited, ',"code":75', {"took_s": None}),
    ],
)
def test_events_of_earlier_journals_can_be_read(kind, rest, new):
    text = f'{{"at":1.0,"job_id":1,"attempt":1{rest}}}'
    event = msgspec.json.decode(text, type=kind)
    assert {name: getattr(event, name) for name in new} == new
