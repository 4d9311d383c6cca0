"""What the planner promises, over random sets: it does what it planned, and never loses to MARBLE."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.sim.engine import Simulation
from hpcsched.testing.families import random_set
from hpcsched.testing.invariants import check


def the_set(seed, most_jobs=12, *, dependent=False, nodes=1):
    """A random set; some jobs wait for earlier ones, some want two hosts."""
    made, random = random_set(seed, most_jobs=most_jobs), Random(seed)
    jobs = []
    for i, job in enumerate(made.jobs):
        if dependent and i and random.random() < 0.4:
            job = replace(job, after=(random.choice(made.jobs[:i]).name,))
        if nodes > 1 and random.random() < 0.3:
            job = replace(job, nodes=2)
        if random.random() < 0.2:
            job = replace(job, gpus_min=random.randint(1, 2), gpus_max=random.randint(2, made.gpus))
        jobs.append(job)
    return replace(made, jobs=tuple(jobs))


def run(made, policy, nodes=1, **options):
    plans = []

    def watch(event, actions, machine):
        check(machine)
        if type(event).__name__ == "PlanMade":
            plans.append(event.plan)

    simulation = Simulation(
        made.jobs,
        made.profiles,
        gpus=made.gpus,
        nodes=nodes,
        policy=policy,
        options={"budget": 30, **options} if policy == "planner" else options,
        watch=watch,
    )
    return simulation.run(), plans


def ends(machine):
    return {job.id: job.ended_s for job in machine.run.jobs.values()}


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 10**6),
    dependent=st.booleans(),
    nodes=st.sampled_from([1, 2]),
    goal=st.sampled_from(["both", "makespan", "jct"]),
)
@pytest.mark.long
def test_jobs_end_when_the_plan_says(seed, dependent, nodes, goal):
    """The planner's sketches and the simulator agree: one plan, and all jobs end as it foresaw."""
    made = the_set(seed, dependent=dependent, nodes=nodes)
    machine, (plan, *later) = run(made, "planner", nodes, goal=goal)
    assert not later
    for job in machine.run.jobs.values():
        assert job.ended_s == pytest.approx(plan.ends[job.id], rel=1e-6)


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), eps=st.sampled_from([0, 0.25, 1, 3]))
def test_never_later_than_marble_and_no_job_past_its_limit(seed, eps):
    made = the_set(seed)
    planned, _ = run(made, "planner", eps=eps)
    marble, exclusive = ends(run(made, "marble")[0]), ends(run(made, "exclusive")[0])
    rounding = 1 + 1e-6
    assert max(ends(planned).values()) <= max(marble.values()) * rounding
    for job_id, end_s in ends(planned).items():
        assert end_s <= (1 + eps) * max(marble[job_id], exclusive[job_id]) * rounding


@pytest.mark.long
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 10**6), dependent=st.booleans(), nodes=st.sampled_from([1, 2]))
def test_jobs_that_come_over_time_all_get_done(seed, dependent, nodes):
    """Whatever the planner does as jobs come, every lease is in order (`check`) and every job ends."""
    arrivals = random_set(seed, most_jobs=12, arrivals=0.5)
    made = the_set(seed, dependent=dependent, nodes=nodes)
    jobs = tuple(replace(j, submit_at=a.submit_at) for j, a in zip(made.jobs, arrivals.jobs, strict=True))
    machine, plans = run(replace(made, jobs=jobs), "planner", nodes)
    assert machine.run.finished and None not in ends(machine).values()
    assert all(end < inf for plan in plans for end in plan.ends.values())


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10**6), luck=st.integers(0, 99))
def test_a_seed_gives_the_same_plan(seed, luck):
    made = the_set(seed)
    first, second = (run(made, "planner", seed=luck)[1] for _ in range(2))
    assert first == second
