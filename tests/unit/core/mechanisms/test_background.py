"""Jobs in the background: where they run, what they must not do to others, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Pace, SetTimer, Suspend, Terminate
from hpcsched.core.mechanisms.background.lanes import PACES
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import ComputeMode, JobState, Kind, Progress, Role
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES
from hpcsched.policy.background import MEASURED_EVERY_S, SILENT_S, why_waiting
from hpcsched.testing.builders import Driver, Planned, a_job, a_profile, a_program, some_devices

PROFILES = (
    a_profile("front", [10.0, 20.0, 30.0, 40.0], start_s=5.0, suspend_s=5.0),
    a_profile("back", [10.0], start_s=5.0, suspend_s=5.0),
)
LIMIT = 0.05


def front(name="f", gpus=1, steps=100_000, **rest):
    return a_job(name, rest.pop("model", "front"), steps, gpus=gpus, **rest)


def back(name="b", **rest):
    return a_job(name, rest.pop("model", "back"), 100_000, gpus=1, background=True, **rest)


def trains(driver, name, seconds, speed):
    """The job is looked at every 10 s; `speed(shares)` is what it does beside guests at these paces."""
    job = driver.job(name)
    exact, until = float(job.step), driver.now + seconds
    actions = []
    while driver.now < until:
        shares = [guest.share for guest in driver.machine.mechanism(Background).lanes.beside(job)]
        exact += 10 * speed(shares)
        driver.now += 10
        at = driver.now - (exact - int(exact)) / speed(shares)
        news = Progress(job_id=job.id, attempt=job.attempt, step=int(exact), done_s=at)
        actions += driver.tell(ev.ProgressObserved, progress=(news,))
    return actions


def costing(share_of_speed, own=10.0):
    """A guest at full pace costs this share of the foreground's speed, a slower one less."""
    return lambda shares: own * (1 - share_of_speed * max(shares, default=0.0))


def but_timers(actions):
    return [type(action) for action in actions if not isinstance(action, SetTimer)]


def looked_at(run, name, *, step, seconds):
    """It says again and again that it has done this step, when it had; its lanes' timers ring."""
    job, at, until = run.job(name), run.now, run.now + seconds
    actions = []
    while run.now < until:
        run.now = min(run.now + 10, until)
        news = Progress(job_id=job.id, attempt=job.attempt, step=step, done_s=at)
        actions += run.tell(ev.ProgressObserved, progress=(news,))
    return actions


def paces(actions):
    return [action.share for action in actions if isinstance(action, Pace)]


def beside(gpus=1, driver=Driver, policy="marble", profiles=PROFILES, host=None, guest=None):
    """A foreground job and a background one on the same GPU, both running."""
    run = driver(gpus=gpus, profiles=profiles, policy=policy)
    run.submit(host or front(gpus=gpus))
    run.runs("f")
    run.submit(guest or back())
    assert run.job("b").state is JobState.STARTING
    run.runs("b")
    return run


# --- where they run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_background_job_runs_on_a_gpu_that_nobody_has(policy):
    run = Planned(gpus=2, profiles=PROFILES, policy=policy)
    (launch,) = run.submit(back())
    assert (launch.role, launch.gpus) == (Role.BACKGROUND, (1,))
    assert run.machine.ledger.free == {0, 1}
    assert run.job("b").story[-1].reason.why is Why.IDLE_GPU


@pytest.mark.parametrize("policy", POLICIES)
def test_beside_a_foreground_job_when_no_gpu_is_idle(policy):
    run = beside(driver=Planned, policy=policy)
    assert run.job("b").gpus == run.job("f").gpus == (0,)
    assert str(run.job("b").story[-1].reason) == "in the background of GPU 0, beside job 1 (f)"


