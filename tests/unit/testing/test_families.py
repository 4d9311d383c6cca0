"""The random job sets that policies are compared on."""

from __future__ import annotations

from statistics import stdev

import pytest

from hpcsched.testing.families import FAMILIES, GPU_COUNTS, JOB_COUNT_RANGE, JOB_S_RANGE, random_set, wrong


def test_a_seed_says_all():
    assert random_set(7) == random_set(7)
    assert random_set(7) != random_set(8)
    assert random_set(7, arrivals=0.5) == random_set(7, arrivals=0.5)
    assert wrong(random_set(7).profiles, 1) == wrong(random_set(7).profiles, 1)
    assert wrong(random_set(7).profiles, 1) != wrong(random_set(7).profiles, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_sets_are_what_they_are_said_to_be(family):
    sizes = set()
    for seed in range(30):
        made = random_set(seed, family)
        models = {p.model: p for p in made.profiles}
        assert made.name == f"{family}-{seed}"
        assert made.gpus in GPU_COUNTS
        assert JOB_COUNT_RANGE[0] <= len(made.jobs) <= JOB_COUNT_RANGE[1]
        assert {job.model for job in made.jobs} == models.keys()
        for job in made.jobs:
            step_s = 1 / models[job.model].rate(1)
            assert JOB_S_RANGE[0] - step_s <= job.steps * step_s <= JOB_S_RANGE[1] + step_s
            assert job.submit_at == 0
        for p in made.profiles:
            assert 0 <= p.suspend_s + p.resume_s <= made.switch_s <= 65
            assert p.suspend_s < 30
            assert 0 <= p.start_s <= 1.2 * p.resume_s
        sizes.add(len(made.jobs))
    assert len(sizes) > 15
    assert min(sizes) < 10 < 50 < max(sizes)
    assert {random_set(seed).family for seed in range(40)} == set(FAMILIES)
    assert all(len(random_set(seed, family, most_jobs=5).jobs) <= 5 for seed in range(20))


def test_jobs_arrive_over_about_that_share_of_their_work():
    shares_seen = []
    for seed in range(60):
        made = random_set(seed, arrivals=0.5)
        models = {p.model: p for p in made.profiles}
        work_s = sum(job.steps / models[job.model].rate(1) for job in made.jobs) / made.gpus
        times = [job.submit_at for job in made.jobs]
        assert times == sorted(times)
        assert times[0] == 0 < times[-1]
        shares_seen.append(times[-1] / work_s * len(times) / (len(times) - 1))
    assert sum(shares_seen) / len(shares_seen) == pytest.approx(0.5, abs=0.1)


def test_extrapolated_curves_neither_fall_nor_beat_linear_growth():
    seen = {}
    for seed in range(10):
        for p in random_set(seed, "pollux").profiles:
            seen[p.model] = p
    cifar = seen["cifar10 (global batch 128)"]  # slower on 4 than on 3: flat
    assert cifar.rate(8) == cifar.rate(4)
    imagenet = seen["imagenet (global batch 200)"]  # t(g) = a + b / g through (3, 2.6893) and (4, 3.2749)
    b = (1 / 2.6893 - 1 / 3.2749) * 12
    assert imagenet.rate(6) == pytest.approx(1 / (1 / 3.2749 - b / 4 + b / 6))
    assert imagenet.rate(6) == pytest.approx(4.187, abs=0.001)
    large = seen["cifar10 (global batch 1024)"]  # grew faster than linear: linear from there
    assert large.rate(8) == pytest.approx(2 * large.rate(4))
    for p in seen.values():
        last = min(4, max(g for g in p.throughput if g <= 4))
        for g in range(last, 8):
            assert p.rate(g) <= p.rate(g + 1) * (1 + 1e-9)
            assert p.rate(g + 1) <= p.rate(g) * (g + 1) / g * (1 + 1e-9)


def test_wrong_profiles_are_wrong_by_that_much():
    exact = [p for seed in range(30) for p in random_set(seed, "synthetic").profiles]
    found = wrong(exact, 5, by=0.15)
    assert [(p.model, p.start_s, p.suspend_s) for p in found] == [
        (p.model, p.start_s, p.suspend_s) for p in exact
    ]
    errors = [
        f.throughput[g] / p.throughput[g] - 1 for f, p in zip(found, exact, strict=True) for g in p.throughput
    ]
    assert stdev(errors) == pytest.approx(0.15, abs=0.015)
    assert sum(errors) / len(errors) == pytest.approx(0.0, abs=0.03)
    assert wrong(exact, 5, by=0.0) == tuple(exact)
