"""Lower bounds of the makespan worked out by hand."""

import sys

import pytest

from hpcsched.core.profile import Profile
from hpcsched.sim import bounds as bounds_module
from hpcsched.sim.bounds import MAX_LP_GPUS, MAX_LP_JOBS, BoundJob, lower_bound_s

ONE = {"gpus_max": 1}
TWO = {"gpus_min": 2, "gpus_max": 2}


def profile(throughput, **costs):
    return Profile(model="m", device="d", throughput=throughput, **costs)


LINEAR = profile({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
STEP = {"start_s": 10.0, "suspend_s": 5.0, "resume_s": 10.0}


def job(prof=LINEAR, steps=100, **changes):
    return BoundJob(profile=prof, steps=steps, **changes)


def needs_scipy():
    pytest.importorskip("scipy")


def test_no_jobs_need_no_time():
    assert lower_bound_s([], 4) == 0.0


@pytest.mark.parametrize("unknown", [{"prof": None}, {"steps": None}])
def test_what_is_not_known_has_no_bound(unknown):
    assert lower_bound_s([job(), job(**unknown)], 4) is None


def test_one_job_takes_its_best_count_not_its_largest():
    peaked = profile({1: 1.0, 3: 2.0, 4: 1.5}, **STEP)
    assert lower_bound_s([job(peaked)], 4) == 10 + 100 / 2


def test_limits_are_kept():
    assert lower_bound_s([job(gpus_max=2)], 4) == 50
    poor = profile({1: 1.0, 4: 0.5})
    assert lower_bound_s([job(poor, gpus_min=4)], 4) == 200


def test_area_of_many_jobs():
    flat = profile({1: 1.0, 4: 1.1})
    assert lower_bound_s([job(flat)] * 8, 4) == pytest.approx(8 * 100 / 4)


def test_area_on_the_most_economical_count_when_that_is_not_one():
    super_linear = profile({1: 1.0, 2: 3.0, 4: 4.0})
    assert lower_bound_s([job(super_linear)] * 8, 4) == pytest.approx(8 * (2 * 100 / 3) / 4)


def test_a_chain_takes_its_links_one_after_the_other():
    jobs = [job(), job(after=(0,)), job(after=(1,), submit_s=30.0)]
    assert lower_bound_s(jobs, 4) == 75
    assert lower_bound_s([job(after=(1,)), job(submit_s=30.0)], 4) == 30 + 50
    alone = [job(**ONE), job(**ONE, after=(0,)), job(**ONE, after=(1,))]
    assert lower_bound_s(alone, 4) == 300


def test_jobs_of_one_profile_need_not_be_alike():
    costly = profile({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, start_s=100.0, resume_s=100.0)
    two = [job(costly, in_place=True, steps=1000), job(costly, steps=1)]
    assert lower_bound_s(two, 4) == pytest.approx((1000 + 101) / 4)
    assert lower_bound_s(two[::-1], 4) == pytest.approx((1000 + 101) / 4)
    assert lower_bound_s([job(gpus_max=4), job(gpus_max=1)], 4) == 100
    flat = profile({1: 1.0})
    assert lower_bound_s([job(flat), *[job(flat, gpus_min=4)] * 2], 4) >= 225
    wide = [job(flat, gpus_min=4, nodes=hosts) for hosts in (1, 2, 2)]
    assert lower_bound_s(wide, 4, 2) >= (400 + 800 + 800) / 8


def test_late_jobs_cannot_use_the_time_before_they_come():
    flat = profile({1: 1.0, 4: 1.1})
    jobs = [job(flat, steps=4)] + [job(flat, submit_s=1000.0)] * 8
    assert lower_bound_s(jobs, 4) == pytest.approx(1000 + 8 * 100 / 4)


def test_the_cheaper_of_start_and_resume_counts_since_a_start_can_be_cut_short():
    assert lower_bound_s([job(profile({1: 1.0}, start_s=30.0, resume_s=20.0))], 1) == 120
    assert lower_bound_s([job(profile({1: 1.0}, start_s=30.0))], 1) == 100


def test_jobs_that_change_in_place_may_start_where_it_is_cheap():
    costly = profile({1: 1.0, 4: 4.0}, start_s={1: 0.0, 4: 50.0}, resume_s={1: 0.0, 4: 50.0})
    assert lower_bound_s([job(costly)], 4) == pytest.approx(100 / 3 + 50 * 2 / 3)  # on 3 GPUs
    assert lower_bound_s([job(costly, in_place=True)], 4) == pytest.approx(25)


def test_cycles_and_jobs_too_large_are_refused():
    with pytest.raises(ValueError, match="cycle"):
        lower_bound_s([job(after=(1,)), job(after=(0,))], 4)
    with pytest.raises(ValueError, match="needs 5 GPUs, there are 4"):
        lower_bound_s([job(gpus_min=5)], 4)
    with pytest.raises(ValueError, match="needs 3 hosts, there are 2"):
        lower_bound_s([job(nodes=3)], 4, 2)


def test_what_does_not_fit_side_by_side_costs_more_than_its_area():
    needs_scipy()
    assert lower_bound_s([job(**TWO)] * 3, 3) == pytest.approx(150)  # area: 100
    late = [job(**ONE), *[job(**TWO, submit_s=80.0)] * 3]
    assert lower_bound_s(late, 3) == pytest.approx(80 + 150)  # the rest of the first runs beside


def test_gpus_are_counted_over_all_hosts():
    needs_scipy()
    assert lower_bound_s([job(**TWO)] * 3, 3, 2) == pytest.approx(50)
    assert lower_bound_s([job(**ONE, nodes=2)] * 3, 3, 1 + 1) == pytest.approx(100)
    # Two hosts of 3 GPUs can take one such job at a time; over all hosts it looks like one and a half.
    assert lower_bound_s([job(**TWO, nodes=2)] * 3, 3, 2) == pytest.approx(150)


def test_jobs_that_wait_for_others_are_released_by_their_chain():
    needs_scipy()
    jobs = [job(**ONE), *[job(**TWO, after=(0,))] * 3]
    assert lower_bound_s(jobs, 3) == pytest.approx(100 + 150)


def test_without_scipy_and_for_large_sets_the_area_counts(monkeypatch):
    needs_scipy()
    assert lower_bound_s([job(**TWO)] * (MAX_LP_JOBS + 1), 3) == pytest.approx((MAX_LP_JOBS + 1) * 100 / 3)
    assert lower_bound_s([job(**TWO)] * MAX_LP_JOBS, 3) == pytest.approx(MAX_LP_JOBS * 50)
    half = {"gpus_min": MAX_LP_GPUS // 2 + 1, "gpus_max": MAX_LP_GPUS // 2 + 1}
    assert lower_bound_s([job(**half)] * 3, MAX_LP_GPUS) == pytest.approx(3 * 25)
    assert lower_bound_s([job(**half)] * 3, MAX_LP_GPUS + 1) == pytest.approx(3 * 25 / 2, rel=0.01)
    assert lower_bound_s([job(**TWO)] * 3, 3) == pytest.approx(150)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert lower_bound_s([job(**TWO)] * 3, 3) == pytest.approx(100)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert lower_bound_s([job(**TWO)] * 3, 3) == pytest.approx(100)


def test_jobs_of_no_work_and_submits_that_never_come_do_not_upset_the_lp():
    assert lower_bound_s([job(steps=0), job()], 4) == 25
    assert lower_bound_s([job(submit_s=float("inf"))], 4) == float("inf")


def test_the_lp_is_stopped_by_counts_never_by_the_clock(monkeypatch):
    seen = []
    real = bounds_module.configuration_lp

    def spy(times, gpus, *, release_s, iterations):
        seen.append(iterations)
        return real(times, gpus, release_s=release_s, iterations=1)

    monkeypatch.setattr(bounds_module, "configuration_lp", spy)
    needs_scipy()
    lower_bound_s([job()] * 40, 4)
    lower_bound_s([job(submit_s=float(i)) for i in range(40)], 4)
    assert seen == [100, 25]


def test_marble_sets_under_the_fitted_summit_profile():
    """Set 1 cannot be beaten: its long ResNet-50 alone takes the 497 s; sets 2 and 3: 502 and 422 s."""
    needs_scipy()

    def cost(one_gpu):
        return {g: one_gpu * (1 + 0.0687 * (g - 1)) for g in range(1, 7)}

    def fitted(rates, start):
        return profile(dict(enumerate(rates, 1)), start_s=cost(start), resume_s=cost(start))

    resnet = fitted([4.4303, 6.561, 7.5789, 7.5204, 7.4619, 7.4034], 19.078)
    inception = fitted([2.0086, 3.6373, 4.6712, 5.0542, 4.9997, 4.9452], 21.811)
    resnet_101 = fitted([1.3135, 2.4283, 3.4832, 3.4797, 3.4763, 3.4729], 22.886)
    vgg = fitted([2.3125, 4.0247, 5.5803, 6.9232, 7.8601, 7.6314], 15.802)
    sets = [
        [(resnet, 800), (resnet, 3600), (inception, 1400)],
        [(inception, 2400), (resnet, 600), (resnet_101, 1000)],
        [(resnet, 900), (inception, 2000), (vgg, 800)],
    ]
    bounds = [lower_bound_s([job(p, steps) for p, steps in jobs], 6) for jobs in sets]
    assert bounds == pytest.approx([496.7, 501.7, 422.0], abs=0.1)