def test_background_jobs_start_first_come_first_served_one_to_a_gpu():
    run = Driver(gpus=2, profiles=PROFILES)
    run.submit(back("x"), back("y"), back("z"))
    assert [run.job(name).gpus for name in "xyz"] == [(1,), (0,), ()]
    assert run.machine.waiting_reason(run.job("z")).why is Why.NO_LANE
    run.exits("y", 0, 100_000)
    assert run.job("z").gpus == (0,)


def test_a_foreground_job_that_tolerates_nothing_has_its_gpu_for_itself():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(front(max_foreground_slowdown=0.0), back())
    run.runs("f")
    assert run.job("b").state is JobState.PENDING
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [
        (0, "job 1 (f) shares no GPU")
    ]
    run.exits("f", 0, 100_000)
    assert run.job("b").gpus == (0,)


def test_beside_a_foreground_job_only_once_it_runs():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(front(), back())
    assert run.job("b").state is JobState.PENDING
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [
        (0, "job 1 (f) is STARTING")
    ]
    run.runs("f")
    assert run.job("b").state is JobState.STARTING


def test_without_a_profile_only_once_its_own_speed_has_been_measured():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(front(model="new"), back())
    run.runs("f")
    trains(run, "f", 30, costing(0.0))
    assert run.job("b").state is JobState.PENDING
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [
        (0, "what job 1 (f) does alone is not known yet")
    ]
    trains(run, "f", 10, costing(0.0))
    assert run.job("b").state is JobState.STARTING


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ({"front": 60.0, "back": 30.0}, None),
        ({"front": 80.0, "back": 30.0}, "GPU 0 has 100 MiB, they need 80 and 30"),
        ({"back": 30.0}, "how much memory front needs is not known (its profile has no memory_mib)"),
    ],
    ids=["room", "no room", "not known"],
)
def test_only_where_both_are_known_to_fit_into_the_gpus_memory(memory, why):
    profiles = [replace(p, memory_mib={1: memory[p.model]} if p.model in memory else None) for p in PROFILES]
    run = Driver(gpus=1, profiles=profiles)
    devices = tuple(replace(device, memory_mib=100.0) for device in run.machine.ledger.devices.values())
    run.tell(ev.AgentStarted, wall=1e9, devices=devices, policy="marble")
    run.submit(front(), back())
    run.runs("f")
    assert (run.job("b").state is JobState.STARTING) == (why is None)
    room = None if why else 100.0 - memory["front"]
    assert run.machine.ledger.room_mib(run.job("b")) == room
    assert run.machine.ledger.room_mib(run.job("f")) is None
    if why:
        assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [(0, why)]


def test_guests_join_a_foreground_job_one_after_the_other_as_far_as_there_is_room():
    run = Driver(gpus=2, profiles=PROFILES)
    run.submit(front(gpus=2), back("x"), back("y"))
    run.runs("f")
    assert [run.job(name).state for name in "xy"] == [JobState.STARTING, JobState.PENDING]
    trains(run, "f", 40, costing(0.01, own=20.0))
    assert run.job("y").state is JobState.STARTING
    full = Driver(gpus=2, profiles=PROFILES)
    full.submit(front(gpus=2), back("x"), back("y"))
    full.runs("f")
    trains(full, "f", 40, costing(0.03, own=20.0))
    assert full.job("y").state is JobState.PENDING


def test_nobody_joins_one_that_is_faster_than_alone_until_that_has_been_measured_again():
    """4 % are too much for one more; twice the speed would be room enough, were it not of another time."""
    run = Driver(gpus=2, profiles=PROFILES)
    run.submit(front(gpus=2), back("x"), back("y"))
    run.runs("f", "x")
    trains(run, "f", 120, costing(0.04, own=40.0))
    assert run.machine.mechanism(Background).lanes.speeds[1].own == pytest.approx(40.0)
    trains(run, "f", 80, costing(0.04, own=80.0))
    assert run.job("y").state is JobState.PENDING
    why = dict(why_waiting(run.machine.mechanism(Background).view(), run.job("y")))
    assert why[0] == "job 1 (f) is faster than alone: its own speed has to be measured again"


