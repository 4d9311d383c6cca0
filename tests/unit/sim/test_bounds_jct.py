"""Lower bounds of the mean completion time: by hand, and against slow optima of what they relax to."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations, product

import pytest

from hpcsched.core.profile import Profile
from hpcsched.sim.blocks import Block
from hpcsched.sim.bounds import BoundJob, _busy, _srpt, lower_bound_s, mean_jct_bound_s
from hpcsched.sim.capacity import Capacity

ONE = {"gpus_max": 1}


def profile(throughput, **costs):
    return Profile(model="m", device="d", throughput=throughput, **costs)


LINEAR = profile({g: float(g) for g in range(1, 7)})
FLAT = profile({1: 1.0})


def job(prof=LINEAR, steps=100, **changes):
    return BoundJob(profile=prof, steps=steps, **changes)


def test_no_jobs_need_no_time():
    assert mean_jct_bound_s([], 4) == 0.0


@pytest.mark.parametrize("unknown", [{"prof": None}, {"steps": None}])
def test_what_is_not_known_has_no_bound(unknown):
    assert mean_jct_bound_s([job(), job(**unknown)], 4) is None


def test_one_job_takes_its_best_time():
    peaked = profile({1: 1.0, 3: 2.0, 4: 1.5}, start_s=10.0, resume_s=10.0)
    assert mean_jct_bound_s([job(peaked)], 4) == pytest.approx(60)
    assert mean_jct_bound_s([job(peaked, submit_s=1000.0)], 4) == pytest.approx(60)


def test_jobs_that_divide_perfectly_run_the_shortest_first():
    """4 GPUs for each in turn: 25, 75 and 150 s."""
    assert mean_jct_bound_s([job(steps=300), job(), job(steps=200)], 4) == pytest.approx((25 + 75 + 150) / 3)


def test_jobs_beside_each_other_take_their_height():
    assert mean_jct_bound_s([job(**ONE), job(**ONE, steps=300)], 4) == pytest.approx(200)


def test_more_jobs_of_one_gpu_than_there_are():
    """Squashed area 150 s, height 100 s; the bound of Eastman, Even and Isaacs lies between it and 150."""
    four = mean_jct_bound_s([job(**ONE)] * 4, 2)
    assert four == pytest.approx((50 + 100 + 150 + 200) / 4 + (100 - 50) / 2)
    assert four == pytest.approx(150)  # two pairs, at 100 and 200 s: the optimum


def test_a_long_job_beside_many_short_ones_keeps_its_height():
    """Area and height alone are both lower than a cut of the long job where the short ones are done."""
    jobs = [*[job(steps=10, **ONE)] * 6, job(steps=1000, **ONE)]
    squashed = (sum(5 * k for k in range(1, 7)) + 30 + 500) / 7
    height = (60 + 1000) / 7
    # Shares of the long job up to 5 s of the machine count as a seventh short one, the rest as height.
    mixed = (sum(5 * k for k in range(1, 8)) - 7 * 2.5 + 6 * 5 + 10 / 2 + 990) / 7
    assert mixed > max(squashed, height)
    assert mean_jct_bound_s(jobs, 2) == pytest.approx(mixed)


def test_late_jobs_and_chains_count_from_their_submit():
    assert mean_jct_bound_s([job(FLAT), job(FLAT, submit_s=50.0)], 1) == pytest.approx((100 + 150) / 2)
    assert mean_jct_bound_s([job(FLAT), job(FLAT, after=(0,))], 9) == pytest.approx((100 + 200) / 2)
    # The short one comes in between and goes first.
    assert mean_jct_bound_s([job(FLAT), job(FLAT, 10, submit_s=50.0)], 1) == pytest.approx((110 + 10) / 2)
    # With 20 s to go the long one is not interrupted.
    assert mean_jct_bound_s([job(FLAT), job(FLAT, 30, submit_s=80.0)], 1) == pytest.approx((100 + 50) / 2)


def test_gpus_are_counted_over_all_hosts():
    assert mean_jct_bound_s([job(FLAT, nodes=2)] * 2, 1, 2) == pytest.approx(150)
    assert mean_jct_bound_s([job(FLAT)] * 2, 1, 2) == pytest.approx(100)


def test_jobs_of_no_work_count_as_none():
    assert mean_jct_bound_s([job(steps=0), job(steps=0, submit_s=7.0), job(FLAT)], 1) == pytest.approx(
        100 / 3
    )


def test_cycles_and_jobs_too_large_are_refused():
    with pytest.raises(ValueError, match="cycle"):
        mean_jct_bound_s([job(after=(1,)), job(after=(0,))], 4)
    with pytest.raises(ValueError, match="needs 5 GPUs"):
        mean_jct_bound_s([job(gpus_min=5)], 4)
    with pytest.raises(ValueError, match="needs 2 hosts"):
        mean_jct_bound_s([job(nodes=2)], 4)


def slots(releases, sizes, cost, there=lambda now: True):
    """The least total cost(job, slot, is it its last) of unit pieces in unit slots, by trying all."""

    @cache
    def least(now, left):
        if not any(left):
            return 0.0
        can = [j for j, rest in enumerate(left) if rest and releases[j] <= now and there(now)]
        if not can:
            return least(now + 1, left)
        return min(
            cost(j, now, left[j] == 1) + least(now + 1, tuple(r - (i == j) for i, r in enumerate(left)))
            for j in can
        )

    return least(0, tuple(sizes))


def tasks(seed):
    """(releases, sizes): a few small whole numbers."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    return [rng.randint(0, 9) for _ in sizes], sizes


