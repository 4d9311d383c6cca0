"""An Optuna study makes the jobs, its pruner stops them, and what is in its storage is enough to go on."""

from __future__ import annotations

import pytest

from hpcsched.errors import ConfigError
from hpcsched.tuning import TrialOutcome, parse_search

optuna = pytest.importorskip("optuna")

from hpcsched.tuning.optuna import OptunaTuning  # noqa: E402

RUNNING, COMPLETE, PRUNED, FAIL = (
    optuna.trial.TrialState[name] for name in ("RUNNING", "COMPLETE", "PRUNED", "FAIL")
)


@pytest.fixture(autouse=True)
def quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def search(R=9, mode="max"):  # noqa: N803
    return parse_search(
        f'schema = 1\ntrainer = "m:T"\nmetric = "acc"\nmode = "{mode}"\nR = {R}\nargs = {{ fixed = 1 }}\n'
        "[space]\nlr = { log = [1e-4, 1e-1] }\nwidth = { int = [16, 64] }\n"
        'optimizer = { choice = ["sgd", "adam"] }\ndropout = { uniform = [0, 0.5] }\n',
        where="search.toml",
    )


def study(direction="maximize", storage=None, pruner=None):
    return optuna.create_study(
        direction=direction,
        storage=storage,
        study_name="digits",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=pruner or optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )


def done(value, state="completed"):
    return TrialOutcome(state, {"acc": value})


def states(of):
    return [trial.state for trial in of.trials]


def run(tuning, result):
    outcomes = {}
    while open_jobs := [job for job in tuning.jobs(outcomes) if job.name not in outcomes]:
        outcomes[open_jobs[0].name] = result(open_jobs[0])
    return outcomes


def test_it_asks_for_as_many_trials_as_may_run_at_once():
    tuning = OptunaTuning(study(), search(), trials=7, parallel=5)
    jobs = tuning.jobs({})
    assert [job.name for job in jobs] == [f"t000{t}-b0-r0" for t in range(5)]
    assert tuning.jobs({}) == jobs
    assert all(job.budget == 1 and job.continues is None for job in jobs)
    assert all(
        job.args["fixed"] == 1
        and 1e-4 <= job.args["lr"] <= 1e-1
        and 16 <= job.args["width"] <= 64
        and job.args["optimizer"] in ("sgd", "adam")
        and 0 <= job.args["dropout"] <= 0.5
        for job in jobs
    )


def test_the_pruner_decides_after_each_rung_and_results_are_told():
    found = study(pruner=optuna.pruners.ThresholdPruner(lower=0.5))
    tuning = OptunaTuning(found, search(), trials=3, parallel=3)
    tuning.jobs({})
    outcomes = {"t0000-b0-r0": done(0.4), "t0001-b0-r0": done(0.6)}
    jobs = tuning.jobs(outcomes)
    assert [job.name for job in jobs] == ["t0000-b0-r0", "t0001-b0-r0", "t0001-b0-r1", "t0002-b0-r0"]
    assert (jobs[2].budget, jobs[2].continues) == (3, "t0001-b0-r0")
    assert jobs[2].args == jobs[1].args
    assert states(found) == [PRUNED, RUNNING, RUNNING]
    outcomes |= {"t0001-b0-r1": done(0.7), "t0002-b0-r0": TrialOutcome("failed")}
    tuning.jobs(outcomes)
    assert not tuning.finished(outcomes)
    outcomes["t0001-b0-r2"] = done(0.8)
    tuning.jobs(outcomes)
    assert states(found) == [PRUNED, COMPLETE, FAIL]
    assert found.best_trial.number == 1
    assert found.best_trial.intermediate_values == {1: 0.6, 3: 0.7, 9: 0.8}
    assert tuning.finished(outcomes)
    best = tuning.best(outcomes)
    assert (best.job.name, best.metric) == ("t0001-b0-r2", 0.8)
    assert [row.state for row in tuning.trials(outcomes)] == ["stopped", "finished", "failed"]