def test_one_for_which_there_is_no_time_is_told_nothing_of_a_gpu_that_it_could_have():
    run = Driver(gpus=2, profiles=PROFILES, deadline=75.0, reserve_s=60.0)
    run.submit(front(max_foreground_slowdown=0.0), back())
    assert run.machine.ledger.free == {1} and run.job("b").state is JobState.PENDING
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [
        (0, "job 1 (f) shares no GPU")
    ]
    assert run.machine.waiting_reason(run.job("b")).why is Why.WALLTIME_TOO_SHORT


def test_where_there_is_most_room_first():
    run = Driver(gpus=2, profiles=PROFILES)
    run.submit(front("f"), front("g", max_foreground_slowdown=0.2))
    run.runs("f", "g")
    run.submit(back())
    assert run.job("b").gpus == run.job("g").gpus


# --- the foreground comes first ---------------------------------------------------------------------


def test_a_foreground_job_is_launched_at_once_and_its_guest_stays():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(back())
    run.runs("b")
    (launch,) = run.submit(front())
    assert isinstance(launch, Launch)
    assert launch.gpus == (0,)
    assert run.job("b").state is JobState.RUNNING


def test_a_guest_that_is_not_tolerated_is_told_to_save_before_the_launch():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(back())
    run.runs("b")
    suspend, launch = run.submit(front(max_foreground_slowdown=0.0))
    assert isinstance(suspend, Suspend)
    assert suspend.quick
    assert (launch.job_id, launch.gpus) == (2, (0,))
    assert str(run.job("b").story[-1].reason) == "leaves GPU 0 to job 2 (f): job 2 (f) shares no GPU"
    run.leaves("b", 50)
    assert run.job("b").state is JobState.SUSPENDED
    (again,) = run.exits("f", 0, 100_000)
    assert (again.job_id, again.resume) == (1, True)


def test_a_guest_that_cannot_save_yet_is_told_to_end_and_that_is_no_failure_of_its():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(back(retries=0))
    end, _launch = run.submit(front(max_foreground_slowdown=0.0))
    assert isinstance(end, Terminate)
    run.exits("b", 143)
    assert run.job("b").state is JobState.PENDING
    assert run.job("b").failures == 0


def test_on_a_cpu_slot_a_guest_may_take_its_time_to_leave():
    run = Driver(gpus=1, profiles=PROFILES)
    slot = tuple(replace(device, kind="cpu") for device in run.machine.ledger.devices.values())
    run.tell(ev.AgentStarted, wall=1e9, devices=slot, policy="marble", grace_s=30.0)
    run.submit(back())
    run.runs("b")
    run.submit(front(max_foreground_slowdown=0.0))
    assert run.due("grace", "b") == run.now + 300.0


# --- how much they cost -----------------------------------------------------------------------------


def test_a_guest_that_costs_little_is_left_alone():
    run = beside()
    assert paces(trains(run, "f", MEASURED_EVERY_S - 60, costing(0.03))) == []


def test_a_guest_that_costs_too_much_goes_slower_until_it_does_not():
    """By the profile it is too slow at once: first what it does alone is measured, in a pause."""
    run = beside()
    assert paces(trains(run, "f", 300, costing(0.15))) == [0.0, 1.0, 0.5, 0.25]
    assert run.job("b").state is JobState.RUNNING
    words = "goes at 0.25 of its speed: it slows job 1 (f) down by 7.5%, of at most 5%"
    assert str(run.job("b").story[-1].reason) == words


