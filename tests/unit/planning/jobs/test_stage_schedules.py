"""Plans by stages: what the configuration LP's patterns gain, and that they go as planned."""

from __future__ import annotations

import builtins

import pytest
from budget import slow

from hpcsched.core import events as ev
from hpcsched.core.actions import Suspend
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.core.plan import Plan
from hpcsched.core.transitions.outcome import LOOK
from hpcsched.policy import make_policy
from hpcsched.sim.bounds import BoundJob, lower_bound_s
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Planned, a_job, a_profile, makespan, state_of
from hpcsched.testing.families import random_set
from hpcsched.testing.invariants import check

pytest.importorskip("scipy", reason="the patterns are an LP: it needs scipy, the extra plan")

TWO = a_profile("two", [10.0, 20.0, 20.0, 20.0], start_s=1.0, suspend_s=1.0)
"""Twice as fast on two GPUs as on one, and no faster on more."""

THREE_JOBS = [a_job(f"j{i}", "two", 20_000, gpus=2) for i in range(3)]
"""1000 s each on two GPUs. On four, lists take 2000 s; taking turns, all three are done in 1500 s."""

FREE = {"goal": "makespan", "eps": "inf"}


def run(jobs, profiles, gpus, **options):
    """The state at the end, and all plans made."""
    plans: list[Plan] = []
    told: list[ev.Event] = []

    def watch(event, actions, machine):
        told.append(event)
        check(machine)
        if isinstance(event, ev.PlanMade):
            plans.append(event.plan)

    simulation = Simulation(jobs, profiles, gpus=gpus, policy="planner", options=options, watch=watch)
    return simulation.run(), plans, told


def test_jobs_take_turns_where_that_is_sooner_than_any_list():
    done, (plan,), _ = run(THREE_JOBS, [TWO], 4, **FREE)
    assert plan.rule == "stages"
    assert plan.facts["what"] == "patterns of the configuration LP"
    assert 1500 < makespan(done) < 1510
    listed, (plan,), _ = run(THREE_JOBS, [TWO], 4, goal="both", eps="inf")
    assert plan.rule != "stages"
    assert makespan(listed) > 1990
    assert all(job.suspensions <= 2 for job in done.run.jobs.values())


def test_explain_says_which_stage_it_was():
    done, _, _ = run(THREE_JOBS, [TWO], 4, **FREE)
    story = [str(note.reason) for job in done.run.jobs.values() for note in job.story]
    assert "gives up its 2 GPUs: stage 2 of the 3 planned" in story


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 9, *(slow(seed) for seed in (5, 14, 23, 31, 41, 49))])
@pytest.mark.parametrize("eps", ["1", "inf"])
def test_all_goes_as_planned(seed, eps):
    jobs = random_set(seed, most_jobs=40)
    done, (plan,), _ = run(jobs.jobs, jobs.profiles, jobs.gpus, goal="makespan", eps=eps)
    assert {job.state for job in done.run.jobs.values()} == {JobState.COMPLETED}
    for job in done.run.jobs.values():
        assert job.ended_s == pytest.approx(plan.ends[job.id], abs=1e-6)
        assert job.ended_s <= plan.latest.get(job.id, float("inf"))
    if eps == "inf":
        assert plan.rule == "stages"
        models = {p.model: p for p in jobs.profiles}
        work = [BoundJob(profile=models[j.model], steps=j.steps, submit_s=0.0) for j in jobs.jobs]
        assert makespan(done) >= lower_bound_s(work, jobs.gpus)


def test_a_replay_of_the_events_comes_to_the_same_state():
    done, _, told = run(THREE_JOBS, [TWO], 4, **FREE)
    again = Machine(make_policy)
    for event in told:
        again.handle(event)
    assert state_of(again) == state_of(done)


def test_an_arrival_in_the_middle_of_the_stages_is_planned_in():
    jobs = [*THREE_JOBS, a_job("late", "two", 20_000, gpus=2, submit_at=700.0)]
    done, plans, _ = run(jobs, [TWO], 4, **FREE)
    assert len(plans) == 2
    assert makespan(done) < 2020
    for job in done.run.jobs.values():
        assert job.ended_s == pytest.approx(plans[-1].ends[job.id], abs=1e-6)


