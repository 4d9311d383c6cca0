"""Throughput seen while jobs run: when it is believed, what it changes, and that it says so."""

from __future__ import annotations

from random import Random

import pytest

from hpcsched.core import events as ev
from hpcsched.core.learning import LEAST_SAMPLES
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState, Progress
from hpcsched.policy import make_policy
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile, makespan, simulate, state_of

LINE = a_profile("line", [10.0, 20.0, 30.0, 40.0])
FLAT = a_profile("flat", [10.0, 10.5, 10.6, 10.7], start_s=5.0, suspend_s=5.0)


def story(driver: Driver, job: str) -> list[str]:
    return [str(note.reason) for note in driver.job(job).story]


def learnt(driver: Driver, job: str) -> dict[int, float] | None:
    profile = driver.machine.estimates.profile(driver.job(job))
    return dict(profile.throughput) if profile and profile.source == "learned" else None


def reports(driver: Driver, job: str, at: float, steps: int) -> None:
    driver.now = at
    about = driver.job(job)
    news = Progress(job_id=about.id, attempt=about.attempt, step=steps, done_s=at)
    driver.tell(ev.ProgressObserved, progress=(news,))


# --- when it is believed ------------------------------------------------------------------------------


def test_a_throughput_is_believed_from_three_samples_on():
    driver = Driver(a_job("x", "new", 9000), gpus=4)
    driver.runs("x")
    reports(driver, "x", 0, 0)  # the first one only starts the clock
    for sample in range(1, LEAST_SAMPLES + 1):
        assert learnt(driver, "x") is None
        reports(driver, "x", 10.0 * sample, 25 * sample)
    assert learnt(driver, "x") == {2: 2.5}


@pytest.mark.parametrize(("steps", "seconds"), [(4, 100.0), (1000, 1.9)])
def test_stretches_of_few_steps_or_little_time_are_no_samples(steps, seconds):
    driver = Driver(a_job("x", "new", 99_000), gpus=4)
    driver.runs("x")
    reports(driver, "x", 0, 0)
    reports(driver, "x", seconds, steps)
    assert driver.machine.estimates.observed.seen == {}
    reports(driver, "x", seconds + 100, steps + 100)  # the stretch goes on, and counts when it is long enough
    (seen,) = driver.machine.estimates.observed.seen["new", 1, ""].values()
    assert seen.rates == [(steps + 100) / (seconds + 100)]


@pytest.mark.parametrize("change", ["starts", "is ready", "ends", "leaves"])
def test_no_sample_goes_across_what_happens_on_its_host(change):
    """x does 1 step a second alone and 0.1 beside another: no sample is a mixture of both."""
    driver = Driver(a_job("x", "new", 9000, gpus=1), gpus=2)
    driver.runs("x")
    if change != "starts":
        driver.submit(a_job("y", "other", 9000, gpus=1))
    if change in ("ends", "leaves"):
        driver.runs("y")
    if change == "leaves":
        driver.suspend("y")
    reports(driver, "x", 0, 0)
    driver.now = 50.0
    match change:
        case "starts":
            driver.submit(a_job("y", "other", 9000, gpus=1))
        case "is ready":
            driver.runs("y")
        case "ends":
            driver.exits("y", 0)
        case "leaves":
            driver.leaves("y", 1)
    reports(driver, "x", 100, 55)
    assert driver.machine.estimates.observed.seen == {}
    reports(driver, "x", 200, 65)
    (seen,) = driver.machine.estimates.observed.seen["new", 1, ""].values()
    assert seen.rate == 0.1


def test_what_happens_on_another_host_does_not_matter():
    driver = Driver(a_job("x", "new", 9000, gpus=1), gpus=1, hosts=2)
    driver.runs("x")
    reports(driver, "x", 0, 0)
    driver.now = 50.0
    driver.submit(a_job("y", "other", 9000, gpus=1))
    driver.runs("y")
    reports(driver, "x", 100, 100)
    assert driver.machine.estimates.observed.seen["new", 1, ""][1].rates == [1.0]


def test_each_attempt_is_timed_for_itself():
    driver = Driver(a_job("x", "new", 9000, gpus=1), gpus=1)
    driver.runs("x")
    reports(driver, "x", 0, 0)
    driver.suspend("x")
    driver.leaves("x", 5)
    driver.now = 100.0
    driver.resume("x")
    driver.runs("x")
    reports(driver, "x", 110, 50)
    assert driver.machine.estimates.observed.seen == {}


