"""The planner by small scenes: what it chooses, what it is bound by, when it plans anew."""

from __future__ import annotations

import itertools
from math import inf

import pytest

from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.reasons import Why
from hpcsched.errors import ConfigError
from hpcsched.planning.jobs import search as searching
from hpcsched.planning.jobs.list_schedules import FutureLimits, ListSchedule, simulate
from hpcsched.planning.jobs.problem import Problem
from hpcsched.planning.jobs.search import ScheduleSearch, measure, portfolio, value
from hpcsched.planning.jobs.timeline import Timeline
from hpcsched.policy import make_policy
from hpcsched.policy.planner.rollout import rollout
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Planned, a_core_job, a_job, a_profile, a_program, some_devices
from hpcsched.testing.families import random_set

# Four GPUs are fastest, but the third and fourth add almost nothing.
FLAT = a_profile("flat", [1.0, 1.9, 2.0, 2.05], start_s=5.0, suspend_s=5.0, resume_s=5.0)
LINEAR = a_profile("linear", [1.0, 2.0, 3.0, 4.0], start_s=5.0, suspend_s=5.0, resume_s=5.0)


def simulated(jobs, policy="planner", gpus=4, profiles=(FLAT, LINEAR), **options):
    plans = []

    def watch(event, actions, machine):
        if isinstance(event, ev.PlanMade):
            plans.append(event.plan)

    simulation = Simulation(jobs, profiles, gpus=gpus, policy=policy, options=options, watch=watch)
    machine = simulation.run()
    return machine, plans


def makespan(machine):
    return max(job.ended_s for job in machine.run.jobs.values())


def problem_of(jobs, profiles, gpus):
    """The state right after these jobs were submitted."""
    machine = Machine(make_policy)
    machine.handle(ev.AgentStarted(at=0, wall=0, devices=some_devices(gpus), policy="planner"))
    machine.handle(ev.ProfilesLoaded(at=0, profiles=profiles))
    machine.handle(ev.JobsSubmitted(at=0, first_id=1, jobs=tuple(jobs)))
    return Problem(machine.decisions.view(), window=100)


def test_a_plan_is_not_about_jobs_on_cpu_cores() -> None:
    jobs = [a_job("a", "flat"), a_program("p", 1.0, after=("a",)), a_core_job("c", 1.0, after=("a",))]
    problem = problem_of([*jobs, a_job("b", "flat", after=("a",))], (FLAT,), 2)
    assert [work.job.spec.name for work in problem.works] == ["a", "b"]


def test_where_the_last_gpus_add_nothing_jobs_share_them():
    """MARBLE runs such jobs one after the other on all GPUs; side by side they take half the time."""
    jobs = [a_job(f"j{i}", "flat", steps=1000) for i in range(4)]
    planned, _ = simulated(jobs)
    marble, _ = simulated(jobs, "marble")
    assert makespan(planned) < 0.6 * makespan(marble)
    assert {len(a.gpus) for job in planned.run.jobs.values() for a in job.attempts} <= {1, 2}


def test_a_job_alone_gets_its_fastest_count():
    machine, _ = simulated([a_job("x", "flat", steps=1000)])
    assert [len(a.gpus) for a in machine.run.jobs[1].attempts] == [4]


def test_each_goal_gets_the_better_of_its_measure():
    made = random_set(5, "synthetic", most_jobs=12)
    found = {}
    for goal in ("makespan", "jct"):
        machine, _ = simulated(made.jobs, gpus=made.gpus, profiles=made.profiles, goal=goal, eps="inf")
        ends = [job.ended_s for job in machine.run.jobs.values()]
        found[goal] = max(ends), sum(ends) / len(ends)
    assert found["makespan"][0] < found["jct"][0]
    assert found["jct"][1] < found["makespan"][1]