def test_a_job_that_is_leaving_when_the_plan_is_made_is_in_it():
    """The arrival comes while a stage's end has one job save: that one waits again in the new plan."""
    _, (plan,), _ = run(THREE_JOBS, [TWO], 4, **FREE)
    at = plan.stages[0].until + 0.5
    done, plans, _ = run([*THREE_JOBS, a_job("late", "two", 20_000, gpus=2, submit_at=at)], [TWO], 4, **FREE)
    assert len(plans) >= 2
    assert set(plans[1].ends) == {1, 2, 3, 4}
    assert {job.state for job in done.run.jobs.values()} == {JobState.COMPLETED}


@pytest.mark.parametrize(
    ("jobs", "profile"),
    [
        ([*THREE_JOBS, a_job("last", "two", 20_000, gpus=2, after=("j0",))], TWO),
        ([*THREE_JOBS, a_job("odd", "two", None, gpus=2)], TWO),
        (THREE_JOBS, a_profile("two", [10.0, 20.0, 20.0, 20.0], start_s=60.0, suspend_s=60.0)),
    ],
    ids=["dependencies", "unknown work", "costly switches"],
)
def test_where_patterns_are_no_use_there_are_none(jobs, profile):
    driver = Planned(*jobs, gpus=4, profiles=[profile], policy="planner", **FREE)
    assert driver.machine.run.plan.rule != "stages"


@pytest.mark.parametrize(("left_s", "leaves"), [(1.9, 0), (2.1, 1)])
def test_nobody_is_set_aside_who_could_not_go_on_before_the_allocation_ends(left_s, leaves):
    """Saving begins 60 s before the deadline, a second earlier for each of two jobs; a switch takes 2."""
    driver = Planned(*THREE_JOBS, gpus=4, profiles=[TWO], policy="planner", **FREE)
    driver.runs("j0", "j1", "j2")
    plan = driver.machine.run.plan
    driver.tell(ev.DeadlineMoved, deadline=plan.stages[0].until + 62.0 + left_s)
    driver.now = plan.stages[0].until
    actions = driver.tell(ev.TimerFired, key=LOOK)
    assert len([action for action in actions if isinstance(action, Suspend)]) == leaves


@pytest.mark.parametrize(("left", "leaves"), [(2000, 1), (30, 0)])
def test_who_is_about_to_end_is_not_set_aside(left, leaves):
    """30 steps take 1.5 s, a suspend and resume 2 s: launches and signals are never exactly as planned."""
    driver = Planned(*THREE_JOBS, gpus=4, profiles=[TWO], policy="planner", **FREE)
    driver.runs("j0", "j1")
    driver.now = driver.machine.run.plan.stages[0].until
    for job in driver.machine.run.running:
        driver.reports(job.id, 20_000 - left)
    actions = driver.tell(ev.TimerFired, key=LOOK)
    assert len([action for action in actions if isinstance(action, Suspend)]) == leaves


def test_without_scipy_lists_are_what_there_is(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("scipy", "numpy"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done, (plan,), _ = run(THREE_JOBS, [TWO], 4, **FREE)
    assert plan.rule != "stages"
    assert makespan(done) > 1990


@pytest.mark.long
@pytest.mark.parametrize("seed", [31, slow(54), slow(70)])
def test_stages_keep_the_latest_ends(seed):
    """The free sequences of patterns end some jobs too late: only the LP with time reversed keeps them."""
    jobs = random_set(seed)
    done, (plan,), _ = run(jobs.jobs, jobs.profiles, jobs.gpus, goal="makespan", eps="1")
    free, _, _ = run(jobs.jobs, jobs.profiles, jobs.gpus, **FREE)
    assert plan.rule == "stages"
    assert any(job.ended_s > plan.latest[job.id] for job in free.run.jobs.values())
    assert all(job.ended_s <= plan.latest[job.id] for job in done.run.jobs.values())
    listed, _, _ = run(jobs.jobs, jobs.profiles, jobs.gpus, goal="both", eps="1")
    assert makespan(done) < 0.98 * makespan(listed)


@pytest.mark.long
def test_stages_never_end_later_than_marble():
    """With nothing else to keep, all is done by when MARBLE would have it done."""
    for seed in range(20):
        jobs = random_set(seed, most_jobs=12)
        _, (plan, *_), _ = run(jobs.jobs, jobs.profiles, jobs.gpus, **FREE)
        assert plan.facts["makespan_s"] <= plan.facts["marble_s"] * (1 + 1e-9)
