"""Work in allocations of one shape: as many lives as it takes, nothing lost, and why it does not end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpcsched.allocations.outcomes import LEAVING_S, STARTUP_S, Work, as_used, outcome_of
from hpcsched.cli.run.results import simulated
from hpcsched.core.model import Kind
from hpcsched.testing.builders import a_job, a_profile

MODEL = a_profile("m", [1.0, 1.8, 2.4], start_s=10.0, suspend_s=5.0, resume_s=8.0)
JOBS = (a_job("a", "m", 3000), a_job("b", "m", 2000), a_job("c", "m", 1000, after=("a",)))
WORK = Work(jobs=JOBS, profiles=(MODEL,), policy="marble")
AROUND_S = STARTUP_S + LEAVING_S


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_without_a_limit_it_takes_what_simulate_says(gpus):
    whole = simulated(JOBS, (MODEL,), gpus=gpus, policy="marble", options={})
    outcome = outcome_of(WORK, gpus=gpus, nodes=1)
    assert outcome.held_s == pytest.approx([whole.makespan_s + AROUND_S])
    assert outcome.gpu_hours(gpus) == pytest.approx(gpus * outcome.running_s / 3600)


def test_a_limit_that_is_never_near_changes_nothing():
    assert outcome_of(WORK, gpus=2, nodes=1, limit_s=1e6) == outcome_of(WORK, gpus=2, nodes=1)


def test_it_comes_back_until_all_is_done_and_each_life_ends_in_time():
    whole = outcome_of(WORK, gpus=1, nodes=1)
    parts = outcome_of(WORK, gpus=1, nodes=1, limit_s=900.0)
    assert parts.why_not is None
    assert all(held < 900.0 - WORK.margin_s + LEAVING_S + 1 for held in parts.held_s)
    # Each further life costs a save, a resume, and the batch job's own start and end; no step is repeated.
    more = len(parts.held_s) - 1
    assert more == math.ceil(whole.running_s / (900.0 - WORK.margin_s - 5.0)) - 1
    lost = parts.running_s - whole.running_s
    assert more * AROUND_S < lost <= more * (AROUND_S + 5.0 + 8.0 + 2.0)


def test_what_never_advances_is_said():
    outcome = outcome_of(WORK, gpus=1, nodes=1, limit_s=70.0)
    assert outcome.why_not == "nothing advanced in this allocation, so nothing would in another of its kind"


def test_it_comes_back_only_so_often():
    outcome = outcome_of(WORK, gpus=1, nodes=1, limit_s=300.0, most_restarts=2)
    assert len(outcome.held_s) == 3
    assert "--max-restarts" in (outcome.why_not or "")


def test_stand_ins_that_are_faster_than_the_clock_see_the_margin_of_the_clock():
    fast = Work(jobs=JOBS, profiles=(MODEL,), policy="marble", speed=10.0)
    (slow_s,), (fast_s,) = (outcome_of(work, gpus=2, nodes=1).held_s for work in (WORK, fast))
    assert fast_s - AROUND_S == pytest.approx((slow_s - AROUND_S) / 10)
    assert len(outcome_of(fast, gpus=1, nodes=1, limit_s=120.0).held_s) == math.ceil(6024 / 10 / 57)


def test_a_program_that_runs_once_has_no_use_for_a_second_gpu():
    once = a_job("once", "m", kind=Kind.COMMAND, command=("true",), processes="auto")
    profiles = (replace(MODEL, source="published"),)  # a measured one shows that it is parallel
    used = as_used(Work(jobs=(once, a_job("both", "m")), profiles=profiles, policy="marble"), gpus=4)
    assert [job.gpus_max for job in used] == [1, None]
