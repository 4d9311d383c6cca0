"""Random jobs that bounds are tried on."""

from hypothesis import strategies as st

from hpcsched.core.profile import Profile
from hpcsched.sim.bounds import BoundJob

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


def mean_jct(jobs, ends):
    return sum(end - job.submit_s for job, end in zip(jobs, ends, strict=True)) / len(jobs)
