"""Jobs that propose how many GPUs they are to have (JABAS, section 6.3): first come, first served."""

from __future__ import annotations

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Resize, Suspend
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.elastic.mechanism import MIN_REL_GAIN, Elastic, worthwhile
from hpcsched.core.model import JobState, Role
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Why
from hpcsched.testing.builders import Driver, Planned, a_job, a_profile

FLAT = {1: 1.0, 2: 1.02, 3: 1.03, 4: 1.0}
"""A small batch: one GPU does it."""
STEEP = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0}
"""A large one: the more the better."""


def proposes(driver: Driver, job: str, rates: dict[int, float], batch: float = 512.0) -> list[object]:
    return list(driver.tell(ev.ScalingProposed, job, rates=rates, batch=batch))


def alone(in_place: bool = True, **rest: object) -> Driver:
    """`x` runs on two GPUs of six, as its profile says, and nobody else is there."""
    profiles = [a_profile("x", {1: 1.0, 2: 1.5, 3: 1.2}, start_s=5.0, suspend_s=5.0)]
    driver = Driver(a_job("x", steps=100_000, **rest), gpus=6, profiles=profiles)
    driver.runs("x", in_place=in_place)
    assert driver.job("x").width == 2
    return driver


def with_time_left(left_s: float) -> Driver:
    """The same, for whom a change is a restart of 10 s, with so much left of the allocation to train in."""
    profiles = [a_profile("x", {1: 1.0, 2: 1.5, 3: 1.2}, start_s=5.0, suspend_s=5.0)]
    driver = Driver(a_job("x", steps=10**7), gpus=6, profiles=profiles, deadline=10_000.0, reserve_s=60.0)
    driver.runs("x")
    driver.now = 10_000.0 - 60.0 - 5.0 - left_s
    return driver


def whys(driver: Driver, job: str) -> list[Why]:
    return [note.reason.why for note in driver.job(job).story]


def test_a_job_whose_next_epoch_gains_by_more_gpus_gets_those_that_are_free() -> None:
    driver = alone()
    (resize,) = proposes(driver, "x", STEEP)
    assert isinstance(resize, Resize)
    assert resize.gpus == (0, 1, 2, 3, 4, 5)
    driver.resized("x", 500)
    assert driver.job("x").width == 6
    assert Why.SCALED_UP in whys(driver, "x")


def test_a_job_whose_next_epoch_gains_nothing_by_them_gives_gpus_up() -> None:
    driver = alone()
    (resize,) = proposes(driver, "x", FLAT)
    assert isinstance(resize, Resize)
    assert resize.gpus == (0,)
    assert whys(driver, "x")[-1] is Why.SCALED_DOWN


def test_a_job_that_cannot_be_resized_in_place_is_suspended_and_goes_on() -> None:
    driver = alone(in_place=False)
    (suspend,) = proposes(driver, "x", STEEP)
    assert isinstance(suspend, Suspend)
    (launch,) = driver.leaves("x", 500)
    assert isinstance(launch, Launch)
    assert len(launch.gpus) == 6


def test_what_a_job_proposes_keeps_to_its_limits() -> None:
    driver = alone(gpus=(2, 4))
    (resize,) = proposes(driver, "x", STEEP)
    assert isinstance(resize, Resize)
    assert len(resize.gpus) == 4
    driver.resized("x", 500)
    (resize,) = proposes(driver, "x", FLAT)
    assert isinstance(resize, Resize)
    assert len(resize.gpus) == 2


def test_nobody_grows_while_a_job_waits_that_could_start_instead() -> None:
    """One GPU is free and `x` has grown by two: `next` needs these three, and `y` does not get the one."""
    profiles = [a_profile(name, rates) for name, rates in (("x", [1.0, 1.5, 1.2]), ("y", [1.0, 0.9]))]
    driver = Driver(*(a_job(name, steps=100_000) for name in "xy"), gpus=6, profiles=profiles)
    driver.runs("x", "y", in_place=True)
    proposes(driver, "x", {1: 1.0, 2: 1.5, 4: 3.0})
    driver.resized("x", 500)
    assert (driver.job("x").width, driver.job("y").width) == (4, 1)
    driver.submit(a_job("next", steps=100, gpus=3))
    assert driver.job("x").resizing
    assert proposes(driver, "y", STEEP) == []


def test_who_has_grown_gives_that_back_when_another_job_comes() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    (resize,) = driver.submit(a_job("next", steps=100, gpus=2))
    assert isinstance(resize, Resize)
    assert resize.gpus == (0, 1)
    assert whys(driver, "x")[-1] is Why.GIVEN_BACK
    (launch,) = [action for action in driver.resized("x", 600) if isinstance(action, Launch)]
    assert launch.job_id == driver.job("next").id


