"""ASHA: who goes on by what is known then, with any order of results, failures, bounds and crashes."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.tuning import AshaTuning, TrialOutcome, parse_search, source_of
from hpcsched.tuning.asha import best_of

INFINITE = "lr = { log = [1e-4, 1e-1] }"


def asha(lines="", *, R=9, eta=3, mode="max", space=INFINITE):  # noqa: N803
    text = (
        f'schema = 1\ntrainer = "m:T"\nmetric = "acc"\nmode = "{mode}"\nR = {R}\neta = {eta}\n'
        f'method = "asha"\nargs = {{ fixed = 1 }}\n{lines}\n[space]\n{space}\n'
    )
    source = source_of(parse_search(text, where="search.toml"))
    assert isinstance(source, AshaTuning)
    return source


def done(value, state="completed"):
    return TrialOutcome(state, {"acc": value} if value is not None else {})


def submit(source, outcomes, at_once):
    """Have all jobs that are wanted be there; the new ones."""
    new = [job for job in source.jobs(outcomes, at_once) if job.name not in outcomes]
    outcomes.update({job.name: TrialOutcome() for job in new})
    return new


def results(seed):
    """A result for every job, by its name alone: good, equal, bad and broken ones."""

    def result(job):
        generator = random.Random(f"{seed}/{job.name}")
        draw = generator.random()
        if draw < 0.15:
            return TrialOutcome(generator.choice(["failed", "cancelled"]), {"acc": 99.0})
        if draw < 0.25:
            return done(generator.choice([math.nan, math.inf, -math.inf, None]))
        return done(float(generator.randint(0, 9)))

    return result


def run(source, result, order, *, at_once, watch=lambda outcomes, new: None):
    """All outcomes at the end, where jobs end in a random order."""
    outcomes = {}
    while True:
        before = dict(outcomes)
        watch(before, submit(source, outcomes, at_once))
        running = [job for job in source.existing(outcomes) if outcomes[job.name].state is None]
        if not running:
            return outcomes
        job = order.choice(running)
        outcomes[job.name] = result(job)


def most_of(search):
    """How many trials may begin at most."""
    bounds = [search.trials, search.space.size, 10**9 if search.budget else search.brackets()[0].trials]
    return min(bound for bound in bounds if bound is not None)


searches = st.builds(
    asha,
    lines=st.sampled_from(["", "trials = 30", "trials = 2", "budget = 50", "budget = 40\ntrials = 12"]),
    R=st.sampled_from([1, 9, 10]),
    eta=st.sampled_from([2, 2.5, 3]),
    mode=st.sampled_from(["max", "min"]),
    space=st.sampled_from([INFINITE, "lr = { int = [1, 7] }"]),
)
anything = given(
    source=searches,
    seed=st.integers(0, 10**6),
    at_once=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)


def test_it_begins_with_as_many_trials_as_there_is_room_for():
    source, outcomes = asha("trials = 30"), {}
    new = submit(source, outcomes, 4)
    assert [(job.name, job.budget, job.continues) for job in new] == [
        (f"t{trial:04d}-b2-r0", 1, None) for trial in range(4)
    ]
    assert submit(source, outcomes, 4) == []
    assert len(submit(source, outcomes, 6)) == 2  # another allocation, with more GPUs


def test_the_scene_of_algorithm_2_by_hand():
    source, outcomes = asha("trials = 30"), {}

    def ends(name, value):
        outcomes[name] = done(value)
        return [job.name for job in submit(source, outcomes, 2)]

    assert [job.name for job in submit(source, outcomes, 2)] == ["t0000-b2-r0", "t0001-b2-r0"]
    assert ends("t0000-b2-r0", 0.1) == ["t0002-b2-r0"]  # one result: a third of it is nobody
    assert ends("t0001-b2-r0", 0.5) == ["t0003-b2-r0"]
    assert ends("t0002-b2-r0", 0.2) == ["t0001-b2-r1"]  # of three results the best one goes on
    assert ends("t0003-b2-r0", 0.3) == ["t0004-b2-r0"]  # the best third of four has gone on already
    assert ends("t0001-b2-r1", 0.6) == ["t0005-b2-r0"]
    assert ends("t0004-b2-r0", 0.9) == ["t0004-b2-r1"]  # better than who went on before


def test_a_promotion_to_a_higher_rung_comes_first():
    source, outcomes = asha("trials = 30"), {}
    for trial in range(9):
        outcomes[f"t{trial:04d}-b2-r0"] = done(trial / 10)
    outcomes |= {f"t{trial:04d}-b2-r1": done(trial / 10) for trial in (6, 7)}
    assert [job.name for job in submit(source, outcomes, 1)] == ["t0008-b2-r1"]
    outcomes["t0008-b2-r1"] = done(0.9)
    (last,) = submit(source, outcomes, 1)
    assert (last.name, last.budget, last.continues) == ("t0008-b2-r2", 9, "t0008-b2-r1")
    assert last.args == source.jobs(outcomes)[8].args


@anything
def test_only_the_best_of_a_rung_as_of_then_go_on_and_none_twice(source, seed, at_once, order):
    eta, sign = Fraction(str(source.search.eta)), 1 if source.search.mode == "min" else -1

    def watch(before, new):
        by_rung = {}
        for job in source.existing(before):
            by_rung.setdefault(job.rung, []).append(job)
        for job in new:
            assert job.name not in before
            if job.rung == 0:
                continue
            ended = [one for one in by_rung[job.rung - 1] if before[one.name].state]
            losses = {
                one.trial: (sign * before[one.name].metrics["acc"], one.trial)
                for one in ended
                if before[one.name].state == "completed"
                and math.isfinite(before[one.name].metrics.get("acc", math.nan))
            }
            better = sum(loss < losses[job.trial] for loss in losses.values())
            assert better + 1 <= len(ended) / eta
            assert job.continues in before and before[job.continues].state == "completed"

    outcomes = run(source, results(seed), order, at_once=at_once, watch=watch)
    jobs = source.jobs(outcomes)
    assert len({(job.trial, job.rung) for job in jobs}) == len(jobs) == len(outcomes)


@anything
def test_there_is_always_as_much_to_do_as_there_is_room_for(source, seed, at_once, order):
    def watch(before, new):
        jobs = source.existing({**before, **{job.name: TrialOutcome() for job in new}})
        running = sum(job.name not in before or before[job.name].state is None for job in jobs)
        begun = sum(job.rung == 0 for job in jobs)
        assert running <= at_once
        # With trials left and no budget, nobody ever waits for the results of others.
        if source.search.budget is None and begun < most_of(source.search):
            assert running == at_once

    run(source, results(seed), order, at_once=at_once, watch=watch)


@anything
def test_the_whole_budget_is_used_and_no_more(source, seed, at_once, order):
    outcomes = run(source, results(seed), order, at_once=at_once)
    assert source.finished(outcomes) and all(outcome.state for outcome in outcomes.values())
    jobs, search = source.jobs(outcomes), source.search
    begun = {job.trial for job in jobs}
    assert begun == set(range(len(begun)))
    budgets = [0.0, *(budget for _, budget in search.brackets()[0].rungs)]
    used = sum(job.budget - budgets[job.rung] for job in jobs)
    assert len(begun) <= most_of(search)
    if search.budget is None:
        assert len(begun) == most_of(search)
    else:
        assert used <= search.budget * 1.000001
        assert len(begun) == most_of(search) or used + search.R > search.budget
    progress = source.progress(outcomes)
    assert (progress.jobs_done, progress.rungs_done) == (progress.jobs, progress.rungs)
    assert progress.jobs == len(jobs) and progress.budget_done == pytest.approx(used)
    states = {row.state for row in source.trials(outcomes)}
    assert not states & {"running", "waiting"}


@anything
def test_progress_never_says_more_than_is_and_rungs_stay_done(source, seed, at_once, order):
    seen = []

    def watch(before, new):
        found = source.progress(before)
        assert 0 <= found.jobs_done <= found.jobs and found.budget_done <= found.budget * 1.000001
        assert found.jobs_done == sum(outcome.state is not None for outcome in before.values())
        seen.append(found.rungs_done)

    run(source, results(seed), order, at_once=at_once, watch=watch)
    assert seen == sorted(seen)


@anything
def test_after_a_crash_another_source_goes_on_where_it_was(source, seed, at_once, order):
    state = order.getstate()
    outcomes = run(source, results(seed), order, at_once=at_once)
    order.setstate(state)
    again = run(AshaTuning(source.search), results(seed), order, at_once=at_once)
    assert repr(again) == repr(outcomes), "the same results in the same order: the same jobs"
    names = list(outcomes)[: order.randrange(len(outcomes) + 1)]
    some = {name: outcomes[name] for name in names}
    fresh = [AshaTuning(source.search).jobs(some, at_once) for _ in range(2)]
    assert fresh[0] == fresh[1] == source.jobs(some, at_once)
    assert set(some) <= {job.name for job in fresh[0]}, "what is there stays there"


def test_trials_that_fail_do_not_hold_up_the_others_and_rank_last():
    source, outcomes = asha("trials = 9"), {}
    submit(source, outcomes, 9)
    for trial in range(8):
        outcomes[f"t{trial:04d}-b2-r0"] = TrialOutcome("failed")
    assert submit(source, outcomes, 9) == []
    outcomes["t0008-b2-r0"] = done(0.1)
    assert [job.name for job in submit(source, outcomes, 9)] == ["t0008-b2-r1"]
    outcomes["t0008-b2-r1"] = TrialOutcome("failed")
    assert submit(source, outcomes, 9) == [] and source.finished(outcomes)
    states = [row.state for row in source.trials(outcomes)]
    assert states == ["failed"] * 9


def test_a_search_of_which_nothing_works_ends():
    source = asha("budget = 100")
    outcomes = run(source, lambda job: TrialOutcome("failed"), random.Random(0), at_once=5)
    assert 100 - 9 < len(outcomes) <= 100 and source.best(outcomes) is None


@pytest.mark.long
@given(
    budget=st.integers(9, 300),
    at_once=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    order=st.randoms(use_true_random=False),
)
def test_some_trial_has_the_whole_budget_of_one_in_the_end(budget, at_once, seed, order):
    """What those that may go on need is kept, whoever has gone on by mistake."""
    source = asha(f"budget = {budget}")
    result = random.Random(seed).random
    outcomes = run(source, lambda job: done(result()), order, at_once=at_once)
    assert max(job.budget for job in source.existing(outcomes)) == 9


def test_what_others_have_in_the_run_is_no_trial():
    source, outcomes = asha("trials = 9"), {"mine": done(5.0), "t0000-b9-r0": done(7.0)}
    assert len(submit(source, outcomes, 2)) == 2 and source.best(outcomes) is None


def test_the_states_of_trials_say_who_may_still_go_on():
    source, outcomes = asha("trials = 4"), {}
    submit(source, outcomes, 4)
    for trial, value in enumerate([0.4, 0.3, 0.2]):
        outcomes[f"t{trial:04d}-b1-r0"] = done(value)
    submit(source, outcomes, 4)
    assert [row.state for row in source.trials(outcomes)] == ["running", "waiting", "waiting", "running"]
    outcomes |= {"t0003-b1-r0": done(0.1), "t0000-b1-r1": done(0.9)}
    rows = source.trials(outcomes)
    assert [row.state for row in rows] == ["finished", "stopped", "stopped", "stopped"]
    assert rows[0].best and rows[0].budget == 9


@given(
    losses=st.lists(st.floats(-5, 5), unique=True, max_size=30),
    failed=st.integers(0, 10),
    eta=st.sampled_from([1.1, 2, 2.1, 3, 10]),
)
def test_the_top_of_a_rung_is_one_in_eta_of_what_has_ended(losses, failed, eta):
    found = best_of([(loss, trial) for trial, loss in enumerate(losses)], len(losses) + failed, eta)
    assert len(found) == min(len(losses), math.floor((len(losses) + failed) / Fraction(str(eta))))
    assert [losses[trial] for trial in found] == sorted(losses)[: len(found)]
