"""A search as a source of jobs: Hyperband's choices, whatever the order of results, and after any crash."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.tuning import TrialOutcome, Tuning, parse_search
from hpcsched.tuning.hyperband import brackets

INFINITE = "lr = { log = [1e-4, 1e-1] }"
NAN = math.nan


def search(R=27, space=INFINITE, mode="max", lines=""):  # noqa: N803
    return parse_search(
        f'schema = 1\ntrainer = "m:T"\nmetric = "acc"\nmode = "{mode}"\nR = {R}\nargs = {{ fixed = 1 }}\n'
        f"{lines}\n[space]\n{space}\n",
        where="search.toml",
    )


def done(value, state="completed"):
    return TrialOutcome(state, {"acc": value} if value is not None else {})


def run(tuning, result, *, order=None):
    """All outcomes at the end, where jobs end in a random `order` with `result(job)`."""
    outcomes = {}
    while open_jobs := [job for job in tuning.jobs(outcomes) if job.name not in outcomes]:
        job = order.choice(open_jobs) if order else open_jobs[0]
        outcomes[job.name] = result(job)
    return outcomes


def results(seed):
    """A result for every job, by its name alone: good, equal, bad and broken ones."""

    def result(job):
        generator = random.Random(f"{seed}/{job.name}")
        draw = generator.random()
        if draw < 0.1:
            return TrialOutcome(generator.choice(["failed", "cancelled"]), {"acc": 99.0})
        if draw < 0.2:
            return done(generator.choice([NAN, math.inf, -math.inf, None]))
        return done(float(generator.randint(0, 5)))

    return result


searches = st.builds(
    search,
    R=st.sampled_from([1, 4, 9, 10]),
    space=st.sampled_from([INFINITE, "lr = { int = [1, 7] }", "lr = { int = [1, 900] }"]),
    mode=st.sampled_from(["max", "min"]),
)


def test_all_first_rungs_are_there_at_once_in_the_order_of_brackets():
    jobs = Tuning(search()).jobs({})
    assert [(job.bracket, job.rung, job.budget) for job in jobs] == (
        [(3, 0, 1)] * 27 + [(2, 0, 3)] * 12 + [(1, 0, 9)] * 6 + [(0, 0, 27)] * 4
    )
    assert [job.trial for job in jobs] == list(range(49))
    assert jobs[0].name == "t0000-b3-r0"
    assert all(job.continues is None for job in jobs)
    assert all(job.args.keys() == {"fixed", "lr"} for job in jobs)
    assert len({job.args["lr"] for job in jobs}) == 49


def test_the_best_of_a_rung_go_on_when_all_of_it_has_ended():
    tuning = Tuning(search())
    outcomes = {f"t{t:04d}-b3-r0": done(t % 4) for t in range(27)}
    more = [job for job in tuning.jobs(outcomes) if job.rung]
    # Six have 3; of the seven with 2 the lowest three.
    assert [job.trial for job in more] == [2, 3, 6, 7, 10, 11, 15, 19, 23]
    assert {job.budget for job in more} == {3}
    assert more[0].name == "t0002-b3-r1"
    assert more[0].continues == "t0002-b3-r0"
    assert more[0].args == tuning.jobs({})[2].args
    del outcomes["t0003-b3-r0"]
    assert not any(job.rung for job in tuning.jobs(outcomes))


def test_mode_min_keeps_the_smallest():
    tuning = Tuning(search(R=3, mode="min"))
    outcomes = {f"t000{t}-b1-r0": done(value) for t, value in enumerate([3.0, -1.0, 2.0])}
    assert [job.trial for job in tuning.jobs(outcomes) if job.rung] == [1]


@given(found=searches, seed=st.integers(0, 10**6))
def test_it_does_what_algorithm_1_does(found, seed):
    """Against Hyperband written down as the paper has it, one bracket after the other."""
    tuning, result = Tuning(found), results(seed)
    outcomes = run(tuning, result)
    jobs = {(job.trial, job.rung): job for job in tuning.jobs(outcomes)}
    sign = 1 if found.mode == "min" else -1
    left = list(range(len(found.space.sample(1000, 0))))
    expected = set()
    for bracket in brackets(found.R, 3):
        trials, left = left[: bracket.trials], left[bracket.trials :]
        for i, (count, budget) in enumerate(bracket.rungs):
            trials = trials[:count]  # the best of the rung before
            losses = []
            for trial in trials:
                expected.add((trial, i))
                assert jobs[trial, i].budget == budget
                outcome = result(jobs[trial, i])
                value = outcome.metrics.get("acc", NAN)
                if outcome.state == "completed" and math.isfinite(value):
                    losses.append((sign * value, trial))
            trials = [trial for _, trial in sorted(losses)]
    assert set(jobs) == expected


@given(found=searches, seed=st.integers(0, 10**6), order=st.randoms(use_true_random=False))
def test_the_jobs_do_not_depend_on_the_order_of_results_and_none_ever_goes_away(found, seed, order):
    tuning, result = Tuning(found), results(seed)
    expected = [job.name for job in tuning.jobs(run(Tuning(found), result))]
    outcomes, before = {}, []
    while True:
        jobs = [job.name for job in tuning.jobs(outcomes)]
        assert len(set(jobs)) == len(jobs)
        # What was there is there in the same order, with the new ones in between.
        later = iter(jobs)
        assert all(name in later for name in before)
        before = jobs
        open_jobs = [job for job in tuning.jobs(outcomes) if job.name not in outcomes]
        assert tuning.finished(outcomes) == (not open_jobs)
        if not open_jobs:
            break
        job = order.choice(open_jobs)
        outcomes[job.name] = result(job)
    assert before == expected


@given(found=searches, seed=st.integers(0, 10**6), keep=st.randoms(use_true_random=False))
def test_after_a_crash_another_source_goes_on_where_it_was(found, seed, keep):
    outcomes = run(Tuning(found), results(seed), order=keep)
    names = list(outcomes)[: keep.randrange(len(outcomes) + 1)]
    some = {name: outcomes[name] for name in names}
    used = Tuning(found)
    used.jobs(outcomes)  # what it saw before must not matter
    assert used.jobs(some) == Tuning(found).jobs(some)
    assert used.trials(some) == Tuning(found).trials(some)


@given(found=searches, seed=st.integers(0, 10**6), order=st.randoms(use_true_random=False))
def test_progress_never_goes_back_and_ends_with_all_done(found, seed, order):
    tuning, result = Tuning(found), results(seed)
    outcomes, before = {}, tuning.progress({})
    assert (before.jobs_done, before.rungs_done, before.budget_done) == (0, 0, 0)
    while open_jobs := [job for job in tuning.jobs(outcomes) if job.name not in outcomes]:
        job = order.choice(open_jobs)
        outcomes[job.name] = result(job)
        now = tuning.progress(outcomes)
        assert now.jobs_done == before.jobs_done + 1 == len(outcomes)
        assert now.budget_done > before.budget_done
        assert now.rungs_done >= before.rungs_done
        assert now.jobs <= before.jobs and now.rungs <= before.rungs and now.budget <= before.budget
        before = now
    assert (before.jobs_done, before.rungs_done) == (before.jobs, before.rungs)
    assert before.budget_done == before.budget


def test_progress_counts_what_is_trained_anew_in_each_rung():
    now = Tuning(search(R=9)).progress({})
    # 9 x 1 + 3 x (3 - 1) + 1 x (9 - 3), 5 x 3 + 1 x (9 - 3), 3 x 9.
    assert (now.jobs, now.rungs, now.budget) == (22, 6, 69)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, None])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_trial_without_a_finite_metric_never_survives(bad, mode):
    tuning = Tuning(search(R=9, mode=mode))
    outcomes = {f"t000{t}-b2-r0": done(bad) for t in range(9)}
    outcomes["t0004-b2-r0"] = done(0.5)
    outcomes["t0005-b2-r0"] = TrialOutcome("failed", {"acc": 0.9})
    outcomes["t0006-b2-r0"] = TrialOutcome("cancelled", {"acc": 0.9})
    more = [job.name for job in tuning.jobs(outcomes) if job.rung]
    assert more == ["t0004-b2-r1"]
    assert tuning.best(outcomes).job.trial == 4


def test_a_bracket_of_which_nothing_worked_ends():
    tuning = Tuning(search(R=9))
    outcomes = {f"t000{t}-b2-r0": TrialOutcome("failed") for t in range(9)}
    assert not any(job.rung for job in tuning.jobs(outcomes))
    assert tuning.best(outcomes) is None
    rest = run(tuning, lambda job: outcomes.get(job.name, done(1.0)))
    assert tuning.finished(rest)
    assert not tuning.finished(outcomes)


def test_a_small_space_is_tried_once_and_never_twice():
    tuning = Tuning(search(R=81, space="a = { int = [1, 10] }\nb = { choice = [1, 2, 3, 4] }"))
    jobs = tuning.jobs({})
    assert len(jobs) == 40
    assert len({(job.args["a"], job.args["b"]) for job in jobs}) == 40
    outcomes = run(tuning, lambda job: done(float(job.trial)))
    assert [len([job for job in tuning.jobs(outcomes) if job.rung == i]) for i in range(5)] == [
        40,
        27,
        9,
        3,
        1,
    ]


def test_random_and_grid_search_train_every_trial_to_the_end():
    few = "lr = { choice = [0.1, 0.2] }\nkind = { choice = ['a', 'b'] }"
    grid = Tuning(search(space=few, lines='method = "grid"')).jobs({})
    assert [(job.name, job.args["lr"], job.args["kind"], job.budget) for job in grid] == [
        ("t0000-b0-r0", 0.1, "a", 27),
        ("t0001-b0-r0", 0.1, "b", 27),
        ("t0002-b0-r0", 0.2, "a", 27),
        ("t0003-b0-r0", 0.2, "b", 27),
    ]
    tuning = Tuning(search(lines='method = "random"\ntrials = 5'))
    outcomes = run(tuning, lambda job: done(1.0))
    assert [job.budget for job in tuning.jobs(outcomes)] == [27] * 5


def test_the_same_trials_whatever_the_method_and_how_many():
    few = Tuning(search(lines='method = "random"\ntrials = 5')).jobs({})
    many = Tuning(search()).jobs({})
    assert [job.args for job in few] == [job.args for job in many[:5]]


def test_the_best_is_the_best_ever_seen_then_the_longer_then_the_earlier():
    tuning = Tuning(search(R=9))
    outcomes = {f"t000{t}-b2-r0": done(0.1) for t in range(9)}
    outcomes["t0003-b2-r0"] = outcomes["t0005-b2-r0"] = done(0.9)
    assert tuning.best({}) is None
    assert tuning.best(outcomes).job.name == "t0003-b2-r0"
    outcomes |= {f"t000{t}-b2-r1": done(0.8) for t in (0, 3, 5)}
    assert tuning.best(outcomes).job.name == "t0003-b2-r0"
    outcomes["t0005-b2-r1"] = done(0.9)
    assert tuning.best(outcomes).job.name == "t0005-b2-r1"
    assert tuning.best(outcomes).metric == 0.9


def test_rows_say_where_each_trial_is():
    tuning = Tuning(search(R=9))
    outcomes = {f"t000{t}-b2-r0": done(t / 10) for t in range(8)}
    outcomes["t0001-b2-r0"] = TrialOutcome("failed")
    outcomes["t0002-b2-r0"] = TrialOutcome("cancelled")
    outcomes["t0003-b2-r0"] = done(NAN)
    outcomes["t0014-b0-r0"] = done(0.2)
    rows = tuning.trials(outcomes)
    assert [row.trial for row in rows] == list(range(17))
    assert [row.state for row in rows[:9]] == [
        "waiting",
        "failed",
        "cancelled",
        "no metric",
        *["waiting"] * 4,
        "running",
    ]
    assert (rows[14].state, rows[14].budget, rows[14].metric) == ("finished", 9, 0.2)
    assert (rows[8].budget, rows[8].metric) == (0, None)
    assert (rows[3].budget, rows[3].metric) == (1, None)
    assert [row.trial for row in rows if row.best] == [7]

    outcomes["t0008-b2-r0"] = done(0.8)
    rows = tuning.trials(outcomes)
    assert [row.state for row in rows[4:9]] == ["stopped", "stopped", "running", "running", "running"]
    assert (rows[8].job, rows[8].budget, rows[8].metric, rows[8].best) == ("t0008-b2-r1", 1, 0.8, True)

    outcomes["t0008-b2-r1"] = TrialOutcome("failed")
    row = tuning.trials(outcomes)[8]
    assert (row.state, row.job, row.budget, row.metric, row.best) == (
        "failed",
        "t0008-b2-r1",
        1,
        0.8,
        True,
    )
    assert json.dumps([row.args for row in rows])


def test_a_metric_that_the_trainer_does_not_report_is_noticed_at_once():
    tuning = Tuning(search(R=9))
    assert tuning.missing_metric({}) is None
    assert tuning.missing_metric({"t0000-b2-r0": TrialOutcome("failed", {"loss": 1.0})}) is None
    wrong = {"t0000-b2-r0": TrialOutcome("completed", {"loss": 1.0, "accuracy": 0.5})}
    assert tuning.missing_metric(wrong) == ["accuracy", "loss"]
    assert tuning.missing_metric({"t0000-b2-r0": TrialOutcome("completed")}) == []
    assert tuning.missing_metric(wrong | {"t0001-b2-r0": done(NAN)}) is None


def test_other_jobs_of_the_run_do_not_matter():
    tuning = Tuning(search())
    assert tuning.jobs({"resnet": done(1.0), "t0000-b9-r0": done(1.0)}) == tuning.jobs({})


@pytest.mark.long
def test_names_are_names_of_jobs_and_unique():
    tuning = Tuning(search(R=9, lines='method = "random"\ntrials = 12000'))
    names = [job.name for job in tuning.jobs({})]
    assert len(set(names)) == 12000
    assert names[-1] == "t11999-b0-r0"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in names)
