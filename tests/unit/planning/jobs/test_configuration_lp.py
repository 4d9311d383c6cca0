"""The configuration LP against optima worked out by hand, and against an LP over all patterns there are."""

from __future__ import annotations

import random
import sys
from itertools import pairwise, product

import pytest

from hpcsched.planning.jobs.configuration_lp import LpSolution, configuration_lp

linprog = pytest.importorskip("scipy.optimize").linprog

FEW = [0, 1, 2, 5, 200]


def a_set(rng, *, late):
    """(times, gpus, releases) of a small random set."""
    gpus = rng.randint(1, 5)
    times = []
    for _ in range(rng.randint(1, 5)):
        counts = rng.sample(range(1, gpus + 3), rng.randint(1, gpus + 2))
        if min(counts) > gpus:
            counts.append(rng.randint(1, gpus))
        work, launch = rng.uniform(1, 100), rng.choice([0, rng.uniform(0, 60)])
        times.append({g: launch + work / g ** rng.uniform(-0.3, 1.2) for g in counts})
    return times, gpus, [rng.choice([0.0, 30.0, rng.uniform(0, 200)]) if late else 0.0 for _ in times]


def all_patterns(times, gpus):
    choices = product(*([None, *(g for g in table if g <= gpus)] for table in times))
    for counts in choices:
        if sum(g or 0 for g in counts) <= gpus and any(counts):
            yield {j: g for j, g in enumerate(counts) if g}


def optimum(times, gpus, releases):
    """The end under the LP with every pattern in every interval between releases."""
    at = sorted(set(releases))
    columns = [
        (k, pattern)
        for k, release in enumerate(at)
        for pattern in all_patterns(times, gpus)
        if all(releases[j] <= release for j in pattern)
    ]
    last = len(at) - 1
    rows = [[-1 / times[j][p[j]] if j in p else 0.0 for _, p in columns] for j in range(len(times))]
    rows += [[float(k == interval) for k, _ in columns] for interval in range(last)]
    sides = [-1.0] * len(times) + [b - a for a, b in pairwise(at)]
    result = linprog([float(k == last) for k, _ in columns], A_ub=rows, b_ub=sides)
    assert result.status == 0
    return at[-1] + result.fun


def check_primal(found: LpSolution, times, gpus, releases):
    """The patterns fit, wait for their jobs' releases, do all work, and end when they say."""
    now, done = min(releases), [0.0] * len(times)
    for seconds, pattern in found.patterns:
        assert seconds > 0
        assert sum(pattern.values()) <= gpus
        now = max([now, *(releases[j] for j in pattern)]) + seconds
        for j, count in pattern.items():
            done[j] += seconds / times[j][count]
    assert min(done) >= 1 - 1e-9
    assert now <= found.end_s * (1 + 1e-9)


def check_dual(found: LpSolution, times, gpus):
    assert min(found.weights) >= 0
    for pattern in all_patterns(times, gpus):
        assert sum(found.weights[j] / times[j][g] for j, g in pattern.items()) <= 1 + 1e-9


def test_no_jobs_need_no_time():
    assert configuration_lp([], 4) == LpSolution(bound_s=0.0, end_s=0.0, patterns=(), after=(), weights=())


def test_three_jobs_of_one_gpu_share_two_gpus():
    found = configuration_lp([{1: 100.0}] * 3, 2)
    assert found.bound_s == pytest.approx(150)
    assert found.end_s == pytest.approx(150)
    assert sum(seconds for seconds, _ in found.patterns) == pytest.approx(150)
    assert found.weights == pytest.approx((50, 50, 50))


def test_jobs_that_divide_perfectly_take_their_area():
    linear = {g: 120 / g for g in (1, 2, 3, 4)}
    assert configuration_lp([linear] * 5, 4).bound_s == pytest.approx(5 * 120 / 4)


def test_what_does_not_fit_side_by_side_runs_one_after_the_other():
    """Area says 3 x 2 x 100 / 3 = 200 s, but a third GPU is of no use to anyone."""
    assert configuration_lp([{2: 100.0}] * 3, 3).bound_s == pytest.approx(300)


def test_one_job_takes_its_best_count():
    found = configuration_lp([{1: 100.0, 2: 40.0, 3: 50.0, 9: 1.0}], 4)
    assert found.bound_s == pytest.approx(40)
    assert found.patterns == ((pytest.approx(40), {0: 2}),)


def test_jobs_wait_for_their_release():
    """In the first 60 s the first job alone can run; then 40 s of it and 100 s of the second are left."""
    found = configuration_lp([{1: 100.0}, {1: 100.0}], 1, release_s=[0.0, 60.0])
    assert found.bound_s == pytest.approx(200)
    late = configuration_lp([{1: 100.0}, {1: 100.0}], 1, release_s=[500.0, 0.0])
    assert late.bound_s == pytest.approx(600)
    # While the first job is alone the second GPU is of no use, so the area of all is no bound here.
    both = configuration_lp([{1: 100.0}, {1: 100.0}, {1: 100.0}], 2, release_s=[0.0, 60.0, 60.0])
    assert both.bound_s == pytest.approx(60 + (40 + 100 + 100) / 2)