def test_a_leaving_job_teaches_nothing():
    driver = Driver(a_job("x", "new", 9000, gpus=1), gpus=1)
    driver.runs("x")
    driver.suspend("x")
    driver.trains("x", 3.0)
    assert driver.machine.estimates.observed.seen == {}


def test_an_attempt_is_timed_from_where_it_goes_on():
    """A resumed program says step 0 until it has read its checkpoint."""
    driver = Driver(a_job("x", "new", 900_000, gpus=1), gpus=1)
    driver.runs("x")
    driver.suspend("x")
    driver.leaves("x", 100_000)
    driver.resume("x")
    driver.runs("x")
    reports(driver, "x", 10, 0)
    driver.job("x").step = 100_000
    driver.now = 20.0
    driver.trains("x", 4.0)
    assert driver.machine.estimates.observed.seen["new", 1, ""][1].rates == [4.0] * 4


def test_a_wrong_clock_spoils_no_sample():
    driver = Driver(a_job("x", "new", 900_000, gpus=1), gpus=1)
    driver.runs("x")
    driver.now = 5000.0
    driver.trains("x", 4.0)
    about = driver.job("x")
    news = Progress(job_id=about.id, attempt=1, step=about.step + 1, done_s=1400.0)
    driver.tell(ev.ProgressObserved, progress=(news,))
    driver.trains("x", 4.0)
    assert all(3.9 < rate < 4.2 for rate in driver.machine.estimates.observed.seen["new", 1, ""][1].rates)


def test_of_a_bogus_sample_nothing_is_left_in_the_end():
    driver = Driver(a_job("x", "line", 9_000_000_000, gpus=1), gpus=1, profiles=[LINE])
    driver.runs("x")
    driver.trains("x", 10.0)
    reports(driver, "x", driver.now + 10, driver.job("x").step + 1_000_000)
    driver.trains("x", 10.0, seconds=400)
    assert driver.machine.estimates.profile(driver.job("x")) is LINE


# --- what it changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [38.1, 41.9])
def test_a_profile_that_holds_is_left_alone(rate):
    driver = Driver(a_job("x", "line", 90_000), gpus=4, profiles=[LINE])
    driver.runs("x")
    news = driver.machine.run.news
    driver.trains("x", rate)
    assert driver.machine.estimates.profile(driver.job("x")) is LINE
    assert driver.machine.run.news == news


def test_a_profile_that_is_contradicted_is_corrected_and_explain_says_by_what():
    driver = Driver(a_job("x", "line", 90_000), a_job("y", "line", 90_000), gpus=4, profiles=[LINE])
    driver.runs("x")
    driver.trains("x", 20.0, seconds=60)
    said = "line does 20 steps/s on 4 GPUs (3 samples of 600 steps in all, spread 0.0%; measured profile: 40)"
    assert story(driver, "x").count(said) == 1
    rates = learnt(driver, "y")
    assert rates and rates[4] == pytest.approx(20.0, rel=1e-6)
    # The machine may be slower than the one measured on: other counts are taken to be slower too, by less.
    assert 15.0 < rates[3] < 30.0 and 5.0 < rates[1] < 10.0
    spread = driver.machine.estimates.profile(driver.job("y")).spread
    assert spread[4] < 0.001 < 0.05 < spread[3] <= spread[1] < 0.25


def test_once_corrected_it_is_not_told_again():
    driver = Driver(a_job("x", "line", 900_000), gpus=4, profiles=[LINE])
    driver.runs("x")
    driver.trains("x", 20.0)
    told, news = len(driver.job("x").story), driver.machine.run.news
    driver.trains("x", 20.0, seconds=500)
    assert (len(driver.job("x").story), driver.machine.run.news) == (told, news)


@pytest.mark.parametrize("noise", [0.3, 0.8, 2.0])
@pytest.mark.parametrize("wrong", [1.0, 3.0, 10.0])
def test_noise_is_no_news_for_ever(noise, wrong):
    """Each sample of 200 is of another throughput; a planner would plan anew each time it is news."""
    random, driver = Random(1), Driver(a_job("x", "m", 9_000_000, gpus=1), gpus=1)
    driver.tell(ev.ProfilesLoaded, profiles=(a_profile("m", [100.0 * wrong]),))
    driver.runs("x")
    news, step = driver.machine.run.news, 0
    for look in range(200):
        reports(driver, "x", 10.0 * look, step)
        step += max(5, round(1000 * random.lognormvariate(0.0, noise)))
    assert driver.machine.run.news - news < 12


