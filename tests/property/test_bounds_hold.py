"""No schedule beats the bound: not random ones, with suspends and changes of GPU counts."""

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.profile import Profile, cost_at
from hpcsched.sim.bounds import BoundJob, lower_bound_s

SLACK = 1 - 1e-9
costs = st.one_of(
    st.none(), st.floats(0, 50), st.dictionaries(st.integers(1, 4), st.floats(0, 50), min_size=1)
)


@st.composite
def profiles(draw):
    table = draw(st.dictionaries(st.integers(1, 5), st.floats(0.1, 20), min_size=1))
    start, suspend, resume = draw(st.tuples(costs, costs, costs))
    return Profile(model="m", device="d", throughput=table, start_s=start, suspend_s=suspend, resume_s=resume)


@st.composite
def job_sets(draw):
    """(jobs, gpus): every job may depend on earlier ones."""
    gpus = draw(st.integers(1, 5))
    jobs = []
    for i in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, gpus))
        jobs.append(
            BoundJob(
                profile=draw(profiles()),
                steps=draw(st.integers(1, 300)),
                submit_s=draw(st.sampled_from([0.0, 0.0, 20.0, 300.0])),
                gpus_min=least,
                gpus_max=draw(st.none() | st.integers(least, gpus + 2)),
                after=tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else (),
                in_place=draw(st.booleans()),
            )
        )
    return jobs, gpus


def random_makespan(jobs, gpus, rng):
    """The makespan of a random schedule: every stretch of a job takes the GPUs that come free first.

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
    return max(ends.values())


@given(job_sets(), st.randoms(use_true_random=False))
def test_no_random_schedule_beats_the_bound(job_set, rng):
    jobs, gpus = job_set
    bound = lower_bound_s(jobs, gpus)
    assert bound is not None
    assert min(random_makespan(jobs, gpus, rng) for _ in range(10)) >= bound * SLACK


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
    assert bound is not None
    assert abs(bound - (submit + best)) <= 1e-9 * (submit + best)


@given(job_sets())
def test_more_gpus_never_raise_it_and_more_work_never_lowers_it(job_set):
    jobs, gpus = job_set
    bound = lower_bound_s(jobs, gpus)
    assert bound is not None
    assert lower_bound_s(jobs, gpus + 1) <= bound / SLACK
    assert lower_bound_s([*jobs, jobs[0]], gpus) >= bound * SLACK
