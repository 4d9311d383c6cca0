"""An agent takes over from one that is gone, while attempts of that still run, or may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcsched.cli.run.live import sentences
from hpcsched.cli.run.results import result_of
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, SetTimer, Suspend
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import Device, Ended, HostCores, JobState
from hpcsched.core.needs import Needs
from hpcsched.core.reasons import Why
from hpcsched.core.transitions.hosts import Joined
from hpcsched.report.idle import away_gpu_s, idle_of, most_gpus, there_gpu_s
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile, some_devices

MODEL = a_profile("m", [1.0, 2.0, 3.0, 4.0], start_s=10.0, suspend_s=5.0, resume_s=8.0)


@pytest.fixture
def driver() -> Driver:
    """Three jobs run on two hosts of two GPUs, one of them not ready to be suspended; a fourth waits."""
    jobs = [a_job(name, "m", 500, gpus=gpus) for name, gpus in (("a", 2), ("b", 1), ("c", 1), ("d", 2))]
    driver = Driver(*jobs, gpus=2, hosts=2, profiles=(MODEL,), cores=(7,))
    driver.runs("a", "b")
    driver.tell(ev.WorkersSpawned, "c", processes=((9, 9),), host="n2")
    driver.now = 50.0
    driver.reports("a", 40)
    driver.saves("a", 30)
    driver.reports("b", 25)
    driver.saves("b", 20)
    driver.now = 60.0
    return driver


def said(driver: Driver, job: str) -> list[Why]:
    return [note.reason.why for note in driver.job(job).story if note.at == driver.now]


def timers(driver: Driver, kind: str) -> list[SetTimer]:
    """The timers of this kind that were asked for by the newest event."""
    asked = (action for action in driver.actions if isinstance(action, SetTimer))
    return [
        one for one in asked if one.key[0] == kind and one.at == driver.now and one.cause == "AgentStarted"
    ]


def launched(actions: Any) -> dict[int, tuple[int, ...]]:
    return {action.job_id: action.gpus for action in actions if isinstance(action, Launch)}


# --- attempts that go on ------------------------------------------------------------------------


def test_an_adopted_attempt_goes_on_as_it_was(driver: Driver) -> None:
    assert driver.machine.adoptable() == (1, 2, 3)
    before = replace(driver.job("a").current)
    assert driver.take_over("a", "b", "c", hosts=2) == []
    for name, gpus in (("a", (0, 1)), ("b", (2,)), ("c", (3,))):
        job = driver.job(name)
        assert (job.state, job.attempt, job.gpus) == (JobState.RUNNING, 1, gpus)
        assert said(driver, name) == [Why.ADOPTED]
    a = driver.job("a")
    assert (a.current, a.step, a.saved_step, a.repeated) == (before, 40, 30, 0)
    assert a.settled and not driver.job("c").ready
    assert driver.job("c").processes == ((9, 9),) and driver.machine.run.spawned_on[3] == "n2"
    assert driver.machine.own.holder == {0: 1, 1: 1, 2: 2, 3: 3} and not driver.machine.ledger.free
    assert (driver.machine.run.epoch, len(driver.machine.run.lives)) == (1, 2)
    driver.tell(ev.WorkersReady, "c")
    assert driver.job("c").settled
    assert launched(driver.exits("a", 0, 500, 500)) == {4: (0, 1)}
    assert a.state is JobState.COMPLETED and [one.ended for one in a.attempts] == [Ended.COMPLETED]


def test_all_others_are_lost_and_get_what_is_free(driver: Driver) -> None:
    assert launched(driver.take_over("b", "c", hosts=2, saved={1: 30})) == {1: (0, 1)}
    a = driver.job("a")
    assert [one.ended for one in a.attempts] == [Ended.LOST, None]
    assert (a.repeated, a.step) == (10, 30)
    assert said(driver, "a")[0] is Why.LOST


def test_news_of_an_adopted_attempt_count_and_its_snapshot_too(driver: Driver) -> None:
    driver.take_over("a", "b", "c", hosts=2, seen_steps={1: 55, 2: 3}, saved={2: 1})
    assert (driver.job("a").step, driver.job("b").step, driver.job("b").saved_step) == (55, 25, 20)
    driver.reports("a", 70)
    driver.cancel("b")
    driver.exits("b", 143)
    assert driver.job("a").step == 70
    assert driver.job("b").state is JobState.CANCELLED


def test_what_is_under_way_cannot_be_adopted() -> None:
    jobs = (
        a_job("starts", "m", gpus=1),
        a_job("leaves", "m", gpus=1),
        a_job("resized", "m", 900, gpus=(1, 2)),
    )
    more = (a_job("held", "m", gpus=1), a_core_job("cores", 1.0))
    driver = Driver(*jobs, *more, gpus=5, profiles=(MODEL,), cores=(7, 8), promote="always")
    driver.runs("leaves", "held", "cores")
    driver.tell(ev.WorkersSpawned, "resized", processes=((1, 1),))
    driver.suspend("leaves")
    driver.suspend("resized")
    assert driver.job("resized").wanted == "suspend" and driver.job("leaves").state is JobState.SUSPENDING
    assert driver.machine.adoptable() == (driver.job("held").id,)
    driver.cancel("held")
    assert driver.machine.adoptable() == ()


def test_one_that_is_being_resized_can_be_adopted_when_it_has_been() -> None:
    jobs = (a_job("first", "m", 5, gpus=1), a_job("a", "m", 5000, gpus=(1, 2)))
    driver = Driver(*jobs, gpus=2, profiles=(MODEL,), promote="always")
    driver.runs("first", "a", in_place=True)
    driver.exits("first", 0, 5, 5)
    assert driver.job("a").resizing and driver.machine.adoptable() == ()
    driver.resized("a", 10)
    assert driver.machine.adoptable() == (2,)
    assert driver.take_over("a") == []
    assert (driver.job("a").attempt, driver.job("a").gpus, driver.job("a").in_place) == (2, (0, 1), True)


@pytest.mark.parametrize(
    ("started", "why"),
    [
        ({"adopted": (4,)}, "job 4 cannot be adopted"),
        ({"adopted": (9,)}, "job 9 cannot be adopted"),
        ({"adopted": (1,), "unsure": {1: 90.0}}, "job 1 cannot be adopted"),
        (
            {"adopted": (1, 2), "devices": some_devices(1, 2)},
            "job 1 cannot be adopted: GPU 1 is not there, or another",
        ),
        (
            {"adopted": (2,), "devices": some_devices(2)},
            "job 2 cannot be adopted: GPU 2 is not there, or another",
        ),
        ({"unsure": {9: 90.0}}, r"there are no jobs \[9\]"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    driver: Driver, started: dict[str, Any], why: str
) -> None:
    about = {"devices": some_devices(2, 2), "policy": "marble", "epoch": 2, **started}
    with pytest.raises(ValueError, match=why):
        driver.machine.handle(ev.AgentStarted(at=60.0, wall=0.0, **about))
    assert len(driver.machine.run.lives) == 1 and driver.machine.adoptable() == (1, 2, 3)


def test_timers_of_an_adopted_attempt_are_set_again() -> None:
    limited = a_job("a", "m", gpus=1, needs=Needs(time_s=1000.0))
    driver = Driver(limited, gpus=1, profiles=(MODEL,))
    driver.runs("a")
    driver.now = 400.0
    driver.take_over("a")
    (timer,) = timers(driver, "time")
    assert (timer.due, timer.key) == (1000.0, ("time", 1, 1))
    driver.now = 1200.0  # nobody was there in time
    driver.take_over("a")
    (timer,) = timers(driver, "time")
    assert timer.due == 1200.0
    driver.tell(ev.TimerFired, key=timer.key)
    assert driver.job("a").state is JobState.SUSPENDING


def test_a_gpu_of_an_adopted_job_may_be_lost_and_the_others_of_a_host_that_has_not_come(
    driver: Driver,
) -> None:
    driver.take_over("a", hosts=2, reads_inbox=True)
    for gpu in (2, 3):
        driver.tell(ev.DeviceLost, gpu=gpu, why="host n2 has not come")
    assert launched(driver.tell(ev.InboxRead)) == {}, "nothing is free on hosts that are there"
    assert driver.machine.own.holder == {0: 1, 1: 1}
    assert launched(driver.find(3)) == {2: (3,)}
    driver.lose(1)
    assert driver.job("a").wanted == "GPU 1 was lost"


def test_riders_of_an_adopted_job_are_lost() -> None:
    behind = a_job("behind", "m", gpus=1, background=True)
    driver = Driver(a_job("a", "m", gpus=1), behind, gpus=1, profiles=(MODEL,))
    driver.runs("a", "behind")
    assert driver.job("behind").gpus == (0,)
    assert driver.machine.adoptable() == (1,)
    assert launched(driver.take_over("a")) == {2: (0,)}, "it begins beside it once more"
    assert [one.ended for one in driver.job("behind").attempts] == [Ended.LOST, None]
    assert driver.machine.mechanism(Background).lanes.holder == {0: 2}


def test_who_shares_the_gpu_of_an_adopted_job_is_lost() -> None:
    parts = [a_job(name, "m", 5000, gpus=1, needs=Needs(share=0.5)) for name in "ab"]
    driver = Driver(*parts, gpus=1, profiles=(replace(a_profile("m", [1.0]), busy={1: 0.2}),))
    driver.runs("a", "b")
    assert driver.job("b").gpus == (0,) and driver.machine.mechanism(Sharing).shares.gpu_of == {2: 0}
    assert driver.machine.adoptable() == (1,)
    driver.take_over("a")
    assert driver.job("a").attempt == 1 and driver.job("b").attempts[0].ended is Ended.LOST
    driver.exits("a", 0)
    assert driver.job("a").state is JobState.COMPLETED


def test_an_heir_holds_its_gpu_as_any_other_and_can_be_adopted() -> None:
    parts = [a_job(name, "m", 5000, gpus=1, needs=Needs(share=0.5)) for name in "ab"]
    driver = Driver(*parts, gpus=1, profiles=(replace(a_profile("m", [1.0]), busy={1: 0.2}),))
    driver.runs("a", "b")
    driver.exits("a", 0)
    assert driver.machine.adoptable() == (2,)
    assert driver.take_over("b") == []
    assert driver.machine.own.holder == {0: 2}


def test_an_allocation_that_ends_has_adopted_jobs_save(driver: Driver) -> None:
    driver.take_over("a", "b", hosts=2, deadline=300.0)
    driver.now = 230.0
    leave = driver.tell(ev.TimerFired, key=("drain", 0, 0))
    assert {1, 2} <= {action.job_id for action in leave if isinstance(action, Suspend)}


# --- jobs whose processes may live ---------------------------------------------------------------


def test_an_unsure_job_waits_for_its_time(driver: Driver) -> None:
    driver.take_over("a", "c", unsure={2: 100.0}, saved={2: 20}, hosts=2)
    b = driver.job("b")
    assert [one.ended for one in b.attempts] == [Ended.LOST] and b.step == 20
    assert said(driver, "b") == [Why.LOST, Why.HOST_SILENT]
    reason = driver.machine.waiting_reason(b)
    assert reason is not None and str(reason) == (
        "starts not before 100 s into the run: processes of its last attempt may live until then, on a host "
        "that has not been heard of"
    )
    (timer,) = timers(driver, "arrival")
    assert (timer.due, timer.key[1]) == (100.0, 2)
    driver.now = 99.0
    assert launched(driver.exits("a", 0, 500, 500)) == {4: (0, 1)}
    assert not driver.machine.stuck and b.state is JobState.SUSPENDED
    driver.now = 100.0
    assert launched(driver.tell(ev.TimerFired, key=timer.key)) == {2: (2,)}


def test_it_waits_over_the_next_lives_too_until_another_time_is_told(driver: Driver) -> None:
    driver.take_over("a", "c", unsure={2: 100.0}, hosts=2)
    driver.now = 70.0
    assert launched(driver.take_over("a", "c", hosts=2)) == {}
    assert [one.due for one in timers(driver, "arrival")] == [100.0]
    assert launched(driver.take_over("a", "c", unsure={2: 70.0}, hosts=2)) == {2: (2,)}


def test_the_user_cancels_holds_and_releases_it_as_any_that_waits(driver: Driver) -> None:
    driver.cancel("d")
    driver.take_over("a", unsure={2: 100.0, 3: 100.0}, hosts=2)
    driver.cancel("b")
    driver.hold("c")
    assert (driver.job("b").state, driver.job("c").state) == (JobState.CANCELLED, JobState.HELD)
    driver.now = 80.0
    assert launched(driver.release("c")) == {}
    assert launched(driver.retry("b")) == {}, "whatever became of the job, its processes may live"
    driver.now = 100.0
    assert launched(driver.tell(ev.TimerFired, key=("arrival", 3, 1))).keys() == {2, 3}


def test_one_that_was_cancelled_before_waits_when_it_is_to_run_again(driver: Driver) -> None:
    driver.cancel("b")
    driver.take_over("a", "c", unsure={2: 100.0}, hosts=2)
    assert driver.job("b").state is JobState.CANCELLED
    assert launched(driver.retry("b")) == {}
    driver.now = 100.0
    assert launched(driver.tell(ev.TimerFired, key=("arrival", 2, 1))) == {2: (2,)}


def test_what_has_no_room_is_tried_at_once_and_what_is_unsure_is_not(driver: Driver) -> None:
    driver.exits("b", 1, no_room="/full")
    driver.take_over("a", unsure={3: 500.0}, hosts=2)
    assert driver.job("b").state is JobState.STARTING
    assert driver.machine.waiting.delays.keys() == {3}


# --- hosts, and what reports count ---------------------------------------------------------------


def joins(driver: Driver, end: float | None = None) -> None:
    devices = tuple(Device(index=2 + i, host="far", kind="test", handle=str(i)) for i in range(2))
    driver.tell(ev.HostsJoined, devices=devices, ends={"far": end} if end else {})


def test_gpu_time_counts_once_over_the_lives_of_an_attempt() -> None:
    driver = Driver(a_job("a", "m", gpus=1), a_job("b", "m", gpus=1), gpus=2, profiles=(MODEL,))
    driver.runs("a", "b")
    for driver.now, jobs in ((3600.0, "ab"), (7200.0, "a"), (7200.0, "ab")):
        driver.take_over(*jobs)
        driver.runs("b")
    driver.now = 9000.0
    driver.exits("b", 0)
    driver.now = 10_800.0
    driver.exits("a", 0)
    idle, result = idle_of(driver.machine), result_of(driver.machine)
    assert idle.gpu_hours == pytest.approx(0.5)
    assert result.gpu_hours == pytest.approx(5.5)
    assert there_gpu_s(driver.machine, 10_800.0) == {"n1": pytest.approx(2 * 10_800)}
    assert result.gpus == 2 and result.utilisation == pytest.approx(5.5 / 6)


def test_a_host_that_had_joined_goes_on_and_leaves_as_one_that_joined() -> None:
    driver = Driver(a_job("a", "m", gpus=2), a_job("b", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    driver.now = 3600.0
    joins(driver, end=20_000.0)
    driver.runs("b")
    driver.now = 7200.0
    driver.take_over("a", "b")
    assert driver.machine.hosts.guests == [Joined("far", (2, 3), 3600.0)]
    assert driver.machine.hosts.end_of("far") is None, "it is told again"
    driver.tell(ev.HostEndMoved, host="far", end=20_000.0)
    driver.now = 9000.0
    driver.exits("b", 0)
    driver.now = driver.machine.hosts.end_of("far") or 0.0
    driver.tell(ev.TimerFired, key=("hosts", 0, 0))
    driver.tell(ev.HostsReleased, hosts=("far",))
    assert driver.machine.hosts.joined == [Joined("far", (2, 3), 3600.0, left=20_000.0)]
    assert driver.machine.hosts.given_back == [] and away_gpu_s(driver.machine, 30_000.0) == 0.0
    driver.now = 30_000.0
    driver.exits("a", 0)
    idle = idle_of(driver.machine)
    assert idle.hosts["far"].gpu_hours == pytest.approx(2 * (20_000 - 9000) / 3600)
    assert idle.hosts["n1"].gpu_hours == 0.0
    assert most_gpus(driver.machine) == 4


def test_a_host_of_cores_alone_that_had_joined_is_told_its_end_again() -> None:
    driver = Driver(a_job("a", "m", gpus=2), gpus=2, profiles=(MODEL,), cores=(7,))
    driver.runs("a")
    own, far = HostCores(host="n1", own=(7,)), HostCores(host="far", own=(1, 2))
    driver.tell(ev.HostsJoined, devices=(), cores=(far,), ends={"far": 9000.0})
    started = {"devices": some_devices(2), "policy": "marble", "cores": (own, far), "adopted": (1,)}
    driver.handle(ev.AgentStarted(at=50.0, wall=50.0, epoch=1, rules=ev.RULES, **started))
    driver.tell(ev.HostEndMoved, host="far", end=9000.0)
    assert [one.host for one in driver.machine.hosts.guests] == ["far"]
    assert driver.machine.hosts.end_of("far") == 9000.0


def test_a_host_that_has_not_come_is_no_guest_any_more() -> None:
    driver = Driver(a_job("a", "m", gpus=2), gpus=2, profiles=(MODEL,))
    driver.runs("a")
    joins(driver)
    driver.start_agent(2, adopted=(1,), epoch=2)
    assert driver.machine.hosts.guests == [] and driver.job("a").attempt == 1
    driver.now = 100.0
    joins(driver)
    assert driver.machine.hosts.guests == [Joined("far", (2, 3), 100.0)]


def test_the_policy_is_asked_again_at_a_time_that_it_had_told_the_earlier_agent() -> None:
    jobs = [a_job(f"j{i}", "m", 5000, gpus=(1, 2)) for i in range(2)]
    driver = Driver(*jobs, gpus=2, profiles=(MODEL,), policy="optimus")
    driver.tell(ev.PlanMade, plan=driver.machine.make_plan())
    driver.runs("j0", "j1")

    def looks() -> list[float]:
        asked = (one for one in driver.actions if isinstance(one, SetTimer) and one.key == ("look", 0, 0))
        return [one.due for one in asked]

    first = looks()
    assert first, "it looks again now and then"
    driver.take_over("j0", "j1")
    driver.tell(ev.PlanMade, plan=driver.machine.make_plan())
    assert looks() == [*first, first[-1]], "the plan made anew lasts as long"


def test_what_becomes_of_each_attempt_is_said(driver: Driver) -> None:
    driver.take_over("a", unsure={2: 100.0}, hosts=2)
    lines = sentences(driver.machine, driver.events[-1], [])
    assert lines == [
        "job 1 (a): attempt 1 goes on under another agent",
        "job 2 (b): attempt 1 was lost (the agent was gone, and its host has not been heard of); goes on "
        "from step 20; at least 5 steps done again",
        "job 2 (b): starts not before 100 s into the run: processes of its last attempt may live until then, "
        "on a host that has not been heard of",
        "job 3 (c): attempt 1 was lost (the agent was gone); goes on from step 0",
    ]