def test_when_the_other_job_is_done_it_grows_again() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    driver.submit(a_job("next", steps=100, gpus=2))
    driver.resized("x", 600)
    driver.runs("next")
    # The two that are left over are not kept from `x` once nobody waits.
    driver.resized("x", 650)
    assert driver.job("x").width == 4
    (resize,) = driver.exits("next", 0)
    assert isinstance(resize, Resize)
    assert len(resize.gpus) == 6


def test_older_jobs_grow_first() -> None:
    profiles = [a_profile(name, {1: 1.0}, start_s=5.0, suspend_s=5.0) for name in ("x", "y")]
    specs = [a_job("x", steps=9999), a_job("y", steps=9999), a_job("short", steps=9, gpus=2)]
    driver = Driver(*specs, gpus=4, profiles=profiles)
    driver.runs("x", "y", "short", in_place=True)
    proposes(driver, "y", STEEP)
    proposes(driver, "x", STEEP)
    driver.exits("short", 0)
    driver.resized("x", 10)
    assert (driver.job("x").width, driver.job("y").width) == (3, 1)


def test_a_change_that_costs_more_than_is_left_to_gain_is_not_made() -> None:
    driver = alone(in_place=False)
    driver.reports("x", 99_999, rate=1.5)
    assert proposes(driver, "x", STEEP) == []


@pytest.mark.parametrize(
    ("left", "in_place", "grows"), [(25, False, False), (35, False, True), (25, True, True)]
)
def test_a_change_whose_gain_does_not_make_up_for_its_cost_is_not_made(
    left: int, in_place: bool, grows: bool
) -> None:
    """25 steps take 12.5 s as it is, and 4.2 s on six after 10 s for a restart; 35 take 17.5, and 5.8."""
    driver = alone(in_place)
    driver.reports("x", 100_000 - left, rate=2.0)
    assert bool(proposes(driver, "x", STEEP)) is grows


def test_in_the_last_seconds_of_an_allocation_a_restart_gets_it_no_farther() -> None:
    assert proposes(with_time_left(12.0), "x", STEEP) == []
    assert proposes(with_time_left(1000.0), "x", STEEP) != []


def test_a_job_that_starts_again_on_its_best_count_has_not_grown() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    driver.suspend("x")
    driver.leaves("x", 600)
    driver.resume("x")
    driver.runs("x", in_place=True)
    assert driver.job("x").width == 6
    assert driver.submit(a_job("next", steps=100, gpus=2)) == []


def told(driver: Driver, why: Why) -> list[dict[str, object]]:
    return [dict(note.reason.facts) for note in driver.job("x").story if note.reason.why is why]


def test_what_it_proposed_and_what_it_gained_is_told_once() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    proposes(driver, "x", STEEP)
    (said,) = told(driver, Why.PROPOSED)
    assert (said["old"], said["gpus"], said["batch"], said["rate"]) == (2, 6, 512.0, 6.0)
    (grown,) = told(driver, Why.SCALED_UP)
    assert (grown["old"], grown["gpus"], grown["gain"]) == (2, 6, 2.0)
    proposes(driver, "x", FLAT)
    assert [(each["old"], each["gpus"]) for each in told(driver, Why.PROPOSED)] == [(2, 6), (6, 1)]


def test_who_has_shrunk_since_gives_back_what_it_grew_by_after_that() -> None:
    driver = alone()
    for rates, width in ((STEEP, 6), (FLAT, 1), (STEEP, 6)):
        proposes(driver, "x", rates)
        driver.resized("x", 500)
        assert driver.job("x").width == width
    (resize,) = driver.submit(a_job("next", steps=100, gpus=5))
    assert isinstance(resize, Resize)
    assert resize.gpus == (0,)


def test_nobody_shrinks_when_there_is_no_time_left_to_do_it() -> None:
    assert proposes(with_time_left(8.0), "x", FLAT) == []
    assert proposes(with_time_left(30.0), "x", FLAT) != []


def test_what_a_job_proposed_is_forgotten_when_it_has_ended() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    driver.exits("x", 0)
    assert driver.machine.mechanism(Elastic).proposals.of == {}
    assert driver.machine.mechanism(Elastic).proposals.grown == {}


def test_what_a_job_expects_of_itself_is_no_measure_for_guests() -> None:
    driver = alone()
    x = driver.job("x")
    assert driver.machine.mechanism(Background).view().profile(x) is not None
    proposes(driver, "x", FLAT)
    assert driver.machine.mechanism(Background).view().profile(x) is None


