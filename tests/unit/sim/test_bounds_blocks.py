"""Bounds where hosts come and go, worked out by hand; and no schedule beats them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from boundscenes import SLACK, STEP_SLACK, job_sets, jobs_of, mean_jct, profiles, spec_sets
from budget import slow
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.cli.run.allocations import first_type
from hpcsched.core.profile import Profile, cost_at
from hpcsched.policy import POLICIES
from hpcsched.sim import bounds as bounds_module
from hpcsched.sim.blocks import Block, joining, placed
from hpcsched.sim.bounds import MAX_LP_JOBS, BoundJob, lower_bound_s, mean_jct_bound_s
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


FAST = Profile(model="m", device="fast one", throughput={n: 4.0 * n for n in range(1, 5)})
ON_FAST = {"fast one": FAST}


def test_a_job_is_on_the_fastest_gpus_of_each_time():
    blocks = Block(gpus=2), Block(gpus=1, gpu_type="fast one", start_s=20.0, lasts_s=10.0)
    # 40 steps on two GPUs in 20 s, 40 on the fast one in 10 s, and the rest on two again.
    assert both([job(steps=100, on_types=ON_FAST)], *blocks) == pytest.approx((40.0, 40.0))
    assert both([job(steps=100)], *blocks) == pytest.approx((50.0, 50.0))
    # No job has GPUs of both types at a time, unless it can mix them: then they are taken for fast ones.
    both_there = Block(gpus=2), Block(gpus=1, gpu_type="fast one")
    assert both([job(steps=100, on_types=ON_FAST)], *both_there) == pytest.approx((25.0, 25.0))
    wide = {"nodes": 2, "gpus_max": 1, "on_types": ON_FAST}
    with pytest.raises(ValueError, match="needs 1 GPUs, there are 0 for it"):
        both([job(**wide)], *both_there)
    assert both([job(**wide, mixes=True)], *both_there) == pytest.approx((25.0, 25.0))


def test_a_gpu_counts_for_what_the_jobs_gain_by_it_at_most():
    short = [job(steps=10, gpus_max=1, on_types=ON_FAST)] * (MAX_LP_JOBS + 1)
    blocks = Block(gpus=2), Block(gpus=1, gpu_type="fast one")
    # 10 s on each of two, 2.5 s on the other one: together 0.6 jobs a second.
    assert both(short, *blocks)[0] == pytest.approx(len(short) / 0.6)
    mixing = [replace(one, mixes=True) for one in short]
    assert both(mixing, *blocks)[0] == pytest.approx(2.5 * len(short) / 3)
    # One that is as fast on all of them has each count as one.
    same = [*short[1:], job(steps=10, gpus_max=1)]
    assert both(same, *blocks)[0] == pytest.approx((10 + 2.5 * len(short[1:])) / 3)


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


@pytest.mark.long
@pytest.mark.parametrize("hosts", [slow(1), 2])
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


def some_blocks(most, types=("",), hosts=1):
    """Blocks of hosts, at most `most` GPUs on each; the last one has so many, on `hosts`, and stays."""
    one = st.builds(
        Block,
        gpus=st.integers(1, most),
        gpu_type=st.sampled_from(types),
        nodes=st.integers(1, 2),
        start_s=st.sampled_from([0.0, 0.0, 20.0, 200.0, 333.0]),
        lasts_s=st.sampled_from([30.0, 100.0, 400.0, math.inf]),
    )
    starts = st.sampled_from([0.0, 0.0, 150.0])
    all_of_it = {"gpus": st.just(most), "gpu_type": st.sampled_from(types), "nodes": st.just(hosts)}
    stays = st.builds(Block, start_s=starts, **all_of_it)
    return st.tuples(st.lists(one, max_size=3), stays).map(lambda found: [*found[0], found[1]])


def random_schedule(jobs, blocks, rng):
    """When each job ends in a random schedule: stretches on hosts of the blocks, cut where these end.

    Suspends take no time here, and each stretch begins with a launch.
    """
    there = [(host, one.block) for one in placed(blocks) for host in one.hosts]
    free = {host: [block.start_s] * block.gpus for host, block in there}
    ready_s = [job.submit_s for job in jobs]
    left = [float(job.steps) for job in jobs]
    launched, ends, stretches = [False] * len(jobs), {}, 0
    while len(ends) < len(jobs):
        can = [i for i, job in enumerate(jobs) if i not in ends and all(b in ends for b in job.after)]
        i = rng.choice(can)
        job, profile = jobs[i], jobs[i].profile
        fits = [(host, block) for host, block in there if block.gpus >= job.gpus_min]
        host, block = rng.choice(fits)
        if block.lasts_s < math.inf and rng.random() < 0.2:
            host, block = there[-1]  # so that it ends
        profile = job.on_types.get(block.gpu_type, job.profile)
        most = block.gpus if job.gpus_max is None else min(block.gpus, job.gpus_max)
        count = rng.randint(job.gpus_min, most)
        free[host].sort()
        begin = max([ready_s[i], free[host][count - 1], *(ends[b] for b in job.after)])
        resized = job.in_place and launched[i]
        launch = 0.0 if resized else cost_at(profile.resume_s if launched[i] else profile.start_s, count)
        trains = begin + (launch or 0.0)
        rate = profile.rate(count)
        end = trains + left[i] / rate
        stretches += 1
        whole = stretches > 100 or rng.random() < 0.5  # all that shrinks comes to an end
        until = min(block.end_s, end if whole else trains + rng.random() * (end - trains))
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


@pytest.mark.long
@pytest.mark.parametrize("types", [("",), slow(("", "fast one", "slow one"))])
@given(st.data(), st.randoms(use_true_random=False))
@settings(max_examples=75)
def test_no_random_schedule_beats_them(types, data, rng):
    jobs, gpus = data.draw(job_sets(types[1:]))
    blocks = data.draw(some_blocks(gpus, types))
    bound, jct_bound = both(jobs, *blocks)
    for _ in range(5):
        ends = random_schedule(jobs, blocks, rng)
        assert max(ends) >= bound * SLACK
        assert mean_jct(jobs, ends) >= jct_bound * SLACK


def no_policy_beats_them(policy, specs, models, blocks, on_types):
    there = joining(placed(blocks))
    machine = Simulation(specs, models, on_types=on_types, policy=policy, happenings=there).run()
    jobs = jobs_of(machine, on_types)
    bound, jct_bound = both(jobs, *blocks)
    ends = [one.ended_s for one in machine.run.jobs.values()]
    assert max(ends) >= bound * STEP_SLACK
    assert mean_jct(jobs, ends) >= jct_bound * STEP_SLACK


@st.composite
def runs(draw):
    """(specs, profiles, blocks): what the simulator takes."""
    gpus = draw(st.integers(1, 4))
    specs, models = draw(spec_sets(gpus, most=7))
    return specs, models, draw(some_blocks(gpus))


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(runs())
@settings(max_examples=25)
def test_no_policy_beats_them(policy, run):
    no_policy_beats_them(policy, *run, on_types={})


VSW = {"kind": "vsw", "local_batch": 8, "global_batch": [8, 64]}


@st.composite
def runs_on_types(draw):
    """The same on GPUs of several types, for which some models are measured; some jobs can mix these."""
    types = "old one", "fast one", "slow one"
    gpus, hosts = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    strategies = draw(st.sampled_from([({"kind": "ddp"},), ({"kind": "ddp"}, VSW)]))
    specs, models = draw(spec_sets(gpus, hosts, most=7, strategies=strategies))
    blocks = draw(some_blocks(gpus, types, hosts))
    on_types = {
        each: [replace(draw(profiles()), model=one.model) for one in models if draw(st.booleans())]
        for each in types
        if each != first_type(blocks)
    }
    return specs, models, blocks, on_types


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(runs_on_types())
@settings(max_examples=15)
def test_no_policy_beats_them_on_gpus_of_several_types(policy, run):
    no_policy_beats_them(policy, *run)
