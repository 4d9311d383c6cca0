"""Large simulations leave out what only people look at: they decide the same, in little time and memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, Suspend, Terminate
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device
from hpcsched.core.resources.gpus import FreeGpus
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import a_job, a_profile
from hpcsched.testing.invariants import check

PROFILES = (
    a_profile("slow", [1.0, 1.9, 2.5, 2.8], start_s=3.0, suspend_s=1.0),
    a_profile("flat", [2.0, 2.1], start_s=0.0, suspend_s=0.5, resume_s=2.0),
    a_profile("fixed", {1: 1.0}),
)
POLICIES = (
    ("marble", {"promote": "pays"}),
    ("marble", {"promote": "always"}),
    ("marble", {"promote": "never"}),
    ("exclusive", {}),
)
TIMES = st.sampled_from([0.0, 0.0, 5.0, 5.0]) | st.integers(0, 400).map(lambda n: n / 2)
BETWEEN = st.integers(0, 200).map(lambda n: n + 0.3)
"""Not with an arrival: which of two things at the same time comes first, the watching decides."""


@st.composite
def job_sets(draw, *, after: bool):
    jobs = []
    for i in range(draw(st.integers(1, 9))):
        least = draw(st.integers(1, 3))
        jobs.append(
            a_job(
                f"j{i}",
                draw(st.sampled_from(["slow", "slow", "flat", "fixed"])),
                steps=draw(st.integers(1, 300)),
                gpus=(least, draw(st.sampled_from([None, least, least + 1]))),
                nodes=draw(st.sampled_from([1, 1, 1, 2])),
                submit_at=draw(TIMES),
                after=(f"j{draw(st.integers(0, i - 1))}",) if after and i and draw(st.booleans()) else (),
            )
        )
    return draw(st.permutations(jobs))


happenings = st.lists(
    st.builds(ev.CancelRequested, at=BETWEEN, job_id=st.just(1))
    | st.builds(ev.DeviceLost, at=BETWEEN, gpu=st.integers(0, 3), why=st.just("gone"))
    | st.builds(ev.DeviceFound, at=BETWEEN, gpu=st.integers(0, 3), why=st.just("well")),
    max_size=3,
)


def decisions(jobs, policy, *, stories, happenings=(), **place):
    """What was decided when, by the names of the jobs; and when and how each ended."""
    found = []

    def watch(event, actions, machine: Machine) -> None:
        check(machine)
        for action in actions:
            if isinstance(action, (Launch, Suspend, Terminate)):
                name = machine.run.jobs[action.job_id].spec.name
                gpus = getattr(action, "gpus", ())
                found.append((action.at, type(action).__name__, name, gpus, getattr(action, "role", None)))

    name, options = policy
    machine = Simulation(
        jobs,
        PROFILES,
        policy=name,
        options=options,
        stories=stories,
        happenings=happenings,
        watch=watch,
        **place,
    ).run()
    ends = {
        job.spec.name: (job.submit_s, job.started_s, job.ended_s, job.state, job.step, job.repeated)
        for job in machine.run.jobs.values()
    }
    return found, ends


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join([p[0], *p[1].values()]))
@settings(max_examples=examples(150))
@given(jobs=job_sets(after=False), gpus=st.integers(3, 5), nodes=st.integers(2, 3))
def test_a_simulation_without_stories_decides_the_same(policy, jobs, gpus, nodes):
    place = {"gpus": gpus, "nodes": nodes}
    assert decisions(jobs, policy, stories=False, **place) == decisions(jobs, policy, stories=True, **place)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(jobs=st.booleans().flatmap(lambda after: job_sets(after=after)), happenings=happenings)
def test_also_where_jobs_are_spoken_of_before_they_come(jobs, happenings):
    rest = {"gpus": 4, "nodes": 2, "happenings": happenings}
    full = decisions(jobs, POLICIES[0], stories=True, **rest)
    assert decisions(jobs, POLICIES[0], stories=False, **rest) == full


def test_jobs_are_known_when_they_come_and_looked_at_where_that_can_change_something():
    jobs = [a_job(f"j{i}", "fixed", 10, gpus=1, submit_at=10.0 * (i // 2)) for i in range(20)]
    wide = [a_job(f"w{i}", "slow", steps, submit_at=100.0) for i, steps in enumerate((100, 100, 500))]
    late = a_job("late", "fixed", 10, gpus=1, submit_at=200.0)
    known, observed, events = [], set(), Counter()

    def watch(event, actions, machine: Machine) -> None:
        events[type(event)] += 1
        if isinstance(event, ev.JobsSubmitted):
            known.append((event.at, len(machine.run.jobs), machine.run.unfinished))
        if isinstance(event, ev.ProgressObserved):
            for seen in event.progress:
                job = machine.run.active[seen.job_id]
                assert seen.attempt == job.attempt
                observed.add(job.spec.name)

    machine = Simulation([*wide, late, *jobs], PROFILES, gpus=11, stories=False, watch=watch).run()
    assert machine.run.finished
    assert machine.run.changed == set()
    # Those that come are in before those that leave at the same time are out.
    assert known == [
        (0.0, 0, 0),
        (0.0, 2, 2),
        *((10.0 * i, 2 * i + 2, 4) for i in range(1, 10)),
        (100.0, 23, 5),
        (200.0, 24, 2),
    ]
    assert [job.spec.name for job in machine.run.jobs.values() if job.attempts[0].role == "secondary"] == [
        "w2"
    ]
    assert observed == {"w2"}
    w2 = next(job for job in machine.run.jobs.values() if job.spec.name == "w2")
    assert [attempt.role for attempt in w2.attempts] == ["secondary", "primary"]
    assert events[ev.TimerFired] == 0


@pytest.mark.slow
def test_a_million_jobs_would_fit_in_a_gibibyte():
    def peak(count: int) -> int:
        gc.collect()
        tracemalloc.start()
        jobs = [
            a_job(f"job-{i}", "fixed", 500 + i, gpus=1, submit_at=100.5 * i, kind="replay")
            for i in range(count)
        ]
        Simulation(jobs, PROFILES, gpus=8, nodes=2, stories=False).run()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)
    assert (peak(2000) - peak(300)) / 1700 < 2**30 / 1e6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7))), st.sets(st.integers(0, 7)))
def test_free_gpus_are_counted_as_they_come_and_go(changes, free):
    devices = {i: Device(index=i, host="ab"[i // 4], kind="test", handle=str(i)) for i in range(8)}
    kept, plain = FreeGpus(devices, free), set(free)
    for add, gpu in changes:
        (kept.add if add else kept.discard)(gpu)
        (plain.add if add else plain.discard)(gpu)
    assert kept == plain and len(kept) == len(plain)
    assert {host: kept.on(host) for host in "ab"} == {
        host: sorted(gpu for gpu in plain if devices[gpu].host == host) for host in "ab"
    }
    assert kept.by_host() == {host: len(kept.on(host)) for host in "ab"}
    assert kept - {0} == plain - {0} and kept | {0} == plain | {0}