def test_one_that_costs_too_much_at_any_pace_leaves_and_does_not_come_back():
    run = beside()
    actions = trains(run, "f", 600, costing(0.8))
    assert paces(actions) == [0.0, 1.0, 0.5, 0.25, 0.125, 0.0, 0.125]
    (suspend,) = [action for action in actions if isinstance(action, Suspend)]
    assert suspend.job_id == 2
    words = (
        "job 2 (b) slows job 1 (f) down by 10.0%, of at most 5% (9 instead of 10 steps/s, it at 0.125 of its "
        "own speed): they share no GPU any more"
    )
    for name in "fb":
        assert words in {str(note.reason) for note in run.job(name).story}
    run.leaves("b", 50)
    trains(run, "f", 300, costing(0.8))
    assert run.job("b").state is JobState.SUSPENDED
    run.exits("f", 0, 100_000)
    assert run.job("b").gpus == (0,)  # alone it may


def test_a_program_that_cannot_be_paced_leaves_at_once():
    run = beside(guest=back(kind=Kind.COMMAND))
    trains(run, "f", 40, costing(0.1))
    # Only its profile spoke against it: its own speed is measured now.
    assert run.job("b").state is JobState.SUSPENDING
    run.leaves("b", 50)
    actions = trains(run, "f", 40, costing(0.1))
    assert but_timers(actions) == [Launch]
    run.runs("b")
    actions = trains(run, "f", 40, costing(0.1))
    assert but_timers(actions) == [Suspend]
    assert ("front", "back") in run.machine.mechanism(Background).lanes.costly


def test_a_wrong_profile_costs_no_guest_its_place():
    """It promises 10 steps a second, and the job does 8, with the guest or without."""
    run = beside()
    assert paces(trains(run, "f", MEASURED_EVERY_S - 100, costing(0.01, own=8.0))) == [0.0, 1.0]
    assert run.job("b").state is JobState.RUNNING


def test_a_drift_of_the_foreground_is_not_taken_for_a_slowdown():
    """Its own speed is measured again before a guest has to leave for good, and every ten minutes anyway."""
    run = beside()
    trains(run, "f", 700, costing(0.02))
    drifted = trains(run, "f", 1500, costing(0.02, own=7.0))
    assert run.job("b").state is JobState.RUNNING
    assert not run.machine.mechanism(Background).lanes.costly
    assert paces(drifted)[-1] == 1.0


def test_a_foreground_that_is_faster_than_alone_was_measured_at_another_time():
    """No guest goes faster for that; what the foreground does alone is measured anew, once."""
    run = beside()
    trains(run, "f", 300, costing(0.15))
    assert run.machine.mechanism(Background).lanes.guests[2].pace == 0.25
    found = paces(trains(run, "f", 200, costing(0.15, own=30.0)))
    assert found[:2] == [0.0, 0.25]
    assert run.machine.mechanism(Background).lanes.speeds[1].own == pytest.approx(30.0, rel=0.02)
    assert max(found) == 0.25


def test_a_guest_goes_faster_again_when_it_costs_little():
    run = beside()
    trains(run, "f", 300, costing(0.15))
    faster = paces(trains(run, "f", 1600, costing(0.01)))
    assert [share for share in faster if share not in (0.0, 0.25)][:2] == [0.5, 1.0]


def test_alone_on_its_gpu_a_guest_has_its_whole_speed_again():
    run = beside()
    trains(run, "f", 300, costing(0.15))
    assert run.machine.mechanism(Background).lanes.guests[2].pace == 0.25
    assert paces(run.exits("f", 0, 100_000)) == [1.0]


def test_a_pause_does_not_last_for_ever():
    run = beside()
    trains(run, "f", 40, costing(0.15))
    assert run.machine.mechanism(Background).lanes.guests[2].paused_s is not None
    due = run.machine.mechanism(Background)._due
    run.now = due
    assert paces(run.tell(ev.TimerFired, key=("lanes", 0, 0))) == [1.0]


def test_a_job_that_tells_nothing_of_its_progress_is_not_shared_for_long():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(front(kind=Kind.COMMAND))
    run.runs("f")
    run.submit(back())
    run.runs("b")
    run.now += SILENT_S
    (suspend,) = run.tell(ev.TimerFired, key=("lanes", 0, 0))
    assert isinstance(suspend, Suspend)
    run.leaves("b", 50)
    assert run.job("b").state is JobState.SUSPENDED