def test_with_eps_0_nobody_waits_longer_than_under_the_later_baseline():
    """The long job is first in line; shortest first would be better on average, and is not allowed."""
    jobs = [a_job("long", "linear", steps=4000), *(a_job(f"s{i}", "linear", steps=100) for i in range(5))]
    strict, _ = simulated(jobs, eps=0, goal="jct")
    free, _ = simulated(jobs, eps="inf", goal="jct")
    marble, _ = simulated(jobs, "marble")
    alone, _ = simulated(jobs, "exclusive")
    assert free.run.jobs[1].ended_s > marble.run.jobs[1].ended_s
    for i, job in strict.run.jobs.items():
        assert job.ended_s <= max(marble.run.jobs[i].ended_s, alone.run.jobs[i].ended_s) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_within_two_percent_of_the_best_list_plan_there_is(seed):
    """By enumeration: all orders times all caps of three jobs, within the same limits."""
    made = random_set(seed, most_jobs=3)
    problem = problem_of(made.jobs, made.profiles, made.gpus)
    marble, alone = (rollout(problem, make_policy(name)) for name in ("marble", "exclusive"))
    base = measure(problem, marble)
    latest = [2 * max(pair) for pair in zip(marble.ends, alone.ends, strict=True)]
    best = value("both", base, base)
    for order in itertools.permutations(range(3)):
        for caps in itertools.product(range(1, made.gpus + 1), repeat=3):
            timeline = simulate(
                problem, ListSchedule(order, caps), FutureLimits(latest, base.makespan_s * (1 + 1e-9))
            )
            if timeline:
                best = min(best, value("both", measure(problem, timeline), base))
    plan = make_policy("planner").plan(problem.view)
    got = measure(problem, marble)
    got = type(got)(plan.facts["makespan_s"], plan.facts["mean_jct_s"])
    assert best * (1 - 1e-9) <= value("both", got, base) <= best * 1.02


def searched(problem, budget=100, seed=1):
    marble = rollout(problem, make_policy("marble"))
    base = measure(problem, marble)
    search = ScheduleSearch(
        problem=problem,
        latest=[2 * end for end in marble.ends],
        by=problem.now + base.makespan_s,
        base=base,
        goal="both",
        budget=budget,
        seed=seed,
    )
    search.run()
    return search


@pytest.mark.parametrize("most_jobs", [3, 6, 40])
@pytest.mark.parametrize("seed", range(3))
def test_no_candidate_is_tried_twice_nor_more_than_the_budget(monkeypatch, seed, most_jobs):
    tried = []

    def noted(problem, plan, limits, begin):
        tried.append(plan)
        return simulate(problem, plan, limits, begin)

    monkeypatch.setattr(searching, "simulate", noted)
    made = random_set(seed, most_jobs=most_jobs)
    problem = problem_of(made.jobs, made.profiles, made.gpus)
    search = searched(problem)
    assert len(tried) == len(set(tried)) == search.tried
    assert search.tried <= len({plan for plan, _ in portfolio(problem)}) + 100


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_the_best_that_was_seen_and_can_be_gone_again(monkeypatch, seed):
    """The climbing goes on from worse plans at times; it never gives one back."""
    made, seen = random_set(seed, most_jobs=12), []
    problem = problem_of(made.jobs, made.profiles, made.gpus)

    def noted(*args):
        timeline = simulate(*args)
        if timeline:
            seen.append(value("both", measure(problem, timeline), base))
        return timeline

    base = measure(problem, rollout(problem, make_policy("marble")))
    monkeypatch.setattr(searching, "simulate", noted)
    search = searched(problem)
    assert search.best == pytest.approx(min(seen), rel=1e-8)
    assert simulate(problem, search.plan).ends == search.timeline.ends
    again = searched(problem)
    assert (again.plan, again.best, again.tried) == (search.plan, search.best, search.tried)


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_climbing_finds_better_plans_than_the_portfolio(seed):
    made = random_set(seed, most_jobs=60)
    assert len(made.jobs) > 20
    problem = problem_of(made.jobs, made.profiles, made.gpus)
    assert searched(problem, budget=100).best < searched(problem, budget=0).best


def test_a_copy_of_a_sketch_goes_its_own_way():
    made = random_set(3, most_jobs=8)
    problem = problem_of(made.jobs, made.profiles, made.gpus)
    begin = Timeline(problem)
    timeline = begin.copy()
    timeline.start(0, 1, next(iter(timeline.rooms.by_host().items()))[:1])
    copy = timeline.copy()
    while copy.next():
        pass
    assert copy.now == copy.ends[0] > timeline.now == problem.now
    assert list(timeline.active) == [0] and not copy.active and timeline.rooms.left == made.gpus - 1
    assert begin.ends == [inf] * len(problem)


@pytest.mark.parametrize("name", ["marble", "exclusive"])
@pytest.mark.parametrize("seed", range(20))
def test_a_baseline_is_what_its_policy_does(name, seed):
    """The future a plan is measured by is the one the simulator gives for that policy, job by job."""
    made = random_set(seed, most_jobs=30)
    timeline = rollout(problem_of(made.jobs, made.profiles, made.gpus), make_policy(name))
    machine, _ = simulated(made.jobs, name, made.gpus, made.profiles)
    assert timeline.ends == pytest.approx([job.ended_s for job in machine.run.jobs.values()], rel=1e-6)


def test_it_plans_once_for_a_set_that_goes_as_planned():
    _, plans = simulated([a_job(f"j{i}", "flat", steps=500 + i) for i in range(6)])
    assert len(plans) == 1
    assert plans[0].facts["makespan_s"] < plans[0].facts["marble_s"]