def least_ends(releases, sizes, *there):
    return slots(releases, sizes, lambda j, now, last: (now + 1) * last, *there)


def least_busy(releases, sizes, *there):
    return slots(releases, sizes, lambda j, now, last: (now + 0.5) / sizes[j], *there)


@pytest.mark.parametrize("seed", range(30))
def test_on_one_gpu_it_is_the_best_preemptive_schedule(seed):
    releases, sizes = tasks(seed)
    jobs = [job(FLAT, size, submit_s=float(at)) for size, at in zip(sizes, releases, strict=True)]
    best = least_ends(releases, sizes) - sum(releases)
    assert mean_jct_bound_s(jobs, 1) == pytest.approx(best / len(jobs))


@pytest.mark.parametrize("seed", range(30))
def test_the_squashed_machine_is_solved_exactly(seed):
    releases, sizes = tasks(seed)
    one = Capacity([Block(gpus=1)])
    assert _srpt(releases, sizes, one) == pytest.approx(least_ends(releases, sizes))
    assert _busy(releases, sizes, one) == pytest.approx(least_busy(releases, sizes))
    # A task of no size is done when it comes, and keeps no other waiting.
    more = [*releases, 3.0], [*sizes, 0.0]
    assert _srpt(*more, one) == pytest.approx(_srpt(releases, sizes, one) + 3)
    assert _busy(*more, one) == pytest.approx(_busy(releases, sizes, one) + 3)


@pytest.mark.parametrize("seed", range(30))
def test_so_is_one_that_is_not_there_all_the_time(seed):
    releases, sizes = tasks(seed)
    rng = random.Random(seed)
    begin = rng.randint(0, 6)
    gone, back = begin + rng.randint(1, 6), begin + rng.randint(7, 20)
    some = Capacity(
        [
            Block(gpus=1, start_s=float(begin), lasts_s=float(gone - begin)),
            Block(gpus=1, start_s=float(back)),
        ]
    )

    def there(now):
        return begin <= now < gone or now >= back

    assert _srpt(releases, sizes, some) == pytest.approx(least_ends(releases, sizes, there))
    assert _busy(releases, sizes, some) == pytest.approx(least_busy(releases, sizes, there))


@pytest.mark.parametrize("seed", range(30))
def test_it_is_no_less_than_each_of_the_bounds_it_is_made_of(seed):
    releases, sizes = tasks(seed)
    jobs = [job(FLAT, 3 * size, submit_s=float(at)) for size, at in zip(sizes, releases, strict=True)]
    parts = [
        sum(releases) + 3 * sum(sizes),
        least_ends(releases, sizes),
        least_busy(releases, sizes) + 3 * sum(sizes) / 2,
    ]
    bound = mean_jct_bound_s(jobs, 3) * len(jobs)
    assert bound >= (max(parts) - sum(releases)) * (1 - 1e-9)


