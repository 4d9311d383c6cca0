"""The MARBLE paper's own examples, action by action, with the profile fitted to its totals."""

from __future__ import annotations

import pytest
from places import ROOT

from hpcsched.core.model import Role
from hpcsched.store.profiles import load_profiles
from hpcsched.testing.builders import a_job, a_profile, makespan, simulate

SUMMIT = load_profiles(ROOT / "profiles" / "marble-summit.json")

# Table II, in order of submission.
SETS = {
    1: [("ResNet-50", 800), ("ResNet-50", 3600), ("Inception-v3", 1400)],
    2: [("Inception-v3", 2400), ("ResNet-50", 600), ("ResNet-101", 1000)],
    3: [("ResNet-50", 900), ("Inception-v3", 2000), ("VGG-16", 800)],
}
MARBLE_S = {1: 496, 2: 608, 3: 501}
LSF_S = {1: 958, 2: 940, 3: 707}


def jobs(number):
    return [a_job(f"{i}-{model}", model, steps) for i, (model, steps) in enumerate(SETS[number], 1)]


def test_figure_5():
    """3 GPUs for ResNet-50, the other 3 for Inception-v3, which is fastest on 4 and gets them when
    ResNet-50 is done; VGG-16 starts on the 2 that are left then."""
    resnet, inception, vgg = "ResNet-50", "Inception-v3", "VGG-16"
    specs = [a_job(resnet, steps=900), a_job(inception, steps=4000), a_job(vgg, steps=4000)]
    _, story = simulate(specs, SUMMIT, promote="always")
    assert story[:6] == [
        "0: start ResNet-50 primary on 0,1,2",
        "0: start Inception-v3 secondary on 3,4,5",
        "140: ResNet-50 is done",
        "140: suspend Inception-v3",
        "140: start VGG-16 secondary on 1,2",
        "186: Inception-v3 has left",
    ]
    assert story[6] == "186: resume Inception-v3 primary on 0,3,4,5"


def test_job_set_2_step_by_step():
    """Section VII-B.1: the text goes through job set 2."""
    machine, story = simulate(jobs(2), SUMMIT, promote="always")
    assert story == [
        "0: start 1-Inception-v3 primary on 0,1,2,3",
        "0: start 2-ResNet-50 secondary on 4,5",
        "112: 2-ResNet-50 is done",
        "112: start 3-ResNet-101 secondary on 4,5",
        "501: 1-Inception-v3 is done",
        "501: suspend 3-ResNet-101",
        "549: 3-ResNet-101 has left",
        "549: resume 3-ResNet-101 primary on 0,4,5",
        "608: 3-ResNet-101 is done",
    ]
    assert [job.suspensions for job in machine.run.jobs.values()] == [0, 0, 1]


@pytest.mark.parametrize("number", SETS)
def test_makespans_of_table_ii(number):
    ours, _ = simulate(jobs(number), SUMMIT, promote="always")
    lsf, _ = simulate(jobs(number), SUMMIT, policy="exclusive")
    assert makespan(ours) == pytest.approx(MARBLE_S[number], rel=0.01)
    assert makespan(lsf) == pytest.approx(LSF_S[number], rel=0.01)


@pytest.mark.parametrize("number", SETS)
def test_exclusive_is_one_after_the_other_on_all_gpus(number):
    machine, _ = simulate(jobs(number), SUMMIT, policy="exclusive")
    ended = 0.0
    for job in machine.run.jobs.values():
        (attempt,) = job.attempts
        assert attempt.gpus == (0, 1, 2, 3, 4, 5)
        assert attempt.start_s == ended
        ended = attempt.end_s


@pytest.mark.parametrize("number", SETS)
def test_promoting_only_where_it_pays_is_never_worse(number):
    pays, _ = simulate(jobs(number), SUMMIT, promote="pays")
    always, _ = simulate(jobs(number), SUMMIT, promote="always")
    assert makespan(pays) <= makespan(always)
    for careful, eager in zip(pays.run.jobs.values(), always.run.jobs.values(), strict=True):
        assert careful.ended_s <= eager.ended_s


def test_set_3_is_where_the_papers_promotion_costs_more_than_it_gains():
    pays, story = simulate(jobs(3), SUMMIT)
    assert not [line for line in story if "suspend" in line]
    assert makespan(pays) == pytest.approx(453, rel=0.01)


@pytest.mark.parametrize("number", SETS)
@pytest.mark.parametrize("promote", ["pays", "always", "never"])
def test_no_step_is_lost_or_done_twice(number, promote):
    machine, _ = simulate(jobs(number), SUMMIT, promote=promote)
    for job in machine.run.jobs.values():
        assert job.state == "COMPLETED"
        assert job.steps_repeated == 0
        at = 0
        for attempt in job.attempts:
            assert attempt.from_step == at
            at = attempt.to_step
        assert at == job.spec.steps


def test_a_suspended_job_goes_on_at_the_very_step_it_stopped_at():
    """Steps do not go on while the job saves."""
    specs = [a_job("first", steps=50), a_job("second", steps=1000)]
    profiles = [
        a_profile("first", [1, 2, 5]),
        a_profile("second", [3, 5, 7, 10], suspend_s=20.0, resume_s=5.0),
    ]
    machine, story = simulate(specs, profiles, promote="always")
    assert story == [
        "0: start first primary on 0,1,2",
        "0: start second secondary on 3,4,5",
        "10: first is done",
        "10: suspend second",
        "30: second has left",
        "30: resume second primary on 0,3,4,5",
        "128: second is done",
    ]
    saved, resumed = machine.run.jobs[2].attempts
    assert (saved.to_step, resumed.from_step, resumed.to_step) == (70, 70, 1000)
    assert machine.run.jobs[2].repeated == 0
    assert saved.role is Role.SECONDARY and resumed.role is Role.PRIMARY