def test_it_plans_anew_when_a_job_comes_and_keeps_its_word():
    """The limit of a job that was planned before stays what it was."""
    jobs = [a_job(f"j{i}", "flat", steps=1000) for i in range(3)]
    _, plans = simulated([*jobs, a_job("late", "flat", steps=1000, submit_at=100.0)])
    assert [plan.at for plan in plans] == [0.0, 100.0]
    for job_id in (1, 2, 3):
        assert plans[1].latest[job_id] == pytest.approx(plans[0].latest[job_id])
    assert set(plans[1].ends) == {1, 2, 3, 4}


def test_a_running_job_makes_room_for_one_that_comes():
    """A long job has all GPUs; a short one that comes must not wait for its end."""
    jobs = [a_job("long", "flat", steps=20_000), a_job("short", "flat", steps=100, submit_at=50.0)]
    machine, _ = simulated(jobs)
    assert machine.run.jobs[2].started_s < 100.0
    assert Why.SHRUNK in [note.reason.why for note in machine.run.jobs[1].story]


def test_it_plans_anew_when_a_job_fails_or_a_device_is_lost():
    jobs = [a_job(f"j{i}", "flat", steps=1000) for i in range(3)]
    plans = []

    def watch(event, actions, machine):
        if isinstance(event, ev.PlanMade):
            plans.append(event.at)

    lost = ev.DeviceLost(at=20.0, gpu=0, why="fell off the bus")
    simulation = Simulation(jobs, (FLAT,), gpus=4, policy="planner", happenings=[lost], watch=watch)
    machine = simulation.run()
    assert machine.run.finished and plans[:2] == [0.0, 20.0]


def test_jobs_without_profile_or_steps_are_planned_too():
    """Nothing is known of them, nor promised: all end, and what is known keeps its limits."""
    truth = (FLAT, a_profile("new", [1.0, 1.8, 2.4, 2.8], start_s=5.0, suspend_s=5.0, resume_s=5.0))
    jobs = [a_job("a", "new", steps=500), a_job("b", "flat", steps=500), a_job("c", "new", steps=900)]
    simulation = Simulation(jobs, (FLAT,), gpus=4, policy="planner", truth=truth)
    machine = simulation.run()
    assert machine.run.finished


def test_a_plan_of_a_long_queue_covers_a_window():
    jobs = [a_job(f"j{i}", "flat", steps=100 + i) for i in range(1200)]
    problem = problem_of(jobs, (FLAT,), 4)
    plan = make_policy("planner", {"budget": 1}).plan(problem.view)
    assert len(plan.order) == 1000


def test_every_start_says_what_was_planned():
    machine, _ = simulated([a_job(f"j{i}", "flat", steps=1000) for i in range(4)])
    for job in machine.run.jobs.values():
        reason = next(note.reason for note in job.story if note.reason.why is Why.PLANNED)
        assert reason.facts["until"] < reason.facts["marble"] < inf
        assert "MARBLE" in str(reason) and "unknown" not in str(reason)


def test_a_plan_that_rests_on_guesses_says_so():
    jobs = [a_job("a", "new", gpus=1), *(a_job(f"j{i}", "flat", steps=1000) for i in range(4))]
    driver = Planned(*jobs, gpus=4, profiles=[FLAT], policy="planner")
    assert driver.machine.run.plan.rule == "list"
    said = [str(note.reason) for job in driver.machine.run.active.values() for note in job.story[1:]]
    assert said and all(text.endswith("; 1 of its 5 jobs are of unknown work") for text in said)


def test_who_waits_for_its_turn_though_gpus_are_free_is_told_so():
    driver = Planned(gpus=4, profiles=[FLAT], policy="planner")
    driver.submit(*(a_job(f"j{i}", "flat", steps=1000) for i in range(6)))
    plan = driver.machine.run.plan
    assert plan.rule == "list"
    waiting = [job for job in driver.machine.run.jobs.values() if job.id in driver.machine.own.queue]
    assert {driver.machine.waiting_reason(job).why for job in waiting} == {Why.RESOURCES, Why.PRIORITY}
    driver.machine.ledger.free.add(driver.machine.run.active.popitem()[1].gpus[0])
    assert {driver.machine.waiting_reason(job).why for job in waiting} == {Why.PLAN}


@pytest.mark.parametrize(("key", "bad"), [("goal", "fun"), ("eps", "-1"), ("budget", "1.5"), ("seed", "x")])
def test_options_that_make_no_sense_are_refused(key, bad):
    with pytest.raises(ConfigError):
        make_policy("planner", {key: bad})
