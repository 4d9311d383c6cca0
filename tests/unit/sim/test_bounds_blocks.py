"""Bounds where hosts come and go, worked out by hand; and no schedule beats them."""

from __future__ import annotations

import math

import pytest
from boundscenes import SLACK, STEP_SLACK, job_sets, jobs_of, mean_jct, spec_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core.profile import Profile, cost_at
from hpcsched.policy import POLICIES
from hpcsched.sim import bounds as bounds_module
from hpcsched.sim.blocks import Block, joining, placed
from hpcsched.sim.bounds import BoundJob, lower_bound_s, mean_jct_bound_s
from hpcsched.sim.engine import Simulation

LINEAR = Profile(model="m", device="d", throughput={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
FLAT = Profile(model="m", device="d", throughput={1: 1.0})


def job(prof=LINEAR, steps=100, **changes):
    return BoundJob(profile=prof, steps=steps, **changes)


def both(jobs, *blocks, gpus=0):
    return lower_bound_s(jobs, gpus, blocks=blocks), mean_jct_bound_s(jobs, gpus, blocks=blocks)


def test_a_job_waits_for_the_first_allocation():
    late = Block(gpus=4, start_s=50.0)
    assert both([job()], late) == pytest.approx((75.0, 75.0))
    assert both([job(submit_s=60.0)], late) == pytest.approx((85.0, 25.0))


def test_a_job_goes_on_in_the_next_allocation():
    # 40 s on four GPUs do 160 of 200 steps; the rest is done in the second one.
    blocks = Block(gpus=4, lasts_s=40.0), Block(gpus=2, start_s=100.0)
    assert both([job(steps=200)], *blocks) == pytest.approx((120.0, 120.0))


def test_a_job_has_no_more_than_one_host_of_the_time_gives():
    # Two hosts of 2 GPUs are no 4 GPUs for a job on one host.
    blocks = Block(gpus=2, nodes=2, lasts_s=40.0), Block(gpus=4, start_s=40.0)
    assert both([job(steps=200)], *blocks)[0] == pytest.approx(40 + (200 - 80) / 4)
    # On two hosts it has them.
    assert both([job(steps=200, nodes=2)], *blocks[:1])[0] == math.inf
    assert both([job(steps=160, nodes=2, gpus_max=1)], *blocks[:1])[0] == math.inf
    assert both([job(steps=40, nodes=2, gpus_max=1)], *blocks[:1])[0] == pytest.approx(40.0)


def test_the_area_is_spread_over_the_gpus_of_each_time():
    # 600 GPU-seconds: 2 GPUs for 100 s, then 6 of them.
    jobs = [job(FLAT)] * 6
    bound_s, _ = both(jobs, Block(gpus=4, start_s=100.0), gpus=2)
    assert bound_s == pytest.approx(100 + 400 / 6)


def test_the_mean_counts_short_jobs_first_on_the_gpus_of_each_time():
    jobs = [job(FLAT, steps) for steps in (10, 20, 30)]
    # One GPU until 15, none until 40, then one: ends at 10, 55, 85.
    blocks = Block(gpus=1, lasts_s=15.0), Block(gpus=1, start_s=40.0)
    assert both(jobs, *blocks)[1] == pytest.approx((10 + 55 + 85) / 3)


def test_what_cannot_be_done_has_no_end():
    assert both([job(FLAT)] * 3, Block(gpus=1, lasts_s=250.0)) == (math.inf, math.inf)
    assert both([job(FLAT), job(FLAT, after=(0,))], Block(gpus=4, lasts_s=150.0)) == (math.inf, math.inf)
    assert both([job(FLAT)] * 3, Block(gpus=1, lasts_s=300.0))[0] == pytest.approx(300)


def test_the_lp_proves_more_than_area_and_path(monkeypatch):
    pytest.importorskip("scipy")
    # Jobs of 2 of 3 GPUs: one at a time. While there are 4, two.
    two = {"gpus_min": 2, "gpus_max": 2}
    jobs = [job(Profile(model="m", device="d", throughput={2: 1.0}), **two)] * 6
    blocks = Block(gpus=3), Block(gpus=1, start_s=150.0, lasts_s=100.0)
    with_lp, _ = both(jobs, *blocks)
    assert with_lp == pytest.approx(150 + 100 + (600 - 150 - 200))
    monkeypatch.setattr(bounds_module, "MAX_LP_JOBS", 0)
    assert both(jobs, *blocks)[0] < with_lp * 0.9


@pytest.mark.parametrize("hosts", [1, 2])
@given(job_sets())
@settings(max_examples=60)
def test_for_one_allocation_all_the_time_they_are_what_they_were(hosts, job_set):
    jobs, gpus = job_set
    # The same hosts in parts, one after the other, come to the same.
    parts = [
        Block(gpus=gpus, nodes=hosts, lasts_s=70.0),
        Block(gpus=gpus, nodes=hosts, start_s=70.0, lasts_s=5.5),
        Block(gpus=gpus, nodes=hosts, start_s=75.5),
    ]
    for bound_of in (lower_bound_s, mean_jct_bound_s):
        assert bound_of(jobs, gpus, hosts) == bound_of(jobs, 0, blocks=parts)


def some_blocks(most):
    """Blocks of hosts, at most `most` GPUs on each; the last one has so many, and stays."""
    one = st.builds(
        Block,
        gpus=st.integers(1, most),
        nodes=st.integers(1, 2),
        start_s=st.sampled_from([0.0, 0.0, 20.0, 200.0, 333.0]),
        lasts_s=st.sampled_from([30.0, 100.0, 400.0, math.inf]),
    )
    stays = st.builds(Block, gpus=st.just(most), start_s=st.sampled_from([0.0, 0.0, 150.0]))
    return st.tuples(st.lists(one, max_size=3), stays).map(lambda found: [*found[0], found[1]])


def random_schedule(jobs, blocks, rng):
    """When each job ends in a random schedule: stretches on hosts of the blocks, cut where these end.

    Suspends take no time here, and each stretch begins with a launch.
    """
    there = [(host, one.block) for one in placed(blocks) for host in one.hosts]
    free = {host: [block.start_s] * block.gpus for host, block in there}
    ready_s = [job.submit_s for job in jobs]
    left = [float(job.steps) for job in jobs]
    launched, ends = [False] * len(jobs), {}
    while len(ends) < len(jobs):
        can = [i for i, job in enumerate(jobs) if i not in ends and all(b in ends for b in job.after)]
        i = rng.choice(can)
        job = jobs[i]
        fits = [(host, block) for host, block in there if block.gpus >= job.gpus_min]
        host, block = rng.choice(fits)
        if block.lasts_s < math.inf and rng.random() < 0.2:
            host, block = there[-1]  # so that it ends
        most = block.gpus if job.gpus_max is None else min(block.gpus, job.gpus_max)
        count = rng.randint(job.gpus_min, most)
        free[host].sort()
        begin = max([ready_s[i], free[host][count - 1], *(ends[b] for b in job.after)])
        resized = job.in_place and launched[i]
        launch = (
            0.0 if resized else cost_at((job.profile.resume_s if launched[i] else job.profile.start_s), count)
        )
        trains = begin + (launch or 0.0)
        rate = job.profile.rate(count)
        end = trains + left[i] / rate
        until = min(block.end_s, end if rng.random() < 0.5 else trains + rng.random() * (end - trains))
        if until <= begin:
            if begin >= block.end_s:
                free[host] = [math.inf] * block.gpus
                there = [one for one in there if one[0] != host]
            continue
        launched[i] = True
        done = until >= end
        left[i] -= max(0.0, until - trains) * rate
        if done:
            ends[i] = end
        ready_s[i] = until
        free[host][:count] = [until] * count
    return [ends[i] for i in range(len(jobs))]


@given(job_sets(), st.data(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_no_random_schedule_beats_them(job_set, data, rng):
    jobs, gpus = job_set
    blocks = data.draw(some_blocks(gpus))
    bound, jct_bound = both(jobs, *blocks)
    for _ in range(5):
        ends = random_schedule(jobs, blocks, rng)
        assert max(ends) >= bound * SLACK
        assert mean_jct(jobs, ends) >= jct_bound * SLACK


@st.composite
def runs(draw):
    """(specs, profiles, blocks): what the simulator takes."""
    gpus = draw(st.integers(1, 4))
    specs, models = draw(spec_sets(gpus, most=7))
    return specs, models, draw(some_blocks(gpus))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(runs())
@settings(max_examples=25)
def test_no_policy_beats_them(policy, run):
    specs, models, blocks = run
    machine = Simulation(specs, models, policy=policy, happenings=joining(placed(blocks))).run()
    bound, jct_bound = both(jobs_of(machine), *blocks)
    ends = [one.ended_s for one in machine.run.jobs.values()]
    assert max(ends) >= bound * STEP_SLACK
    assert mean_jct(jobs_of(machine), ends) >= jct_bound * STEP_SLACK