def test_a_little_faster_is_not_worth_more_gpus() -> None:
    """For nobody: a policy that starts, promotes or plans by the curve comes to the same count."""
    curve = Profile(model="x", device="", throughput=worthwhile(FLAT))
    assert curve.optimal(4) == 1
    assert Profile(model="x", device="", throughput=worthwhile(STEEP)).optimal(6) == 6
    slow_rise = {count: 1.0 + 0.03 * count for count in range(1, 9)}
    assert Profile(model="x", device="", throughput=worthwhile(slow_rise)).optimal(8) == 7


@given(st.dictionaries(st.integers(1, 8), st.floats(0.1, 10.0), min_size=1))
def test_what_is_worthwhile_promises_no_more_and_hardly_less_than_was_said(rates: dict[int, float]) -> None:
    found = worthwhile(rates)
    assert found.keys() == rates.keys()
    for count, rate in rates.items():
        assert rate / (1 + MIN_REL_GAIN) - 1e-9 <= found[count] <= rate


@pytest.mark.parametrize("policy", ["marble", "planner"])
def test_a_job_settles_on_what_it_proposes(policy: str) -> None:
    """Not grown by one rule and shrunk by another, again and again."""
    profiles = [a_profile(name, [1.0, 1.9, 2.7], start_s=5.0, suspend_s=5.0) for name in ("x", "y")]
    driver = Planned(
        *(a_job(name, steps=100_000) for name in ("x", "y")), gpus=6, policy=policy, profiles=profiles
    )
    driver.runs("x", "y", in_place=True)
    proposes(driver, "x", {1: 1.0, 2: 2.0, 3: 2.04, 4: 2.08})
    for step in range(10):
        for job in ("x", "y"):
            if driver.job(job).resizing:
                driver.resized(job, 10 + step)
    assert not driver.job("x").resizing
    assert driver.job("x").width == 2
    assert len(driver.job("x").story) < 12


def test_with_a_deadline_it_grows_if_it_gets_farther_by_it() -> None:
    profiles = [a_profile("x", {1: 1.0, 2: 1.5, 3: 1.2}, start_s=5.0, suspend_s=5.0)]
    driver = Driver(a_job("x", steps=10_000_000), gpus=6, profiles=profiles, deadline=20_000.0)
    driver.runs("x", in_place=True)
    (resize,) = proposes(driver, "x", STEEP)
    assert isinstance(resize, Resize)


def test_nothing_is_given_back_for_a_job_that_could_not_start_by_it() -> None:
    profiles = [a_profile("x", {1: 1.0, 2: 0.9}, start_s=5.0, suspend_s=5.0)]
    driver = Driver(a_job("x", steps=100_000), gpus=6, profiles=profiles)
    driver.runs("x", in_place=True)
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    assert driver.submit(a_job("wide", steps=100, gpus=6)) == []
    assert driver.job("x").width == 6
    (resize,) = driver.submit(a_job("next", steps=100, gpus=5))
    assert isinstance(resize, Resize)
    assert len(resize.gpus) == 1


def test_a_secondary_that_grew_is_a_secondary_again_when_it_has_given_that_back() -> None:
    """So it keeps its right to be promoted before newer jobs start."""
    profiles = [a_profile("x", [1.0, 2.0, 3.0, 4.0], start_s=1.0, suspend_s=1.0)]
    others = [a_job("other", steps=100, gpus=2), a_job("short", steps=9, gpus=1)]
    driver = Driver(*others, a_job("x", steps=9999), gpus=6, profiles=profiles)
    driver.runs("other", "short", "x", in_place=True)
    assert (driver.job("x").width, driver.job("x").role) == (3, Role.SECONDARY)
    proposes(driver, "x", STEEP)
    driver.exits("short", 0)
    driver.resized("x", 10)
    assert (driver.job("x").width, driver.job("x").role) == (4, Role.SECONDARY)
    driver.submit(a_job("more", steps=100, gpus=1))
    driver.resized("x", 20)
    assert (driver.job("x").width, driver.job("x").role) == (3, Role.SECONDARY)
    assert driver.job("more").state is JobState.STARTING


def test_guests_beside_a_job_that_proposed_are_still_measured() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    driver.trains("x", 6.0)
    speed = driver.machine.mechanism(Background).lanes.speed(driver.job("x"))
    assert speed is not None
    assert driver.machine.estimates.observed.seen == {}, "what it does says nothing of its model"


def test_news_of_an_attempt_that_is_over_counts_for_nothing() -> None:
    driver = alone()
    assert driver.tell(ev.ScalingProposed, "x", attempt=7, rates=STEEP, batch=1.0) == []
    assert driver.machine.mechanism(Elastic).proposals.of == {}