@pytest.mark.parametrize("measured_s", [10, 100], ids=["too little for a speed", "its speed is known"])
def test_beside_a_job_that_stalls_a_guest_does_not_stay(measured_s):
    run = beside(host=front(kind=Kind.COMMAND))
    trains(run, "f", measured_s, costing(0.01))
    step = run.job("f").step
    assert but_timers(looked_at(run, "f", step=step, seconds=SILENT_S - 10)) == []
    assert run.machine.mechanism(Background)._due <= run.now + 20  # it does not take another event
    (suspend,) = [a for a in looked_at(run, "f", step=step, seconds=20) if isinstance(a, Suspend)]
    assert suspend.job_id == 2
    assert "it tells nothing of its progress" in str(run.job("b").story[-1].reason)
    run.leaves("b", 50)
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [
        (0, "job 1 (f) tells nothing of its progress")
    ]
    trains(run, "f", 20, costing(0.0))
    assert run.job("b").state is JobState.STARTING


def test_a_job_whose_steps_take_long_is_not_silent_between_them():
    slow = (a_profile("front", [0.004], start_s=5.0, suspend_s=5.0), PROFILES[1])
    run = beside(profiles=slow, host=front(kind=Kind.COMMAND))
    for step in range(1, 4):
        assert but_timers(looked_at(run, "f", step=step, seconds=250)) == []


def test_a_guest_beside_which_a_job_hardly_goes_on_leaves_for_its_speed_to_be_measured_and_then_for_good():
    run = beside(host=front(kind=Kind.COMMAND))

    def crawls():
        """A step every 200 seconds, of which no speed can be made."""
        actions = []
        for _ in range(2):
            actions += looked_at(run, "f", step=run.job("f").step + 1, seconds=200)
        return but_timers(actions)

    trains(run, "f", 10, costing(0.0))
    assert crawls() == [Suspend]
    assert str(run.job("b").story[-1].reason).endswith("it is far slower than alone")
    assert not run.machine.mechanism(Background).lanes.costly
    run.leaves("b", 50)
    trains(run, "f", 50, costing(0.0))
    assert run.job("b").state is JobState.STARTING
    run.runs("b")
    assert crawls() == [Suspend]
    assert ("front", "back") in run.machine.mechanism(Background).lanes.costly


def test_a_job_that_is_looked_at_too_seldom_for_a_speed_keeps_its_guest_if_it_goes_on_as_it_should():
    run = beside()
    for _ in range(3):
        run.now += 200
        news = Progress(job_id=1, attempt=1, step=run.job("f").step + 2000, done_s=run.now)
        assert but_timers(run.tell(ev.ProgressObserved, progress=(news,))) == []
    assert run.machine.mechanism(Background).lanes.speeds[1].contended is None
    assert run.job("b").state is JobState.RUNNING


def test_what_a_shared_job_does_teaches_nothing_of_its_model():
    run = beside()
    trains(run, "f", 20, costing(0.4))
    assert not run.machine.estimates.observed.seen
    trains(run, "f", 600, costing(0.01))
    seen = run.machine.estimates.observed.seen["front", 1, ""][1]
    assert all(abs(rate - 10.0) < 0.01 for rate in seen.rates)


# --- faults -----------------------------------------------------------------------------------------


def test_after_one_fault_beside_another_job_it_shares_no_gpu_any_more():
    run = beside()
    run.exits("b", 1)
    assert run.job("b").state is JobState.PENDING
    assert run.machine.mechanism(Background).lanes.quarantined[2].why is Why.QUARANTINED
    why = "after a fault beside another job it shares no GPU"
    assert list(why_waiting(run.machine.mechanism(Background).view(), run.job("b"))) == [(0, why)]
    run.exits("f", 0, 100_000)
    assert run.job("b").gpus == (0,)
    suspend, _ = (run.runs("b"), run.submit(front("g")))[1]
    assert isinstance(suspend, Suspend)


