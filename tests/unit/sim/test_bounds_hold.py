"""No schedule beats the bounds: no random one with suspends and changes of GPU counts, no simulated one."""

from dataclasses import replace

import pytest
from boundscenes import SLACK, STEP_SLACK, job_sets, jobs_of, mean_jct, profiles, spec_sets
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.profile import Profile, cost_at
from hpcsched.sim.bounds import BoundJob, lower_bound_s, mean_jct_bound_s
from hpcsched.sim.engine import Simulation


def random_schedule(jobs, gpus, rng):
    """When each job ends in a random schedule: every stretch of a job takes the GPUs that come free first.

    Stretches are placed one by one, on any allowed count, each job's in their order. Now and then
    one is cut short during its launch, and so gets nothing done but the next one is a resume.
    """
    free_s = [0.0] * gpus
    ready_s = [job.submit_s for job in jobs]
    left = [float(job.steps) for job in jobs]
    launched = [False] * len(jobs)
    cuts = [rng.randrange(4) for _ in jobs]
    ends = {}
    while len(ends) < len(jobs):
        can = [i for i, job in enumerate(jobs) if i not in ends and all(b in ends for b in job.after)]
        i = rng.choice(can)
        job, profile = jobs[i], jobs[i].profile
        most = gpus if job.gpus_max is None else min(gpus, job.gpus_max)
        count = rng.randint(job.gpus_min, most)
        chosen = sorted(range(gpus), key=lambda g: free_s[g])[:count]
        begin = max([ready_s[i], *(free_s[g] for g in chosen), *(ends[b] for b in job.after)])

        resized = job.in_place and launched[i]
        launch = 0.0 if resized else cost_at(profile.resume_s if launched[i] else profile.start_s, count)
        suspend = 0.0 if job.in_place else cost_at(profile.suspend_s, count)
        launched[i] = True
        share = 1.0
        if cuts[i] > 0:
            cuts[i] -= 1
            share = rng.choice([0.0, 0.5, 0.9, rng.random()])
        cut_in_launch = share == 0.0 and not resized
        work = left[i] * share
        end = begin + (launch or 0.0) * (rng.random() if cut_in_launch else 1.0) + work / profile.rate(count)
        left[i] -= work
        if share == 1.0:
            ends[i] = end
        else:
            end += suspend or 0.0
            ready_s[i] = end
        for g in chosen:
            free_s[g] = end
    return [ends[i] for i in range(len(jobs))]


@given(job_sets(), st.randoms(use_true_random=False))
def test_no_random_schedule_beats_the_bounds(job_set, rng):
    jobs, gpus = job_set
    bound, jct_bound = lower_bound_s(jobs, gpus), mean_jct_bound_s(jobs, gpus)
    for _ in range(10):
        ends = random_schedule(jobs, gpus, rng)
        assert max(ends) >= bound * SLACK
        assert mean_jct(jobs, ends) >= jct_bound * SLACK


@st.composite
def runs(draw):
    """(specs, profiles, gpus, hosts): what the simulator takes."""
    gpus, hosts = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    return *draw(spec_sets(gpus, hosts, most=8)), gpus, hosts


@pytest.mark.long
@given(runs(), st.sampled_from([("marble", {"promote": "always"}), ("marble", {}), ("exclusive", {})]))
def test_no_simulated_run_beats_the_bounds(run, policy):
    specs, models, gpus, hosts = run
    name, options = policy
    machine = Simulation(specs, models, gpus=gpus, nodes=hosts, policy=name, options=options).run()
    jobs, ends = jobs_of(machine), [job.ended_s for job in machine.run.jobs.values()]
    assert max(ends) >= lower_bound_s(jobs, gpus, hosts) * STEP_SLACK
    assert mean_jct(jobs, ends) >= mean_jct_bound_s(jobs, gpus, hosts) * STEP_SLACK


@given(profiles(), st.integers(1, 300), st.integers(1, 5), st.floats(0, 100))
def test_for_one_job_whose_restarts_cost_no_less_than_its_start_it_is_the_optimum(
    profile, steps, gpus, submit
):
    same = Profile(
        model="m",
        device="d",
        throughput=profile.throughput,
        start_s=profile.start_s,
        resume_s=profile.start_s,
    )
    best = min(steps / same.rate(g) + (cost_at(same.start_s, g) or 0.0) for g in range(1, gpus + 1))
    bound = lower_bound_s([BoundJob(profile=same, steps=steps, submit_s=submit)], gpus)
    assert abs(bound - (submit + best)) <= 1e-9 * (submit + best)
    jct_bound = mean_jct_bound_s([BoundJob(profile=same, steps=steps, submit_s=submit)], gpus)
    assert abs(jct_bound - best) <= 1e-9 * (submit + best)


@given(job_sets())
@pytest.mark.long
def test_more_gpus_never_raise_them_and_more_work_never_lowers_them(job_set):
    jobs, gpus = job_set
    tight = 1 - 1e-6  # the LP is solved to 1e-7
    together = [replace(job, submit_s=0.0, after=()) for job in jobs]  # else the cuts are not the best ones
    for bound_of, those in ((lower_bound_s, jobs), (mean_jct_bound_s, together)):
        bound = bound_of(those, gpus)
        assert bound_of(those, gpus + 1) * tight <= bound
        assert bound_of([replace(those[0], steps=2 * those[0].steps), *those[1:]], gpus) >= bound * tight
    assert lower_bound_s([*jobs, jobs[0]], gpus) >= lower_bound_s(jobs, gpus) * tight