def test_the_bound_is_never_above_what_is_proven_not_even_by_rounding():
    for count in range(1, 30):
        assert 100 * count * (1 - 1e-9) < configuration_lp([{1: 100.0}] * count, 1).bound_s <= 100 * count


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_lp_over_all_patterns(seed, late):
    times, gpus, releases = a_set(random.Random(seed), late=late)
    best = optimum(times, gpus, releases)
    found = configuration_lp(times, gpus, release_s=releases)
    assert found.bound_s == pytest.approx(best, rel=1e-6)
    assert found.end_s == pytest.approx(best, rel=1e-6)
    check_primal(found, times, gpus, releases)
    check_dual(found, times, gpus)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_stopped_early_it_proves_less_but_nothing_wrong(seed, late):
    times, gpus, releases = a_set(random.Random(1000 + seed), late=late)
    best = optimum(times, gpus, releases)
    bounds = []
    for iterations in FEW:
        found = configuration_lp(times, gpus, release_s=releases, iterations=iterations)
        bounds.append(found.bound_s)
        assert found.bound_s <= best * (1 + 1e-9) <= found.end_s * (1 + 2e-9)
        check_primal(found, times, gpus, releases)
        check_dual(found, times, gpus)
    assert bounds == sorted(bounds)
    area = sum(min(g * t for g, t in table.items() if g <= gpus) for table in times) / gpus
    assert bounds[0] >= max(releases) * (1 - 1e-9)
    assert late or bounds[0] >= area * (1 - 1e-9)


def test_a_solver_that_gives_up_leaves_what_was_proven_so_far(monkeypatch):
    class GivenUp:
        status = 4

    times = [{1: 100.0}] * 3
    monkeypatch.setattr("scipy.optimize.linprog", lambda *args, **rest: GivenUp)
    found = configuration_lp(times, 2)
    assert found.bound_s == pytest.approx(150)
    assert found.end_s == pytest.approx(300)
    check_primal(found, times, 2, [0.0] * 3)


def test_a_solver_that_errs_costs_no_proof(monkeypatch):
    """Duals and durations that are off by a tenth: a weaker bound, patterns that are filled up."""
    times, gpus, releases = [{1: 90.0, 2: 50.0}, {1: 80.0}, {2: 70.0}, {1: 60.0}], 3, [0.0, 0.0, 20.0, 50.0]

    def wrong(*args, **rest):
        result = linprog(*args, **rest)
        rng = random.Random(len(args[0]))
        result.x = [x * rng.uniform(0.9, 1.1) for x in result.x]
        result.ineqlin.marginals = [y * rng.uniform(0.9, 1.1) for y in result.ineqlin.marginals]
        return result

    best = optimum(times, gpus, releases)
    monkeypatch.setattr("scipy.optimize.linprog", wrong)
    found = configuration_lp(times, gpus, release_s=releases)
    assert 0.8 * best < found.bound_s <= best * (1 + 1e-9) <= found.end_s * (1 + 2e-9)
    check_primal(found, times, gpus, releases)
    check_dual(found, times, gpus)


@pytest.mark.long
def test_few_iterations_prove_nearly_all_of_it():
    """40 jobs on 16 GPUs that come at different times; all of it takes about 30 iterations."""
    rng = random.Random(5)
    times, releases = [], []
    for _ in range(40):
        work, share = rng.uniform(60, 14400), rng.uniform(0.5, 0.95)
        times.append({g: 30 + work / g**share for g in range(1, 9)})
        releases.append(rng.uniform(0, 20000))
    best = configuration_lp(times, 16, release_s=releases).bound_s
    assert configuration_lp(times, 16, release_s=releases, iterations=10).bound_s >= 0.95 * best


def test_the_same_input_gives_the_same_answer():
    times, gpus, releases = a_set(random.Random(7), late=True)
    first = configuration_lp(times, gpus, release_s=releases)
    assert configuration_lp(times, gpus, release_s=releases) == first


def test_what_cannot_be_solved_is_refused():
    with pytest.raises(ValueError, match="job 1 has no count from 1 to 4 GPUs"):
        configuration_lp([{1: 1.0}, {5: 1.0, 0: 1.0}], 4)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="job 0 has a time that is not positive and finite"):
            configuration_lp([{1: seconds}], 4)
    with pytest.raises(ValueError, match="release is not finite"):
        configuration_lp([{1: 1.0}], 4, release_s=[float("inf")])


def test_without_scipy_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError):
        configuration_lp([{1: 1.0}], 1)