def test_a_guest_that_was_on_cpu_cores_before_is_put_in_quarantine_too():
    run = Driver(front(retries=0), a_program("b", 1.0), gpus=1, profiles=PROFILES, cores=(8,))
    run.runs("f")
    run.cancel("b")
    run.exits("b", 143)
    run.define(back(), again=["b"])
    assert [attempt.gpus for attempt in run.job("b").attempts] == [(), (0,)]
    run.exits("f", 1)
    assert run.machine.mechanism(Background).lanes.quarantined[2].why is Why.QUARANTINED


def test_a_failure_of_the_foreground_beside_a_guest_is_the_guests_and_counts_once():
    run = beside(host=front(retries=0))
    run.saves("f", 500)
    actions = run.exits("f", 1, 600, 500)
    # It goes on from its checkpoint at once, and the guest leaves.
    assert [type(action) for action in actions] == [Suspend, Launch]
    assert (run.job("f").step, run.job("f").failures) == (500, 0)
    assert any(note.reason.why is Why.EXCUSED for note in run.job("f").story)
    run.runs("f")
    run.exits("f", 1, 600, 500)
    assert run.job("f").state is JobState.FAILED


@pytest.mark.parametrize("gone", [False, True], ids=["is still there", "has left"])
@pytest.mark.parametrize("quarantined", [False, True], ids=["tolerated before", "quarantined before"])
def test_a_guest_that_had_to_leave_a_gpu_is_an_excuse_for_whom_it_left_it_to(gone, quarantined):
    run = Driver(gpus=1, profiles=PROFILES)
    if quarantined:
        run.submit(front("before"))
        run.runs("before")
    run.submit(back())
    run.runs("b")
    if quarantined:
        run.exits("b", 1)
        run.exits("before", 0, 100_000)
        run.runs("b")
    run.submit(front(retries=0, max_foreground_slowdown=0.0))
    assert run.job("b").state is JobState.SUSPENDING
    run.runs("f")
    if gone:
        run.leaves("b", 50)
    run.exits("f", 1)  # there was no memory left
    assert (run.job("f").state, run.job("f").failures) == (JobState.STARTING, 0)
    assert run.job("b").id in run.machine.mechanism(Background).lanes.quarantined
    run.runs("f")
    run.exits("f", 1)
    assert run.job("f").state is JobState.FAILED


def test_a_guest_that_has_left_is_an_excuse_for_the_attempt_that_it_was_beside_and_for_no_later_one():
    run = beside(host=front(retries=0))
    run.suspend("b")
    run.leaves("b", 10)
    run.saves("f", 500)
    run.exits("f", 1, 600, 500)
    assert (run.job("f").state, run.job("f").failures) == (JobState.STARTING, 0)
    other = beside(host=front(retries=0))
    other.suspend("b")
    other.leaves("b", 10)
    other.suspend("f")
    other.leaves("f", 10)
    other.resume("f")
    other.runs("f")
    other.exits("f", 1)
    assert other.job("f").state is JobState.FAILED
    assert not other.machine.mechanism(Background).lanes.quarantined


def test_a_fault_alone_is_an_ordinary_failure():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(back(retries=1))
    run.exits("b", 1)
    assert not run.machine.mechanism(Background).lanes.quarantined
    run.exits("b", 1)
    assert run.job("b").state is JobState.FAILED


# --- all else is as for other jobs ------------------------------------------------------------------


