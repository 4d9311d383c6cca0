"""Of an array only so many jobs are under way at once; the first that waits is next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcsched.core import events as ev
from hpcsched.core.model import Array, JobState
from hpcsched.core.reasons import Why
from hpcsched.testing.builders import Driver, a_job, a_profile

M = a_profile("m", [1])


def array(count: int, at_once: int | None, name: str = "a", **rest):
    return [
        a_job(f"{name}{i}", "m", gpus=1, array=Array(name=name, index=i, at_once=at_once), **rest)
        for i in range(1, count + 1)
    ]


def running(driver: Driver) -> list[str]:
    return [job.spec.name for job in driver.machine.run.active.values()]


def why(driver: Driver, name: str) -> str | None:
    reason = driver.machine.waiting_reason(driver.job(name))
    return reason and reason.why


def test_without_a_limit_all_that_fit_run() -> None:
    driver = Driver(*array(5, None), gpus=4, profiles=[M])
    assert running(driver) == ["a1", "a2", "a3", "a4"]
    assert why(driver, "a5") == Why.RESOURCES


def test_no_more_run_than_may_and_those_behind_them_are_not_held_up() -> None:
    driver = Driver(*array(4, 2), a_job("other", "m", gpus=1), gpus=4, profiles=[M])
    assert running(driver) == ["a1", "a2", "other"]
    assert why(driver, "a3") == why(driver, "a4") == Why.ARRAY_LIMIT
    driver.runs("a1", "a2")
    driver.exits("a2", 0, 100, 100)
    assert running(driver) == ["a1", "other", "a3"] and why(driver, "a4") == Why.ARRAY_LIMIT
    driver.exits("a1", 1, 0, None)  # tried again: it keeps its place
    assert "a4" not in running(driver)


def test_two_arrays_have_places_of_their_own() -> None:
    driver = Driver(*array(3, 1), *array(3, 2, "b"), gpus=6, profiles=[M])
    assert running(driver) == ["a1", "b1", "b2"]


def test_who_is_suspended_keeps_its_place_and_who_is_held_before_it_began_does_not() -> None:
    driver = Driver(*array(3, 1), gpus=2, profiles=[M])
    driver.runs("a1")
    driver.tell(ev.SuspendRequested, "a1")
    driver.exits("a1", 75, 10, 10)
    assert driver.job("a1").state is JobState.SUSPENDED and running(driver) == []
    driver.tell(ev.ResumeRequested, "a1")
    assert running(driver) == ["a1"]
    driver = Driver(a_job("first", "m", gpus=1), *array(3, 1), gpus=1, profiles=[M])
    driver.hold("a1")
    driver.hold("a3")
    driver.runs("first")
    driver.exits("first", 0, 100, 100)
    assert running(driver) == ["a2"]
    driver.tell(ev.ReleaseRequested, "a1")
    assert why(driver, "a1") == Why.ARRAY_LIMIT
    driver.runs("a2")
    driver.exits("a2", 0, 100, 100)
    assert running(driver) == ["a1"] and driver.job("a3").state is JobState.HELD


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_place_is_free_however_its_job_ends(end: str) -> None:
    driver = Driver(*array(2, 1, retries=0), gpus=2, profiles=[M])
    driver.runs("a1")
    if end == "cancel":
        driver.tell(ev.CancelRequested, "a1")
    driver.exits("a1", 1, 0, None)
    assert running(driver) == ["a2"]


def test_who_waits_for_a_place_can_be_cancelled() -> None:
    driver = Driver(*array(3, 1), gpus=2, profiles=[M])
    driver.tell(ev.CancelRequested, "a2")
    driver.runs("a1")
    driver.exits("a1", 0, 100, 100)
    assert running(driver) == ["a3"]


def test_a_job_that_runs_once_more_waits_for_a_place() -> None:
    driver = Driver(*array(2, 1), gpus=2, profiles=[M])
    driver.runs("a1")
    driver.exits("a1", 0, 100, 100)
    driver.tell(ev.RetryRequested, job_ids=(1,), from_scratch=True)
    assert running(driver) == ["a2"] and why(driver, "a1") == Why.ARRAY_LIMIT
    driver.runs("a2")
    driver.exits("a2", 0, 100, 100)
    assert running(driver) == ["a1"]


def test_the_next_life_goes_on_with_the_same_places() -> None:
    driver = Driver(*array(4, 2), gpus=4, profiles=[M])
    driver.runs("a1", "a2")
    driver.tell(ev.DrainRequested, cause="SIGINT")
    driver.exits("a1", 75, 10, 10)
    driver.exits("a2", 75, 10, 10)
    driver.start_agent(4, saved={1: 10, 2: 10})
    assert running(driver) == ["a1", "a2"]


def test_ten_thousand_of_one_array_are_no_burden() -> None:
    driver = Driver(gpus=2, profiles=[M])
    driver.machine.handle(ev.JobsSubmitted(at=0.0, first_id=1, jobs=tuple(array(10_000, 2))))
    assert running(driver) == ["a1", "a2"]


def test_a_job_that_leaves_its_array_leaves_its_place() -> None:
    driver = Driver(*array(3, 1), gpus=2, profiles=[M])
    driver.runs("a1")
    driver.tell(ev.SuspendRequested, "a1")
    driver.exits("a1", 75, 10, 10)
    alone = replace(driver.job("a1").spec, array=None)
    driver.tell(ev.DefinitionsCompared, updated={1: alone}, kept={}, again=())
    assert running(driver) == ["a2"]
    driver.tell(ev.ResumeRequested, "a1")
    assert running(driver) == ["a2", "a1"]


def test_the_next_one_that_can_start_gets_the_place() -> None:
    """Its turn comes while what it waits for runs once more."""
    preps = [a_job(f"p{i}", "m", gpus=1) for i in (1, 2, 3)]
    trains = [replace(spec, after=(f"p{i}",)) for i, spec in enumerate(array(3, 1), 1)]
    driver = Driver(*preps, *trains, gpus=4, profiles=[M])
    for name in ("p1", "p2", "p3"):
        driver.runs(name)
        driver.exits(name, 0, 100, 100)
    assert running(driver) == ["a1"]
    driver.tell(ev.RetryRequested, job_ids=(2,), from_scratch=True)
    driver.runs("a1")
    driver.exits("a1", 0, 100, 100)
    assert running(driver) == ["p2", "a3"] and why(driver, "a2") == Why.DEPENDENCY


def test_who_is_defined_anew_while_it_is_suspended_keeps_its_place() -> None:
    driver = Driver(*array(3, 1), gpus=2, profiles=[M])
    driver.runs("a1")
    driver.tell(ev.SuspendRequested, "a1")
    driver.exits("a1", 75, 10, 10)
    changed = replace(driver.job("a1").spec, retries=5)
    driver.tell(ev.DefinitionsCompared, updated={1: changed}, kept={}, again=())
    assert running(driver) == []
    driver.tell(ev.ResumeRequested, "a1")
    assert running(driver) == ["a1"]


def test_the_newest_job_says_how_many_at_once() -> None:
    driver = Driver(*array(3, 1), gpus=8, profiles=[M])
    assert running(driver) == ["a1"]
    more = [replace(spec, name=f"more{spec.array.index}") for spec in array(5, 3) if spec.array]
    driver.submit(*more)
    assert running(driver) == ["a1", "a2", "a3"]
    driver.runs("a1")
    driver.exits("a1", 0, 100, 100)
    assert running(driver) == ["a2", "a3", "more1"]


def test_all_places_of_a_larger_limit_are_filled() -> None:
    driver = Driver(*array(4, 1), gpus=8, profiles=[M])
    driver.submit(replace(array(1, 3)[0], name="more"))
    assert running(driver) == ["a1", "a2", "a3"] and why(driver, "a4") == Why.ARRAY_LIMIT
    assert str(driver.machine.waiting_reason(driver.job("a4"))).endswith("at most 3 run at once")