def test_a_long_job_that_is_overtaken_again_and_again_is_not_cut():
    """2 GPUs, all linear but the long job's height: it runs in what the late jobs leave it."""
    long = job(profile({1: 1.0, 2: 1.25}), 100)
    late = [job(steps=18, submit_s=10.0 * k) for k in range(1, 12)]
    # It needs 50 s of the machine, has all of the first 10 and 1 s of every later 10 until 120.
    ends = 120 + (50 - 10 - 11) + sum(10.0 * k + 9 for k in range(1, 12))
    assert mean_jct_bound_s([long, *late], 2) == pytest.approx((ends - sum(j.submit_s for j in late)) / 12)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_of_the_jobs_gives_a_better_bound(seed):
    """Jobs that come together: every choice of shares is tried, on a grid."""
    rng = random.Random(seed)
    gpus = rng.choice([2, 4, 6])
    jobs = [
        job(steps=rng.choice([10, 50, rng.randint(1, 200)]), gpus_max=rng.choice([1, 1, 2, gpus]))
        for _ in range(4)
    ]
    weights = [j.steps / gpus for j in jobs]
    heights = [j.steps / min(j.gpus_max, gpus) for j in jobs]
    best = 0.0
    for shares in product([0.0, 0.1, 0.25, 0.5, 0.75, 1.0], repeat=len(jobs)):
        sizes = [a * w for a, w in zip(shares, weights, strict=True)]
        ends = sum((len(sizes) - k) * size for k, size in enumerate(sorted(sizes)))
        rest = sum((1 - a / 2) * h for a, h in zip(shares, heights, strict=True))
        best = max(best, ends - sum(sizes) / 2 + rest)
    assert mean_jct_bound_s(jobs, gpus) * len(jobs) >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_list_schedule_beats_either_bound(seed):
    """All orders and all counts of three jobs; each job starts as soon as its GPUs are free."""
    rng = random.Random(seed)
    gpus = rng.randint(1, 4)
    jobs = []
    for _ in range(3):
        launch = rng.choice([0.0, 20.0, 60.0])
        table = {g: g ** rng.uniform(-0.2, 1.1) for g in range(1, gpus + 1)}
        prof = profile(table, start_s=launch, resume_s=launch)
        jobs.append(
            job(
                prof,
                rng.randint(1, 200),
                submit_s=rng.choice([0.0, 0.0, 100.0]),
                gpus_min=rng.randint(1, gpus),
            )
        )
    makespan = mean_jct = float("inf")
    for order in permutations(range(3)):
        for counts in product(*(range(j.gpus_min, gpus + 1) for j in jobs)):
            free, ends = [0.0] * gpus, [0.0] * 3
            for i in order:
                begin = max(sorted(free)[counts[i] - 1], jobs[i].submit_s)
                prof = jobs[i].profile
                ends[i] = begin + prof.start_s + jobs[i].steps / prof.rate(counts[i])
                free = [*[ends[i]] * counts[i], *sorted(free)[counts[i] :]]
            makespan = min(makespan, max(ends))
            mean_jct = min(mean_jct, sum(ends[i] - jobs[i].submit_s for i in range(3)) / 3)
    assert lower_bound_s(jobs, gpus) <= makespan * (1 + 1e-9)
    assert mean_jct_bound_s(jobs, gpus) <= mean_jct * (1 + 1e-9)
    assert mean_jct_bound_s(jobs, gpus) >= mean_jct / 2  # it says something


def test_many_jobs_of_many_shapes_are_no_worse_than_area_and_height():
    """More large jobs than `_cuts` searches through."""
    rng = random.Random(1)
    jobs = [job(steps=rng.randint(1, 1000), gpus_max=rng.choice([1, 2, 6])) for _ in range(700)]
    for gpus in (6, 2000):
        weights = sorted(j.steps / gpus for j in jobs)
        heights = [j.steps / min(j.gpus_max, 6, gpus) for j in jobs]
        busy = sum((len(jobs) - k - 0.5) * w for k, w in enumerate(weights)) + sum(heights) / 2
        bound = mean_jct_bound_s(jobs, gpus) * len(jobs)
        assert bound >= max(busy, sum(heights)) * (1 - 1e-9)
