"""Trainings on CPU cores in a simulation: how their configuration is found, and who has which cores."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

import pytest
from budget import examples, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.core import events as ev
from hpcsched.core.mechanisms.cpu.layout import cores_of, counted
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.model import Ended, JobState
from hpcsched.core.reasons import Why
from hpcsched.errors import ConfigError
from hpcsched.planning.ps.model import NetworkLink, PsModel, usage
from hpcsched.planning.ps.training import PsTraining
from hpcsched.planning.ps.whatif.best import NODE_CORES, best, best_fixed
from hpcsched.planning.ps.whatif.optimus import FIRST_NODES, NODE_INTERVAL_S
from hpcsched.policy.cpu.configurations import START as FIRST_PART
from hpcsched.policy.cpu.dtconfig import MOST_CHANGES, NO_WORSE
from hpcsched.sim.engine import Simulation
from hpcsched.sim.fixed_nodes import Rule
from hpcsched.testing.builders import a_core_job, a_job, a_profile
from hpcsched.testing.invariants import check
from profiles.ps.nearchus import CLUSTERS, GBPS, WORKLOADS, workload

A, B = CLUSTERS["A"], CLUSTERS["B"]
PLAIN = PsModel(batch_cpu_s=10.0, parameter_bytes=1e6, weak=True, staleness=1)
LONG = 2**40
"""Steps: of a training that goes on as long as one looks."""


def a_training(name, model, cpus, steps=LONG, **rest):
    return replace(a_core_job(name, cpus, steps=steps, **rest), model=model)


def simulated(jobs, trainings, cpus, *, until=inf, rule="dtconfig", **rest):
    """The machine in the end; what must always hold is checked after each event."""
    made = Rule.of(rule, trainings, cpus)
    simulation = Simulation(
        jobs,
        (),
        cpus=cpus,
        trainings=made.trainings,
        make=made.make,
        watch=lambda event, actions, machine: check(machine),
        **rest,
    )
    return simulation.run(until=until)


def alone(training, cpus, *, until=86_400.0, **rest):
    """The job of a training that has all cores for itself, and its search in the end."""
    machine = simulated([a_training("it", "m", cpus)], {"m": training}, cpus, until=until, **rest)
    return machine.run.jobs[1], machine.mechanism(Cpu).cores.of[1].memory


def rates(job, training):
    return [usage(training.model, each.seats, training.link).rate for each in job.attempts]


def reasons(job):
    return [each.why.why for each in job.attempts]


# -- one training --------------------------------------------------------------------------------------


@cache
def found_alone(name, letter):
    cluster = CLUSTERS[letter]
    training = PsTraining(model=workload(name, cluster), link=cluster.link)
    return training, *alone(training, int(cluster.budget))


@pytest.mark.parametrize("letter", CLUSTERS)
@pytest.mark.parametrize("name", [name if name == "ResNet-50" else slow(name) for name in WORKLOADS])
@pytest.mark.long
def test_the_search_ends_near_the_best_there_is(name, letter):
    cluster = CLUSTERS[letter]
    training, job, search = found_alone(name, letter)
    # On B few servers suffice: more of them need not be tried.
    most = (
        {"most_servers": 8, "most_workers": 36} if letter == "A" else {"most_servers": 4, "most_workers": 72}
    )
    most_there_is = best(training.model, cluster.budget, cluster.link, **most).usage.rate
    assert search.rests
    assert rates(job, training)[-1] >= 0.9 * most_there_is
    assert cores_of(job.current.seats) <= cluster.budget
    assert reasons(job)[0] is Why.SEATED
    assert all(each.ended is Ended.RESIZED for each in job.attempts[:-1])


@pytest.mark.parametrize("name", ["ResNet-50", "Inception-V3"])
def test_it_is_faster_than_the_best_fixed_nodes_where_links_are_slow(name):
    training, job, _ = found_alone(name, "A")
    assert rates(job, training)[-1] > 1.1 * best_fixed(training.model, A.budget, A.link).usage.rate


def test_a_full_link_leads_to_more_servers():
    job = found_alone("Inception-V3", "A")[1]
    before = None
    for each in job.attempts:
        if each.why.why is Why.NETWORK_BOTTLENECK:
            assert counted(each.seats)[0] > counted(before.seats)[0]
            assert max(before.usage.net) == each.why.facts["net"] > 0
        before = each
    assert Why.NETWORK_BOTTLENECK in reasons(job)
    assert counted(job.current.seats)[0] >= 3


@pytest.mark.long
def test_no_link_is_full_on_the_faster_network():
    for name in WORKLOADS:
        assert Why.NETWORK_BOTTLENECK not in reasons(found_alone(name, "B")[1])


def test_processes_that_do_not_use_more_lead_to_more_workers():
    training = PsTraining(
        model=PsModel(batch_cpu_s=10.0, parameter_bytes=1e6, most_cores=4.0, weak=True, staleness=1)
    )
    job, search = alone(training, 64)
    assert Why.UTILISATION_BOTTLENECK in reasons(job)
    for before, each in pairwise(job.attempts):
        if each.why.why is Why.UTILISATION_BOTTLENECK:
            assert counted(each.seats)[1] > counted(before.seats)[1]
    assert search.rests and rates(job, training)[-1] >= 0.85 * 64 / 10.0


def test_a_change_waits_for_the_processes_that_join_and_for_what_is_measured():
    training = PsTraining(model=PLAIN, start_s=7.0, stable_s=20.0, build_s=5.0, change_s=2.0)
    job, _ = alone(training, 20)
    step_s = 2.0 / rates(job, training)[0]
    first, second = job.attempts[:2]
    joins = len(second.seats) > len(first.seats)
    assert 27.0 + (5.0 if joins else 0.0) + 2.0 <= second.start_s <= 27.0 + 5.0 + 2.0 + step_s
    assert first.usage is not None
    whole_s = sum(after.start_s - before.start_s for before, after in pairwise(job.attempts))
    assert whole_s >= 22.0 * (len(job.attempts) - 1)


def test_a_training_that_has_become_slower_at_rest_is_searched_for_anew():
    training = PsTraining(model=PLAIN)
    rested, search = alone(training, 20, until=3600.0)
    assert search.rests
    seen = rested.current.usage
    about = {"job_id": 1, "attempt": rested.attempt, "net": seen.net, "samples": 30, "stable": True}
    for factor, anew in ((0.95, False), (0.85, True)):
        cpu = tuple(factor * cores for cores in seen.cpu)
        slower = ev.UsageMeasured(at=3700.0, rate=factor * seen.rate, cpu=cpu, **about)
        job, _ = alone(training, 20, until=4300.0, happenings=[slower])
        assert (len(job.attempts) > len(rested.attempts)) is anew


def test_what_is_simulated_twice_is_the_same():
    training = PsTraining(model=workload("ResNet-50", A), link=A.link)
    jobs = [a_training(f"j{i}", "m", 60, 2000, submit_at=100.0 * i) for i in range(3)]
    one, other = (simulated(jobs, {"m": training}, 100) for _ in range(2))
    for job in one.run.jobs.values():
        assert job.attempts == other.run.jobs[job.id].attempts
        assert job.story == other.run.jobs[job.id].story


# -- several trainings on the same cores ---------------------------------------------------------------


def test_three_share_the_cores_and_grow_as_others_end():
    """Each starts at once with its part of the budget; the last one has all of the cores in the end."""
    steps = (3000, 6000, 20_000)
    jobs = [a_training(f"j{i}", "m", 30, steps[i]) for i in range(3)]
    machine = simulated(jobs, {"m": PsTraining(model=PLAIN)}, 30)
    found = list(machine.run.jobs.values())
    assert all(job.state is JobState.COMPLETED and job.step == job.spec.steps for job in found)
    assert [job.started_s for job in found] == [0.0] * 3
    assert [cores_of(job.attempts[0].seats) for job in found] == pytest.approx([FIRST_PART * 30] * 3)
    first, second, last = sorted(found, key=lambda job: job.ended_s)
    assert (first.id, second.id, last.id) == (1, 2, 3)
    alone_s = [each for each in last.attempts if each.start_s > second.ended_s]
    assert alone_s and cores_of(last.current.seats) > 0.9 * 30
    for time_s in {each.start_s for job in found for each in job.attempts}:
        held = [
            cores_of(each.seats)
            for job in found
            for each in job.attempts
            if each.start_s <= time_s < (each.end_s or inf)
        ]
        assert sum(held) <= 30 + 1e-9


def test_who_comes_first_starts_first():
    """The third cannot start before the second, which waits for more cores than it."""
    jobs = [
        a_training("all", "m", 10, 3000),
        a_training("large", "m", 40, 300, submit_at=1000.0),
        a_training("small", "m", 2, 300, submit_at=1001.0),
    ]
    machine = simulated(jobs, {"m": PsTraining(model=PLAIN)}, 10)
    first, large, small = machine.run.jobs.values()
    assert all(job.state is JobState.COMPLETED for job in machine.run.jobs.values())
    assert 1001.0 < large.started_s <= small.started_s
    assert large.started_s >= first.ended_s


def test_a_training_beside_a_job_on_a_gpu():
    jobs = [a_training("ps", "m", 10, 200), a_job("gpu", "g", 100)]
    simulation = Simulation(
        jobs,
        [a_profile("g", [2.0])],
        gpus=1,
        cpus=10,
        trainings={"m": PsTraining(model=PLAIN)},
        watch=lambda event, actions, machine: check(machine),
    )
    ps, gpu = simulation.run().run.jobs.values()
    assert (ps.started_s, gpu.started_s, gpu.ended_s) == (0.0, 0.0, 50.0)
    assert ps.state is JobState.COMPLETED and not any(each.gpus for each in ps.attempts)


def test_a_training_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="'other' on CPU cores; accepted: m"):
        simulated([a_training("it", "other", 10)], {"m": PsTraining(model=PLAIN)}, 10)


# -- what it is compared with --------------------------------------------------------------------------


def test_optimus_adds_a_node_every_ten_minutes():
    training = PsTraining(model=PLAIN)
    machine = simulated([a_training("it", "m", 100)], {"m": training}, 100, rule="optimus", until=5 * 3600.0)
    job = machine.run.jobs[1]
    assert counted(job.attempts[0].seats) == FIRST_NODES
    sizes = [len(each.seats) for each in job.attempts]
    assert sizes == list(range(3, 21))
    gaps = [after.start_s - before.start_s for before, after in pairwise(job.attempts)]
    assert all(NODE_INTERVAL_S <= gap <= NODE_INTERVAL_S + 20 for gap in gaps)
    assert {seat.share for each in job.attempts for seat in each.seats} == {NODE_CORES}


def test_fixed_nodes_are_the_best_ones_and_wait_for_all_of_them():
    training = PsTraining(model=workload("ResNet-50", A), link=A.link)
    jobs = [a_training("first", "m", 60, 2000), a_training("second", "m", 60, 2000)]
    first, second = simulated(jobs, {"m": training}, 100, rule="fixed").run.jobs.values()
    found = best_fixed(training.model, 60, A.link)
    assert [counted(each.seats) for each in first.attempts] == [(found.servers, found.workers)]
    assert (first.started_s, second.started_s) == (0.0, first.ended_s)


# -- any training --------------------------------------------------------------------------------------


def drawn(seed):
    """Some training whose first steps take less than a minute, and a budget."""
    draw = random.Random(seed)

    def log(low, high):
        return low * (high / low) ** draw.random()

    budget = round(log(4, 150))
    batch_cpu_s = FIRST_PART * budget * log(0.05, 10)
    model = PsModel(
        batch_cpu_s=batch_cpu_s,
        worker_cpu_s=draw.choice([0.0, draw.uniform(0, 0.1) * batch_cpu_s]),
        update_cpu_s=draw.choice([0.0, draw.uniform(0, 0.05) * batch_cpu_s]),
        byte_cpu_s=draw.choice([0.0, log(1e-10, 5e-9)]),
        parameter_bytes=log(1e6, 5e8),
        uneven=draw.choice([0.0, draw.uniform(0, 0.2)]),
        serial=draw.choice([0.0, log(0.002, 0.05)]),
        most_cores=draw.choice([inf, log(2, 40)]),
        overlap=draw.choice([0.0, 0.5, 0.9, 1.0]),
        staleness=draw.choice([0, 1, 3]),
        weak=draw.random() < 0.5,
    )
    return PsTraining(model=model, link=draw.choice([None, NetworkLink(bytes_s=log(0.5, 50) * GBPS)])), budget


@pytest.mark.long
@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_every_search_comes_to_rest_with_about_the_fastest_that_it_has_seen_on_no_more_cores(seed):
    training, budget = drawn(seed)
    job, search = alone(training, budget)
    found = rates(job, training)
    assert job.state is JobState.RUNNING
    assert search.rests
    assert search.changes <= MOST_CHANGES and len(job.attempts) <= MOST_CHANGES + 1
    last = cores_of(job.current.seats)
    alike = [
        rate for rate, each in zip(found, job.attempts, strict=True) if cores_of(each.seats) <= last + 1e-9
    ]
    assert found[-1] >= (1 - NO_WORSE) * max(alike) * (1 - 1e-9)
    assert all(cores_of(each.seats) <= budget + 1e-9 for each in job.attempts)


@pytest.mark.slow
def test_most_searches_end_near_the_best_there_is():
    near = 0
    for seed in range(20):
        training, budget = drawn(seed)
        job, _ = alone(training, budget)
        most = best(training.model, budget, training.link, most_servers=8, most_workers=24).usage.rate
        near += rates(job, training)[-1] >= 0.85 * most
    assert near >= 0.75 * 20
