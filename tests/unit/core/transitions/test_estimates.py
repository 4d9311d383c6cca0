"""What starting, saving and changing in place is taken to cost: what was measured in the run comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcsched.cli.run.archive import _learnt
from hpcsched.cli.run.results import overhead_s
from hpcsched.contract.exits import SUSPENDED
from hpcsched.core import events as ev
from hpcsched.core.jobs import MOST_MEASURED, MeasuredCost
from hpcsched.core.model import Kind
from hpcsched.core.transitions.estimates import DEFAULT_RESIZE_S, DEFAULT_START_S, DEFAULT_SUSPEND_S
from hpcsched.planning.jobs.costs import lost_s
from hpcsched.sim.past_run import past_of
from hpcsched.testing.builders import Driver, a_job, a_profile

PROFILE = a_profile("m", [1, 2, 3, 4], start_s=20.0, suspend_s=6.0, resume_s=15.0, grow_s=2.0, shrink_s=1.0)
BARE = a_profile("m", [1, 2, 3, 4], start_s=None, suspend_s=None)


def one(profile=PROFILE, **rest):
    """A job of the model on two GPUs of four."""
    profiles = [profile] if profile else []
    return Driver(a_job("x", "m", 1000, gpus=(1, 2)), gpus=4, profiles=profiles, **rest)


def starts(driver, took_s, after_s=7.0, **rest):
    """It becomes ready, by our clock and as measured."""
    driver.now += after_s
    driver.tell(ev.WorkersSpawned, "x", processes=())
    driver.tell(ev.WorkersReady, "x", took_s=took_s, **rest)


def leaves(driver, took_s, after_s=3.0):
    driver.now += after_s
    driver.exits("x", SUSPENDED, 10, 10, took_s=took_s)


def suspends(driver, took_s, **rest):
    driver.suspend("x")
    leaves(driver, took_s, **rest)
    driver.resume("x")


def passes(driver, seconds):
    driver.now += seconds
    driver.tell(ev.TimerFired, key=("look", 0, 0))


def view(driver):
    return driver.machine.decisions.view()


# --- the figures --------------------------------------------------------------------------------


def test_the_newest_values_count_by_their_median():
    costs = MeasuredCost()
    assert costs.median is None
    for value in [100.0, None, 1.0, 3.0]:
        costs.add(value)
    assert costs.median == 3.0
    for _ in range(MOST_MEASURED - 1):
        costs.add(5.0)
    assert costs.values == (3.0, *[5.0] * 8) and costs.median == 5.0


@pytest.mark.parametrize(
    ("profile", "took_s", "cost_s"),
    [
        pytest.param(PROFILE, 0.8, 0.8, id="measured, though a profile has it"),
        pytest.param(PROFILE, None, 15.0, id="by the profile"),
        pytest.param(BARE, 0.8, 0.8, id="measured"),
        pytest.param(BARE, None, 7.0, id="as last seen"),
        pytest.param(None, None, 7.0, id="as last seen, without a profile"),
    ],
)
def test_a_start(profile, took_s, cost_s):
    driver = one(profile)
    known = 15.0 if profile is PROFILE else DEFAULT_START_S
    assert view(driver).launch_s(driver.job("x"), 2, first=False) == known
    starts(driver, took_s)
    assert view(driver).launch_s(driver.job("x"), 2, first=False) == cost_s


@pytest.mark.parametrize(
    ("profile", "took_s", "cost_s"),
    [
        pytest.param(PROFILE, 0.05, 0.05, id="measured, though a profile has it"),
        pytest.param(PROFILE, None, 6.0, id="by the profile"),
        pytest.param(BARE, 0.05, 0.05, id="measured"),
        pytest.param(BARE, None, 3.0, id="as last seen"),
    ],
)
def test_a_save(profile, took_s, cost_s):
    driver = one(profile)
    starts(driver, None)
    known = 6.0 if profile is PROFILE else DEFAULT_SUSPEND_S
    assert view(driver).save_s(driver.job("x")) == known
    suspends(driver, took_s)
    assert view(driver).save_s(driver.job("x")) == cost_s


@pytest.mark.parametrize("profile", [PROFILE, BARE])
def test_a_quick_save_does_not_make_the_end_of_the_allocation_later(profile):
    """What drains has to be durable: the quick ones say nothing of that."""
    driver = one(profile, deadline=10_000.0)
    starts(driver, 1.0)
    before = driver.machine.deadline.margin_s()
    suspends(driver, 0.05, after_s=0.1)
    starts(driver, 1.0)
    assert driver.machine.deadline.margin_s() == before
    suspends(driver, 9.0, after_s=9.0)  # not so quick: it may be what a durable one takes
    starts(driver, 1.0)
    assert driver.machine.deadline.margin_s() == 60.0 + 9.0


def test_no_time_is_kept_for_saves_of_programs_that_nothing_says_can_save():
    programs = [a_job(name, kind=Kind.COMMAND, command=("x",), gpus=1) for name in "ab"]
    driver = Driver(*programs, gpus=2, deadline=10_000.0)
    for name in "ab":
        driver.tell(ev.WorkersSpawned, name, processes=(), host="n1")
    assert driver.machine.deadline.margin_s() == 60.0
    driver.tell(ev.WorkersReady, "a")
    assert driver.machine.deadline.margin_s() == 60.0 + DEFAULT_SUSPEND_S


def test_a_durable_save_says_how_long_the_next_takes_and_nothing_of_quick_ones():
    driver = one()
    starts(driver, 1.0)
    driver.drain()
    leaves(driver, 2.0, after_s=2.0)
    driver.start_agent(4)
    starts(driver, 1.0)
    assert driver.machine.deadline.margin_s() == 60.0 + 2.0  # measured, where the profile says 6
    assert view(driver).save_s(driver.job("x")) == 6.0
    suspends(driver, 0.05, after_s=0.1)
    assert view(driver).save_s(driver.job("x")) == 0.05
    assert driver.machine.deadline.margin_s() == 60.0 + 2.0


def test_how_long_it_is_still_starting():
    driver = one()
    passes(driver, 4.0)
    assert view(driver).start_left_s(driver.job("x")) == 16.0
    starts(driver, None, after_s=1.0)
    assert view(driver).start_left_s(driver.job("x")) == 15.0  # a stand-in is ready before it has started
    suspends(driver, None)
    starts(driver, 2.0, after_s=2.0)
    assert view(driver).start_left_s(driver.job("x")) == 0.0  # it is ready, and that was measured
    suspends(driver, None)
    passes(driver, 0.5)
    assert view(driver).start_left_s(driver.job("x")) == 1.5


# --- changes in place ---------------------------------------------------------------------------


def grown(profile=PROFILE, **measured):
    """`b`, which ran on two GPUs, has grown to all four in place."""
    jobs = [a_job("a", "other", gpus=2), a_job("b", "m", 1000)]
    driver = Driver(*jobs, gpus=4, profiles=[profile] if profile else [], promote="always")
    driver.runs("a", "b", in_place=True)
    driver.reports("b", 10, rate=2.0)
    driver.exits("a", 0)
    assert driver.job("b").resizing
    driver.now += 4.0
    driver.resized("b", 12, **measured)
    return driver


@pytest.mark.parametrize(
    ("profile", "stopped_s", "cost_s"),
    [
        pytest.param(PROFILE, None, 2.0, id="by the profile"),
        pytest.param(PROFILE, 0.04, 0.04, id="measured, though a profile has it"),
        pytest.param(BARE, None, DEFAULT_RESIZE_S, id="unknown"),
    ],
)
def test_growing(profile, stopped_s, cost_s):
    driver = grown(profile, stopped_s=stopped_s)
    seen, job = view(driver), driver.job("b")
    assert seen.stand_s(job, 2, 4) == cost_s
    assert job.attempts[0].stopped_s == cost_s
    assert job.attempts[1].stopped_s is None
    assert seen.start_left_s(job) == 0.0
    assert overhead_s(driver.machine, job, job.attempts[1]) == 0.0


def test_shrinking_is_another_cost_than_growing():
    driver = grown(stopped_s=0.04, built_s=3.0)
    assert view(driver).stand_s(driver.job("b"), 4, 2) == 1.0
    assert view(driver).switch_s(driver.job("b"), 2) == 1.0


def test_a_change_in_place_costs_no_start_and_no_save():
    driver = grown(stopped_s=0.04, built_s=3.0)
    seen, job = view(driver), driver.job("b")
    assert seen.switch_s(job, 2, ("n1",)) == 1.0
    assert seen.switch_s(job, 2, ("n2",)) == 6.0 + 15.0, "its first rank would have to move"
    assert seen.switch_s(job, 4) == 6.0 + 15.0, "it would be suspended to come back"
    assert not seen.in_place(job, 4, None) and seen.in_place(job, 2, None)
    job.in_place = False
    assert seen.switch_s(job, 2) == 6.0 + 15.0


def test_while_ranks_start_the_others_go_on():
    """What that costs is the difference; the time they take is measured where ranks joined."""
    driver = grown(stopped_s=0.04, built_s=3.0)
    seen, job = view(driver), driver.job("b")
    assert seen.built_s(job, 4) == 3.0
    job.attempts[-1].gpus = (2, 3)
    assert lost_s(seen, job, 4, ("n1",), 100.0, 40.0) == pytest.approx(0.04 + 3.0 * 0.6)
    assert lost_s(seen, job, 1, ("n1",), 40.0, 100.0) == 1.0
    assert lost_s(seen, job, 4, ("n2",), 100.0, 40.0) == 6.0 + 15.0
    assert lost_s(seen, job, 4, None, 0.0, 0.0) == 0.04


def test_the_time_of_a_shrink_says_nothing_of_starting_ranks():
    driver = Driver(a_job("b", "m", 1000), gpus=4, policy="equal", resize="always", profiles=[PROFILE])
    driver.runs("b", in_place=True)
    driver.submit(a_job("a", "m", 1000))
    driver.resized("b", 5, stopped_s=0.02, built_s=33.0)
    seen, job = view(driver), driver.job("b")
    assert seen.built_s(job, 4) == 15.0
    assert (seen.stand_s(job, 4, 2), seen.stand_s(job, 2, 4)) == (0.02, 2.0)


def test_how_long_a_change_under_way_still_takes():
    jobs = [a_job("a", "other", gpus=2), a_job("b", "m", 1000)]
    driver = Driver(*jobs, gpus=4, profiles=[PROFILE], promote="always")
    driver.runs("a", "b", in_place=True)
    assert view(driver).resize_left_s(driver.job("b")) == 0.0
    driver.exits("a", 0)
    passes(driver, 5.0)
    assert view(driver).resize_left_s(driver.job("b")) == 15.0 + 2.0 - 5.0
    passes(driver, 50.0)
    assert view(driver).resize_left_s(driver.job("b")) == 0.0


def test_the_overhead_of_a_start_is_what_was_measured():
    driver = one()
    starts(driver, 0.8)
    job = driver.job("x")
    passes(driver, 100.0)
    assert overhead_s(driver.machine, job, job.current) == 0.8
    suspends(driver, None)
    starts(driver, None)
    passes(driver, 100.0)
    assert overhead_s(driver.machine, job, job.current) == 15.0


# --- what is kept -------------------------------------------------------------------------------


def taught(profile=None, **costs):
    """A run that has seen the model do 2 steps a second on each of two GPUs, and these costs."""
    driver = one(profile)
    starts(driver, 1.5)
    driver.trains("x", 4.0)
    for name, value in costs.items():
        getattr(driver.machine.estimates.costs["m"], name).add(value)
    return driver.machine


def kept(machine, known=()):
    (profile,) = _learnt(machine, "cpu", known)
    return {name: getattr(profile, name) for name in ("start_s", "suspend_s", "grow_s", "shrink_s")}


def test_measured_costs_are_kept_with_what_was_learnt():
    machine = taught(durable_saves=2.0, quick_saves=0.05, grows=0.04, shrinks=0.02)
    assert kept(machine) == {"start_s": 1.5, "suspend_s": 2.0, "grow_s": 0.04, "shrink_s": 0.02}
    contradicted = taught(PROFILE, grows=0.04)
    assert kept(contradicted) == {"start_s": 1.5, "suspend_s": 6.0, "grow_s": 0.04, "shrink_s": 1.0}


def test_quick_saves_are_not_kept():
    """The next run would reckon the end of its allocation with them."""
    assert kept(taught(quick_saves=0.05))["suspend_s"] is None


def test_costs_of_earlier_runs_are_kept_where_this_one_has_seen_none():
    old = replace(PROFILE, device="cpu", source="learned")
    assert kept(taught(shrinks=0.02), [old]) == {
        "start_s": 1.5,
        "suspend_s": 6.0,
        "grow_s": 2.0,
        "shrink_s": 0.02,
    }


@pytest.mark.parametrize("source", ["measured", "published", "fitted"])
def test_costs_that_somebody_measured_or_imported_stay(source):
    theirs = replace(PROFILE, device="cpu", source=source)
    assert list(_learnt(taught(grows=0.04), "cpu", [theirs])) == []


def test_what_a_run_has_seen_stands_in_when_it_is_simulated_again():
    bare = a_profile("m", [1, 2, 3, 4], start_s=None, suspend_s=None, shrink_s=9.0)
    driver = one(bare)
    starts(driver, 1.5, in_place=True)
    suspends(driver, 0.05)
    starts(driver, 2.5, in_place=True)
    driver.machine.estimates.costs["m"].grows.add(0.04)
    driver.machine.estimates.costs["m"].shrinks.add(0.02)
    (profile,) = past_of(driver.machine).profiles
    assert (profile.start_s, profile.suspend_s, profile.grow_s, profile.shrink_s) == (2.0, 0.05, 0.04, 9.0)