def test_cancel_hold_suspend_and_resume_work_as_for_others():
    run = beside()
    run.suspend("b")
    run.leaves("b", 10)
    assert run.machine.waiting_reason(run.job("b")).why is Why.USER_SUSPENDED
    run.resume("b")
    assert run.job("b").state is JobState.STARTING
    run.cancel("b")
    run.exits("b", 143)
    assert run.job("b").state is JobState.CANCELLED
    run.submit(back("c"), back("d"))
    run.hold("d")
    assert run.job("d").state is JobState.HELD
    run.release("d")
    run.exits("c", 0, 100_000)
    assert run.job("d").state is JobState.STARTING


def test_a_lost_gpu_takes_both_lanes_with_it():
    run = beside(gpus=1)
    run.lose(0)
    for name in "fb":
        run.exits(name, 143)
    assert [run.job(name).state for name in "fb"] == [JobState.PENDING] * 2
    assert run.machine.stuck


def test_drained_and_resumed_by_a_new_agent():
    run = beside()
    assert {type(action) for action in run.drain()} == {Suspend}
    run.leaves("f", 100)
    run.leaves("b", 50)
    assert run.machine.stopped
    run.start_agent(1)
    run.runs("f")
    assert run.job("b").state is JobState.STARTING
    assert run.job("b").step == 50


def test_a_run_is_over_when_its_background_jobs_are():
    run = beside()
    run.exits("f", 0, 100_000)
    assert not run.machine.run.finished
    run.exits("b", 0, 100_000)
    assert run.machine.run.finished


def test_the_background_saves_before_the_foreground_has_to():
    run = Driver(gpus=1, profiles=PROFILES, deadline=1000.0)
    run.submit(front())
    run.runs("f")
    run.submit(back())
    run.runs("b")
    begins = run.machine.deadline.at - run.machine.deadline.margin_s()
    run.now = run.machine.mechanism(Background)._due
    assert run.now == begins - 5.0
    (suspend,) = run.tell(ev.TimerFired, key=("lanes", 0, 0))
    assert suspend.job_id == 2
    run.leaves("b", 50)
    assert run.machine.waiting_reason(run.job("b")).why is Why.WALLTIME_TOO_SHORT


def test_a_foreground_job_may_wait_for_a_background_one():
    run = Driver(gpus=1, profiles=PROFILES)
    run.submit(back(), front(after=("b",)))
    run.exits("b", 0, 100_000)
    assert run.job("f").state is JobState.STARTING


def test_what_is_measured_of_a_background_job_says_nothing_of_its_model_in_the_foreground():
    run = Driver(gpus=2, profiles=())
    run.submit(back(model="same"))
    run.now = 500.0
    run.tell(ev.WorkersReady, "b", took_s=400.0)
    assert "same" not in run.machine.estimates.costs


def test_the_shares_go_down_by_halves():
    assert PACES == (1.0, 0.5, 0.25, 0.125)


@pytest.mark.parametrize(
    ("mode", "alone", "together"),
    [
        (ComputeMode.DEFAULT, {}, True),
        (ComputeMode.EXCLUSIVE_PROCESS, {}, True),
        (ComputeMode.EXCLUSIVE_PROCESS, {"kind": Kind.COMMAND, "command": ("x",)}, False),
        (ComputeMode.EXCLUSIVE_PROCESS, {"env": {"HPCSCHED_LANE_MODE": "process"}}, False),
        (ComputeMode.DEFAULT, {"env": {"HPCSCHED_LANE_MODE": "process"}}, True),
    ],
)
def test_on_a_gpu_that_lets_one_process_in_a_guest_must_be_in_it(mode, alone, together):
    run = Driver(gpus=1, profiles=PROFILES)
    run.start_agent(1, devices=[replace(some_devices(1)[0], compute_mode=mode)])
    run.submit(front(), replace(back(), **alone))
    run.runs("f")
    trains(run, "f", 400, lambda shares: 10.0)
    assert (run.job("b").state is not JobState.PENDING) == together
    if not together:
        view = run.machine.mechanism(Background).view()
        assert "EXCLUSIVE_PROCESS" in dict(why_waiting(view, run.job("b")))[0]
