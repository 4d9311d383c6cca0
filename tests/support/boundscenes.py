"""Random jobs that bounds are tried on."""

from dataclasses import replace

from hypothesis import strategies as st

from hpcsched.core.model import JobState
from hpcsched.core.profile import Profile
from hpcsched.sim.bounds import BoundJob
from hpcsched.testing.builders import a_job

SLACK = 1 - 1e-9
STEP_SLACK = 1 - 1e-6
"""A step that is all but done counts as done in the simulator, by a millionth of a step."""
costs = st.one_of(
    st.none(), st.floats(0, 50), st.dictionaries(st.integers(1, 4), st.floats(0, 50), min_size=1)
)


@st.composite
def profiles(draw):
    table = draw(st.dictionaries(st.integers(1, 5), st.floats(0.1, 20), min_size=1))
    start, suspend, resume = draw(st.tuples(costs, costs, costs))
    return Profile(model="m", device="d", throughput=table, start_s=start, suspend_s=suspend, resume_s=resume)


@st.composite
def job_sets(draw, types=()):
    """(jobs, gpus): every job may depend on earlier ones, and be measured on some of these types of GPU."""
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
                on_types={each: draw(profiles()) for each in types if draw(st.booleans())},
            )
        )
    return jobs, gpus


@st.composite
def spec_sets(draw, gpus, hosts=1, *, most, strategies=({"kind": "ddp"},)):
    """(specs, profiles): up to `most` jobs for the simulator, each may depend on earlier ones."""
    models = [
        replace(profile, model=f"m{i}") for i, profile in enumerate(draw(st.lists(profiles(), min_size=3)))
    ]
    specs = []
    for i in range(draw(st.integers(1, most))):
        least = draw(st.sampled_from([1, 1, gpus]))
        before = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()
        specs.append(
            a_job(
                f"j{i}",
                draw(st.sampled_from(models)).model,
                draw(st.integers(20, 3000)),
                gpus=(least, draw(st.none() | st.integers(least, gpus))),
                submit_at=draw(st.sampled_from([0.0, 0.0, 20.0, 300.0])),
                after=tuple(f"j{k}" for k in sorted(before)),
                nodes=draw(st.sampled_from([1, 1, hosts])),
                strategy=draw(st.sampled_from(strategies)),
            )
        )
    return specs, models


def jobs_of(machine, types=()):
    """The jobs of a simulation in which all completed, for the bounds; the GPUs were of these types."""
    done = list(machine.run.jobs.values())
    assert all(job.state is JobState.COMPLETED for job in done)
    index = {job.spec.name: i for i, job in enumerate(done)}
    return [
        BoundJob(
            profile=machine.estimates.profile(job, ""),
            on_types={each: machine.estimates.profile(job, each) for each in types},
            mixes=job.spec.mixes_types,
            steps=job.spec.steps,
            submit_s=job.spec.submit_at,
            gpus_min=job.spec.gpus_min,
            gpus_max=job.spec.gpus_max,
            nodes=job.spec.nodes,
            after=tuple(index[before] for before in job.spec.after),
        )
        for job in done
    ]


def mean_jct(jobs, ends):
    return sum(end - job.submit_s for job, end in zip(jobs, ends, strict=True)) / len(jobs)