def test_a_whole_search_with_a_halving_pruner():
    found = study()
    tuning = OptunaTuning(found, search(R=27), trials=40, parallel=8)
    outcomes = run(tuning, lambda job: done(job.args["lr"] + job.budget / 1000))
    assert tuning.finished(outcomes)
    assert len(found.trials) == 40
    assert set(states(found)) == {COMPLETE, PRUNED}
    assert found.best_value == tuning.best(outcomes).metric
    now = tuning.progress(outcomes)
    assert now.jobs_done == now.jobs == len(outcomes)
    assert now.budget_done == now.budget


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_trial_without_a_finite_metric_is_told_as_failed(value):
    found = study()
    tuning = OptunaTuning(found, search(), trials=1)
    tuning.jobs({})
    metrics = {} if value is None else {"acc": value}
    tuning.jobs({"t0000-b0-r0": TrialOutcome("completed", metrics)})
    assert states(found) == [FAIL]


def test_looking_changes_nothing():
    found = study()
    tuning = OptunaTuning(found, search(), trials=3, parallel=3)
    tuning.jobs({})
    outcomes = {f"t000{t}-b0-r0": done(0.5) for t in range(3)}
    tuning.trials(outcomes), tuning.best(outcomes), tuning.progress(outcomes), tuning.finished(outcomes)
    assert tuning.missing_metric(outcomes) is None
    assert states(found) == [RUNNING] * 3
    assert len(tuning.existing(outcomes)) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "crash", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 18) if n != 8)]
)
def test_after_a_crash_the_study_in_its_storage_is_enough(tmp_path, monkeypatch, crash):
    """The process dies after any change of the study; a new one comes to the same end."""
    storage = f"sqlite:///{tmp_path}/study.db"
    outcomes = {}
    pruner = optuna.pruners.ThresholdPruner(lower=0.5)
    count = 0

    def dying(original):
        def changed(*args, **kwargs):
            nonlocal count
            result = original(*args, **kwargs)
            count += 1
            if count == crash:
                raise KeyboardInterrupt
            return result

        return changed

    def result(job):
        return done(0.4) if job.trial == 1 else done(0.5 + job.trial / 10 + job.rung / 100)

    def go(tuning):
        while True:
            jobs = [job for job in tuning.jobs(outcomes) if job.name not in outcomes]
            if not jobs:
                return
            outcomes[jobs[0].name] = result(jobs[0])

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "report", dying(optuna.Trial.report))
        patch.setattr(optuna.Trial, "set_user_attr", dying(optuna.Trial.set_user_attr))
        patch.setattr(optuna.Study, "tell", dying(optuna.Study.tell))
        with pytest.raises(KeyboardInterrupt):
            go(OptunaTuning(study(storage=storage, pruner=pruner), search(), trials=3, parallel=2))
    found = study(storage=storage, pruner=pruner)
    tuning = OptunaTuning(found, search(), trials=3, parallel=2)
    go(tuning)
    assert tuning.finished(outcomes)
    assert states(found) == [COMPLETE, PRUNED, COMPLETE]
    assert [job.name for job in tuning.jobs(outcomes)] == [
        *(f"t0000-b0-r{rung}" for rung in range(3)),
        "t0001-b0-r0",
        *(f"t0002-b0-r{rung}" for rung in range(3)),
    ]
    assert found.best_value == 0.5 + 0.2 + 0.02


def test_runs_that_share_a_study_leave_each_other_s_trials_alone():
    shared = study()
    one = OptunaTuning(shared, search(), trials=2, run="one")
    two = OptunaTuning(shared, search(), trials=2, run="two")
    assert [job.trial for job in one.jobs({})] == [0, 1]
    assert [job.trial for job in two.jobs({})] == [2, 3]
    shared.ask()
    assert [job.trial for job in one.jobs({})] == [0, 1]


def test_a_study_that_goes_another_way_is_refused():
    with pytest.raises(ConfigError, match=r"study digits: direction: minimize; accepted: maximize"):
        OptunaTuning(study("minimize"), search(), trials=1)
    several = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(ConfigError, match="maximize and minimize"):
        OptunaTuning(several, search(), trials=1)
    with pytest.raises(ConfigError, match=r"R: 9\.5"):
        OptunaTuning(study(), search(R=9.5), trials=1)
