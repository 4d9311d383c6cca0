"""Crashes, losses, users, deadlines: whatever happens while a plan is under way, all work gets done."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from budget import slow

from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobState
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Planned, a_job, a_profile
from hpcsched.testing.families import random_set, wrong
from hpcsched.testing.invariants import check

MOST_EVENTS = 20_000
LINE = a_profile("line", [10.0, 20.0])


def happenings(rng, jobs, hosts, options, span_s):
    """Some of what can happen in a run, at random times."""
    devices = tuple(
        Device(index=h * jobs.gpus + g, host=f"node{h + 1}", kind="simulated", handle=str(g))
        for h in range(hosts)
        for g in range(jobs.gpus)
    )
    for _ in range(rng.randint(1, 6)):
        at, later = rng.uniform(0, span_s), rng.uniform(0, span_s)
        job_id = rng.randint(1, len(jobs.jobs))
        match rng.choice(["crash", "cancel", "suspend", "hold", "lost", "deadline"]):
            case "crash":
                yield ev.AgentStarted(
                    at=at,
                    wall=at,
                    devices=devices,
                    policy="planner",
                    policy_options=options,
                    profiles=jobs.profiles,
                )
            case "cancel":
                yield ev.CancelRequested(at=at, job_id=job_id)
            case "suspend":
                yield ev.SuspendRequested(at=at, job_id=job_id)
                yield ev.ResumeRequested(at=at + later, job_id=job_id)
            case "hold":
                yield ev.HoldRequested(at=at, job_id=job_id)
                yield ev.ReleaseRequested(at=at + later, job_id=job_id)
            case "lost":
                gpu = rng.randrange(len(devices))
                yield ev.DeviceLost(at=at, gpu=gpu, why="test")
                yield ev.DeviceFound(at=at + later, gpu=gpu, why="test")
            case "deadline":
                yield ev.DeadlineMoved(at=at, deadline=at + later)
                yield ev.DeadlineMoved(at=at + 0.5 * later, deadline=None)


def vary(rng, jobs, hosts):
    """Some of the jobs wait for others, come later, need several hosts or certain counts."""
    specs = []
    for spec in jobs.jobs:
        if specs and rng.random() < 0.2:
            spec = replace(spec, after=(rng.choice(specs).name,))
        if rng.random() < 0.2:
            spec = replace(spec, submit_at=rng.uniform(0, 3600))
        if rng.random() < 0.2:
            spec = replace(spec, gpus_min=2, gpus_max=rng.choice([2, 3, None]))
        if rng.random() < 0.2:
            spec = replace(spec, nodes=hosts)
        specs.append(spec)
    return replace(jobs, jobs=tuple(specs))


@pytest.mark.parametrize("seed", [*range(4), *(slow(seed) for seed in (*range(4, 25), 41, 45))])
@pytest.mark.long
def test_all_work_is_done_whatever_happens(seed):
    rng = Random(seed)
    jobs, hosts = random_set(seed, most_jobs=20), 1
    if seed % 3 == 1:
        hosts = 2
        jobs = vary(rng, jobs, hosts)
    options = {
        "goal": rng.choice(["makespan", "makespan", "both", "jct"]),
        "eps": rng.choice(["inf", "1", "0"]),
    }
    work = {p.model: p.rate(1) for p in jobs.profiles}
    span_s = sum(spec.steps / work[spec.model] for spec in jobs.jobs) / jobs.gpus / hosts
    events = 0

    def watch(event, actions, machine):
        nonlocal events
        check(machine)
        events += 1
        assert events < MOST_EVENTS, "it goes on for ever"

    done = Simulation(
        jobs.jobs,
        wrong(jobs.profiles, seed, 0.3) if seed % 3 == 2 else jobs.profiles,
        gpus=jobs.gpus,
        nodes=hosts,
        policy="planner",
        options=options,
        happenings=sorted(happenings(rng, jobs, hosts, options, span_s), key=lambda e: e.at),
        truth=jobs.profiles if seed % 3 == 2 else None,
        watch=watch,
    ).run()
    fits = done.ledger.capacity().fits
    left = [j for j in done.run.jobs.values() if not j.state.final and fits(j.spec.gpus_min, j.spec.nodes)]
    left = [
        j
        for j in left
        if not any(done.run.job_of(name).state is not JobState.COMPLETED for name in j.spec.after)
    ]
    # (A deadline that was too near has the run drained: the rest is for its next life.)
    assert done.deadline.draining or not left, [
        (job.spec.name, job.state, str(done.waiting_reason(job))) for job in left
    ]


def test_there_is_nothing_to_plan_while_all_that_run_are_sent_away():
    driver = Planned(a_job("x", "line", 9000, gpus=1), gpus=2, profiles=[LINE], policy="planner")
    driver.runs("x")
    driver.suspend("x")
    driver.tell(ev.DeviceLost, gpu=1, why="test")  # is news
    assert driver.machine.run.plan.ends == {}
    driver.leaves("x", 10)
    driver.resume("x")
    assert driver.machine.run.plan.ends.keys() == {1}
    assert driver.counts() == {"x": 1}