def test_a_newly_loaded_profile_that_holds_takes_the_place_of_what_was_learnt():
    driver = Driver(a_job("x", "line", 900_000), gpus=4, profiles=[a_profile("line", {4: 99.0})])
    driver.runs("x")
    driver.trains("x", 40.0)
    assert learnt(driver, "x")
    driver.tell(ev.ProfilesLoaded, profiles=(LINE,))
    assert driver.machine.estimates.profile(driver.job("x")) is LINE
    driver.tell(ev.ProfilesLoaded, profiles=(a_profile("line", [1.0, 2.0]),))
    rates = learnt(driver, "x")
    assert rates and rates[4] == pytest.approx(40.0, rel=1e-3)


def test_marble_takes_only_counts_that_were_seen_and_planners_estimate_the_others():
    driver = Driver(a_job("x", "new", 9000, gpus=(1, 4)), gpus=4)
    driver.runs("x")
    driver.trains("x", 8.0)
    job = driver.job("x")
    assert driver.machine.estimates.profile(job).throughput == {2: 8.0}
    curve = driver.machine.estimates.curve(job)
    assert curve.rate(2) == pytest.approx(8.0)
    assert 8.0 < curve.rate(4) < 16.0 and 4.0 < curve.rate(1) < 8.0
    assert curve.spread[2] < curve.spread[3] < curve.spread[8]


# --- what comes of it ---------------------------------------------------------------------------------


def run_without_profiles(jobs, truth, gpus, policy="planner"):
    simulation = Simulation(jobs, (), gpus=gpus, policy=policy, truth=truth)
    return simulation.run()


def test_a_set_without_any_profile_converges_to_good_counts():
    """One model gains nothing by more GPUs: the first job is given all there are, later ones get one each."""
    jobs = [
        a_job("first", "flat", 10_000),
        *(a_job(f"j{i}", "flat", 4000, submit_at=600.0) for i in range(12)),
    ]
    done = run_without_profiles(jobs, [FLAT], gpus=4)
    assert {job.state for job in done.run.jobs.values()} == {JobState.COMPLETED}
    late = [len(job.attempts[0].gpus) for job in done.run.jobs.values() if job.id > 5]
    assert late == [1] * 8
    known, _ = simulate(jobs, [FLAT], gpus=4, policy="marble")
    assert makespan(done) < 0.5 * makespan(known)


def test_without_profiles_a_model_that_scales_still_gets_what_is_free():
    done = run_without_profiles([a_job("only", "line", 40_000)], [LINE], gpus=4)
    (job,) = done.run.jobs.values()
    assert len(job.current.gpus) == 4
    assert makespan(done) < 1.1 * 1000


@pytest.mark.long
def test_a_wrong_profile_is_found_out_and_planned_anew():
    """By the profile two GPUs do almost twice as much as one; in truth more than one are no use."""
    wrong = a_profile("flat", [10.0, 19.0, 19.5, 20.0], start_s=5.0, suspend_s=5.0)
    jobs = [a_job(f"j{i}", "flat", 20_000) for i in range(10)]
    took = {}
    for policy in ("marble", "planner"):
        done = Simulation(jobs, [wrong], gpus=4, policy=policy, truth=[FLAT]).run()
        assert done.estimates.profile(done.run.jobs[1]).source == "learned"
        took[policy] = makespan(done)
    # Ten jobs of 2000 s on four GPUs: three rounds.
    assert took["planner"] < 1.1 * 6000 < took["marble"]


def test_the_simulator_learns_nothing_where_profiles_are_the_truth():
    jobs = [a_job(f"j{i}", "line", 9000) for i in range(5)]
    exact = Simulation(jobs, [LINE], gpus=4, policy="planner", truth=[LINE]).run()
    plain = Simulation(jobs, [LINE], gpus=4, policy="planner").run()
    assert exact.estimates.observed.beliefs == {}
    assert [job.ended_s for job in exact.run.jobs.values()] == [
        job.ended_s for job in plain.run.jobs.values()
    ]


def test_a_replay_of_the_events_learns_the_same():
    told = []
    jobs = [a_job(f"j{i}", "flat", 9000) for i in range(5)]
    done = Simulation(
        jobs, (), gpus=4, policy="planner", truth=[FLAT], watch=lambda event, *_: told.append(event)
    ).run()
    assert done.estimates.observed.beliefs
    again = Machine(make_policy)
    for event in told:
        again.handle(event)
    assert state_of(again) == state_of(done)
