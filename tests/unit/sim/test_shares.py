"""Jobs that are content with a part of a GPU: who comes to whom, who goes again, what it comes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcsched.cli.run.results import bounds_of
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import JobState, Role
from hpcsched.core.needs import Needs
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES
from hpcsched.sim.engine import Simulation
from hpcsched.sim.interference import Interference
from hpcsched.testing.builders import a_job, a_profile
from hpcsched.testing.invariants import check

SMALL = replace(a_profile("small", [10.0]), busy={1: 0.2}, memory_mib={1: 8000.0})
LARGE = replace(a_profile("large", [10.0]), busy={1: 0.9}, memory_mib={1: 30000.0})
PLAIN = a_profile("plain", [10.0, 19.0])


def sharing(name, model="small", steps=1000, share=0.0, **rest):
    return a_job(name, model, steps, gpus=1, needs=Needs(share=share), **rest)


def run(jobs, *, gpus=1, policy="marble", profiles=(SMALL, LARGE, PLAIN), **rest):
    simulation = Simulation(
        jobs, profiles, gpus=gpus, policy=policy, watch=lambda event, actions, machine: check(machine), **rest
    )
    return simulation.run()


def ends(machine):
    return [round(job.ended_s, 1) for job in machine.run.jobs.values()]


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_that_leave_time_of_a_gpu_share_it(policy):
    machine = run([sharing(f"j{i}", steps=6000) for i in range(4)], policy=policy)
    assert max(ends(machine)) < 4 * 600 / 3
    roles = [job.attempts[0].role for job in machine.run.jobs.values()]
    assert roles == [Role.PRIMARY] + [Role.SHARED] * 3
    assert all(job.suspensions == 0 for job in machine.run.jobs.values())


def test_those_that_ask_for_a_share_come_at_once_and_as_many_as_fit():
    machine = run([sharing(f"j{i}", share=0.3) for i in range(5)])
    starts = [job.started_s for job in machine.run.jobs.values()]
    assert starts[:3] == [0.0] * 3
    assert starts[3] > 0


def test_those_that_ask_for_shares_go_where_least_is_asked_for():
    used = [
        replace(a_profile(f"m{n}", [10.0]), busy={1: busy}) for n, busy in enumerate((0.4, 0.1, 0.1, 0.1))
    ]
    jobs = [sharing(f"j{n}", f"m{n}", share=0.25, submit_at=60.0 * (n > 1)) for n in range(4)]
    machine = run(jobs, gpus=2, profiles=used)
    assert [job.attempts[0].gpus for job in machine.run.jobs.values()] == [(0,), (1,), (1,), (0,)]


def test_a_gpu_that_is_free_is_better():
    machine = run([sharing(f"j{i}") for i in range(3)], gpus=3)
    assert all(job.current.role is not Role.SHARED for job in machine.run.jobs.values())


def test_those_that_are_slower_together_part_and_meet_no_more():
    jobs = [sharing("a", "large", 8000), sharing("b", "large", 8000), sharing("c", "large", 8000)]
    machine = run(jobs, interference=Interference(sharing_loss=0.3))
    assert all(job.state is JobState.COMPLETED for job in machine.run.jobs.values())
    b = machine.run.jobs[2]
    assert [attempt.role for attempt in b.attempts][:2] == [Role.SHARED, Role.PRIMARY]
    assert any(note.reason.why is Why.SLOWER_TOGETHER for note in b.story)
    assert [len(job.attempts) for job in machine.run.jobs.values()] == [1, 2, 1]
    assert machine.mechanism(Sharing).shares.costly.keys() == {("large", "large")}
    assert max(ends(machine)) == pytest.approx(2400, rel=0.06)


def test_one_that_wants_a_gpu_alone_goes_first():
    jobs = [sharing("a", steps=4000), a_job("plain", "plain", 1000, gpus=1), sharing("b", steps=1000)]
    machine = run(jobs)
    a, plain, b = machine.run.jobs.values()
    assert (a.ended_s, plain.started_s) == (400.0, 400.0)
    assert b.started_s == plain.ended_s


def test_when_the_holder_leaves_the_next_has_the_gpu():
    machine = run([sharing("short", steps=3000, share=0.5), sharing("long", steps=6000, share=0.5)])
    short, long = machine.run.jobs.values()
    assert long.attempts[0].role is Role.SHARED and len(long.attempts) == 1
    held = machine.ledger.held_from_s(long, long.attempts[0])
    assert held == short.ended_s


def test_the_bound_is_one_where_shares_and_none_mix():
    jobs = [sharing("asks", share=0.9, steps=10_000), *(sharing(f"j{i}", steps=10_000) for i in range(15))]
    machine = run(jobs, profiles=(replace(SMALL, busy={1: 0.05}, memory_mib=None), LARGE, PLAIN))
    bounds = bounds_of(machine)
    assert bounds.makespan_s is not None and bounds.makespan_s <= max(ends(machine))
