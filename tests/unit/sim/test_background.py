"""What a cluster gains by jobs in the background, and what that costs those in the foreground."""

from __future__ import annotations

import pytest

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Pace
from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.model import Role
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.interference import Interference
from hpcsched.testing.builders import a_job, a_profile, makespan
from hpcsched.testing.invariants import check

PROFILES = (
    a_profile("front", [10.0, 18.0, 24.0, 28.0], start_s=5.0, suspend_s=5.0),
    a_profile("back", [10.0], start_s=5.0, suspend_s=5.0),
)
FRONT = [a_job(f"f{i}", "front", 20_000, gpus=2, submit_at=100.0 * i) for i in range(3)]
BACK = [a_job(f"b{i}", "back", 5_000, gpus=1, background=True) for i in range(4)]
LIMIT = 0.05


def run(jobs, *, policy="marble", share=0.5, cost=0.03, gpus=4, watch=None, **rest):
    def checked(event, actions, machine):
        check(machine)
        if watch:
            watch(event, actions, machine)

    interference = Interference(background_share=share, foreground_slowdown=cost)
    simulation = Simulation(
        jobs, PROFILES, gpus=gpus, policy=policy, interference=interference, watch=checked, **rest
    )
    return simulation.run()


def ends(machine, jobs):
    return {spec.name: machine.run.job_of(spec.name).ended_s for spec in jobs}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cluster_does_more_and_the_foreground_is_hardly_later(policy):
    """Beside them, the background jobs are done before the others; after them, they would take 502 s more."""
    alone, both = run(FRONT, policy=policy), run([*FRONT, *BACK], policy=policy)
    before, after = ends(alone, FRONT), ends(both, FRONT)
    for spec in FRONT:
        job = alone.run.job_of(spec.name)
        assert 0 <= after[spec.name] - before[spec.name] <= LIMIT * (before[spec.name] - job.submit_s)
    assert both.run.finished
    assert makespan(both) < makespan(alone) + 0.3 * 505
    work = sum(job.spec.steps for job in both.run.jobs.values())
    assert work / makespan(both) > 1.2 * sum(spec.steps for spec in FRONT) / makespan(alone)


def test_a_background_job_has_its_share_of_its_speed_beside_another():
    """5 steps a second instead of 10, but for the start and two pauses in which the other is measured."""
    machine = run([FRONT[0], BACK[0]], gpus=2, cost=0.0)
    assert machine.run.job_of("f0").ended_s == pytest.approx(5 + 20_000 / 18)
    assert 1000 < machine.run.job_of("b0").ended_s < 1000 + 5 + 2 * 45


@pytest.mark.parametrize("policy", ["marble", "planner"])
@pytest.mark.parametrize("cost", [0.1, 0.3, 0.9])
def test_whatever_it_would_cost_the_foreground_stays_within_what_it_tolerates(policy, cost):
    """It is measured, and paced down; where that does not help, the guests leave: two minutes a pace."""
    alone, both = run(FRONT, policy=policy), run([*FRONT, *BACK], policy=policy, cost=cost)
    before, after = ends(alone, FRONT), ends(both, FRONT)
    for spec in FRONT:
        late_s = after[spec.name] - before[spec.name]
        trying_s = 120 * cost * (1 + 0.5 + 0.25 + 0.125) + 120 * cost / 8
        assert late_s <= LIMIT * (before[spec.name] - spec.submit_at) + trying_s
    assert both.run.finished


def test_guests_that_cost_too_much_at_any_pace_run_alone():
    paces = []

    def watch(event, actions, machine):
        paces.extend(action.share for action in actions if isinstance(action, Pace))

    machine = run([FRONT[0], BACK[0]], gpus=2, cost=0.9, watch=watch)
    assert ("front", "back") in machine.mechanism(Background).lanes.costly
    assert min(share for share in paces if share) == 0.125
    assert machine.run.job_of("b0").attempts[-1].start_s == machine.run.job_of("f0").ended_s


def test_a_foreground_job_that_shares_nothing_is_not_a_second_later():
    jobs = [a_job("f", "front", 20_000, gpus=4, max_foreground_slowdown=0.0, submit_at=50.0)]
    assert ends(run([*jobs, *BACK]), jobs) == ends(run(jobs), jobs)


def test_the_background_fills_gpus_that_are_left_over():
    launches = []

    def watch(event, actions, machine):
        launches.extend(a for a in actions if isinstance(a, Launch) and a.role is Role.BACKGROUND)

    machine = run([FRONT[0], *BACK[:2]], watch=watch)
    assert {launch.gpus for launch in launches} == {(2,), (3,)}
    assert machine.run.job_of("f0").ended_s == pytest.approx(5 + 20_000 / 18)


def test_a_background_run_goes_on_after_a_crash():
    """The agent starts anew at 300 s: guests are launched again, and measured again."""
    half = run([*FRONT, *BACK], cost=0.3)
    devices = tuple(half.ledger.devices.values())
    again = ev.AgentStarted(at=300.0, wall=1e9, devices=devices, policy="marble")
    machine = run([*FRONT, *BACK], cost=0.3, happenings=[again])
    assert machine.run.finished
    assert len(machine.run.lives) == 2


@pytest.mark.long
def test_two_hundred_jobs_on_sixteen_gpus():
    jobs = [a_job(f"f{i}", "front", 3_000 + 100 * i, submit_at=30.0 * i) for i in range(60)]
    guests = [a_job(f"b{i}", "back", 2_000, gpus=1, background=True, submit_at=10.0 * i) for i in range(140)]
    machine = run([*jobs, *guests], gpus=16, stories=False)
    assert machine.run.finished