def test_a_secondary_is_promoted_to_what_it_proposes() -> None:
    profiles = [a_profile("x", [1.0, 2.0, 3.0], start_s=1.0, suspend_s=1.0), a_profile("other", [1.0] * 6)]
    driver = Driver(a_job("other", steps=100, gpus=4), a_job("x", steps=9999), gpus=6, profiles=profiles)
    driver.runs("other", "x", in_place=True)
    assert driver.job("x").width == 2
    proposes(driver, "x", STEEP)
    (resize,) = driver.exits("other", 0)
    assert isinstance(resize, Resize)
    assert len(resize.gpus) == 6
    assert Why.PROMOTED in whys(driver, "x")


def test_the_planner_goes_by_what_a_job_proposes() -> None:
    profiles = [a_profile("x", {1: 1.0, 2: 1.5, 3: 1.2}, start_s=5.0, suspend_s=5.0, grow_s=0.1)]
    driver = Planned(a_job("x", steps=100_000), gpus=6, policy="planner", profiles=profiles)
    driver.runs("x", in_place=True)
    assert driver.counts() == {"x": 2}
    proposes(driver, "x", STEEP)
    assert driver.job("x").resizing
    driver.resized("x", 500)
    assert driver.counts() == {"x": 6}


def test_only_another_best_count_is_news_for_a_plan() -> None:
    driver = alone()
    before = driver.machine.run.news
    proposes(driver, "x", {1: 1.0, 2: 1.8, 3: 1.8})  # two GPUs are best, as its profile says
    assert driver.machine.run.news == before
    proposes(driver, "x", STEEP)
    assert driver.machine.run.news == before + 1


def test_proposals_are_facts_a_replay_knows_them() -> None:
    driver = alone()
    proposes(driver, "x", STEEP)
    driver.resized("x", 500)
    from hpcsched.core.machine import Machine
    from hpcsched.policy import make_policy

    other = Machine(make_policy)
    for event in driver.events:
        other.handle(event)
    assert other.mechanism(Elastic).proposals == driver.machine.mechanism(Elastic).proposals
    assert other.run.jobs[1].gpus == driver.job("x").gpus


@settings(max_examples=examples(60))
@given(st.data())
def test_whatever_jobs_propose_no_gpu_idles_while_a_job_that_fits_waits(data: st.DataObject) -> None:
    """MARBLE stays work-conserving, and nobody has less than the least he asked for."""
    specs = [a_job(f"j{i}", steps=10_000, gpus=(1, 4)) for i in range(3)]
    driver = Driver(*specs, gpus=4, profiles=[a_profile(s.name, [1.0, 1.4]) for s in specs])
    for number in range(data.draw(st.integers(1, 25))):
        active = [job for job in driver.machine.run.jobs.values() if job.state.active]
        what = data.draw(st.sampled_from(["ready", "propose", "resized", "stays", "exit", "submit"]))
        job = data.draw(st.sampled_from(active)) if active else None
        if what == "submit":
            driver.submit(a_job(f"n{number}", steps=100, gpus=data.draw(st.integers(1, 3))))
        elif job is None:
            continue
        elif what == "ready" and not job.ready:
            driver.runs(job.id, in_place=True)
        elif what == "propose" and job.ready:
            rates = data.draw(st.dictionaries(st.integers(1, 4), st.floats(0.5, 4.0), min_size=1))
            driver.tell(ev.ScalingProposed, job.id, rates=rates, batch=64.0)
        elif what == "resized" and job.resizing:
            driver.resized(job.id, job.step)
        elif what == "stays" and job.resizing:
            driver.stays(job.id)
        elif what == "exit" and job.ready:
            driver.exits(job.id, 0)
        waiting = [
            driver.machine.run.jobs[i]
            for i in driver.machine.own.queue.walk(driver.machine.ledger.free_by_host().fits)
        ]
        assert not waiting or any(other.resizing for other in driver.machine.run.active.values())
        for other in driver.machine.run.active.values():
            assert other.width >= other.spec.gpus_min


def test_who_gives_up_a_part_of_what_it_grew_by_still_gives_the_rest_back() -> None:
    driver = alone()
    for rates, width in ((STEEP, 6), ({**STEEP, 5: 1.0, 6: 1.0}, 4)):
        proposes(driver, "x", rates)
        driver.resized("x", 500)
        assert driver.job("x").width == width
    (resize,) = driver.submit(a_job("next", steps=100, gpus=4))
    assert isinstance(resize, Resize)
    assert resize.gpus == (0, 1)
