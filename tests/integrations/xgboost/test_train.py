"""XGBoost trainings that are suspended in their midst end as ones that were not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

xgb = pytest.importorskip("xgboost", reason="XGBoost is not installed")

from attempts import Attempts  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.contract.state import State  # noqa: E402
from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.integrations import rounds  # noqa: E402
from hpcsched.integrations.xgboost import fit, train  # noqa: E402

PARAMS = {"max_depth": 3, "nthread": 1, "seed": 3}
Program = Callable[[], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    rounds.current.cache_clear()
    yield
    rounds.current.cache_clear()


def samples(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 5))
    return x, x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * draw.normal(size=count)


class Stop(xgb.callback.TrainingCallback):
    """Notes what rounds it is told, and has the job stopped after some of them."""

    def __init__(self, *after: int) -> None:
        super().__init__()
        self.after, self.seen = after, []

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self.seen.append(epoch)
        if epoch + 1 in self.after:
            Attempts.stop()
        return False


def in_attempts(folder: Path, program: Program) -> tuple[Any, Attempts]:
    def once() -> Any:
        rounds.current.cache_clear()
        return program()

    attempts = Attempts(folder)
    return attempts.run(once), attempts


def scheduled(*stops: int, result: dict[str, Any] | None = None, **more: Any) -> tuple[Any, list[int]]:
    """A training with what XGBoost's callbacks remember; the rounds that a callback of its own was told."""
    train_set, validation = (xgb.DMatrix(*samples(seed=seed)) for seed in (0, 1))
    stop = Stop(*stops)
    booster = train(
        {**PARAMS, **more.pop("params", {})},
        train_set,
        more.pop("total", 30),
        evals=[(train_set, "train"), (validation, "validation")],
        evals_result=result,
        verbose_eval=False,
        callbacks=[xgb.callback.LearningRateScheduler(lambda at: 0.5 * 0.97**at), stop],
        **more,
    )
    return booster, stop.seen


def test_twice_suspended_is_as_never(tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    model, seen = scheduled(result=whole)
    parts: dict[str, Any] = {}
    (again, told), attempts = in_attempts(tmp_path, lambda: scheduled(11, 20, result=parts))
    assert attempts.codes == [75, 75]
    assert [state.step for state in attempts.states] == [11, 20]
    assert again.save_raw() == model.save_raw()
    assert parts == whole
    assert seen == list(range(30))
    assert told == list(range(20, 30))
    logged = {point.step: point.values for point in attempts.points}
    assert logged[30] == {f"{data}-rmse": whole[data]["rmse"][-1] for data in whole}
    assert logged[1] == {f"{data}-rmse": whole[data]["rmse"][0] for data in whole}
    assert attempts.totals == {30}
    assert b"true" not in (tmp_path / files.ready(1)).read_bytes()  # one process, on whatever it is given


def test_early_stopping_remembers_its_best_round(tmp_path: Path) -> None:
    more = {"early_stopping_rounds": 8, "total": 400, "params": {"max_depth": 6}}
    model, _ = scheduled(**more)
    best, ended = model.best_iteration, model.num_boosted_rounds()
    assert ended < 400
    (again, _), attempts = in_attempts(tmp_path, lambda: scheduled(best + 4, best + 7, **more))
    assert len(attempts.codes) == 2
    assert (again.best_iteration, again.num_boosted_rounds()) == (best, ended)
    assert again.best_score == model.best_score


def test_a_model_that_another_one_begins_with_counts_no_rounds(tmp_path: Path) -> None:
    base, _ = scheduled(total=7)
    model, _ = scheduled(total=12, xgb_model=base)
    (again, _), attempts = in_attempts(tmp_path, lambda: scheduled(5, total=12, xgb_model=base))
    assert [state.step for state in attempts.states] == [5]
    assert again.num_boosted_rounds() == 19
    assert again.save_raw() == model.save_raw()


def test_several_trainings_in_one_program(tmp_path: Path) -> None:
    """As in a cross-validation: those that are over are not made anew, and none takes another's model."""

    def folds(*stops: int) -> list[bytes]:
        models = []
        for fold in range(3):
            booster, seen = scheduled(*(stops if fold == 1 else ()), params={"max_depth": 2 + fold})
            models.append(bytes(booster.save_raw()))
            made.append(len(seen))
        return models

    made: list[int] = []
    whole = folds()
    made.clear()
    parts, attempts = in_attempts(tmp_path, lambda: folds(4))
    assert parts == whole
    assert [state.step for state in attempts.states] == [34]
    assert made == [30, 0, 26, 30]


def test_what_follows_a_training_begins_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved at its end, and the signals are given back: what follows may be ended at any time."""
    monkeypatch.setattr(rounds, "_PART", 1e9)  # these are over sooner than saved
    before = [signal.getsignal(each) for each in (signal.SIGTSTP, signal.SIGTERM)]
    whole, _ = scheduled(total=12)
    rounds.current.cache_clear()
    made: list[int] = []

    def evaluated() -> bytes:
        model = b""
        for _ in range(2):
            booster, seen = scheduled(total=12)
            made.append(len(seen))
            model += bytes(booster.save_raw())
        assert [signal.getsignal(each) for each in (signal.SIGTSTP, signal.SIGTERM)] == before
        state = State.decode((tmp_path / files.STATE).read_bytes())
        if len(made) == 2:  # as if it were ended in its evaluation
            raise SystemExit(143)
        assert state.step == 24
        return model

    model, attempts = in_attempts(tmp_path, evaluated)
    assert attempts.codes == [143]
    assert made == [12, 12, 0, 0]
    assert model == 2 * bytes(whole.save_raw())


def test_an_order_between_two_trainings_is_followed_in_the_next(tmp_path: Path) -> None:
    def folds() -> None:
        scheduled(total=5)
        if not attempts.codes:
            (tmp_path / files.stop(1)).write_text('{"signal": "SIGTSTP"}')
        scheduled(total=5)

    attempts = Attempts(tmp_path)

    def once() -> None:
        rounds.current.cache_clear()
        folds()

    attempts.run(once)
    assert (attempts.codes, [state.step for state in attempts.states]) == ([75], [6])


def test_hundreds_of_trainings_are_not_saved_hundreds_of_times(tmp_path: Path) -> None:
    """As in a search: each save holds all models so far."""
    with Attempts(tmp_path)._attempt():
        made = rounds.current()
        made._took = 1000.0  # seconds, of the save before
        made._saved_at = time.monotonic()
        scheduled(total=2)
        assert not (tmp_path / files.STATE).exists()
        made._saved_at -= 10_000
        scheduled(total=2)
        assert State.decode((tmp_path / files.STATE).read_bytes()).step == 4


def test_an_end_that_cannot_be_saved_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint").write_text("no folder")
    booster, _ = Attempts(tmp_path).run(lambda: scheduled(total=2))
    assert booster.num_boosted_rounds() == 2
    assert "the end of the training could not be saved" in capfd.readouterr().err


def test_a_periodic_save_that_fails_is_tried_again_in_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").write_text("no folder")
    with Attempts(tmp_path)._attempt():
        rounds.current().link._record.saved_at -= 3601
        scheduled(total=9)
    assert capfd.readouterr().err.count("periodic checkpoint failed, training goes on") == 1


def test_what_is_drawn_is_said_and_not_drawn_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (booster, _), _ = in_attempts(tmp_path, lambda: scheduled(10, params={"subsample": 0.5}))
    said = capfd.readouterr().err
    assert said.count("hpcsched:") == 1
    assert "draws anew after round 10 (subsample)" in said
    assert '"seed":"13"' in booster.save_config()


def test_nothing_is_said_where_nothing_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    in_attempts(tmp_path, lambda: scheduled(10))
    assert "hpcsched:" not in capfd.readouterr().err


@pytest.mark.parametrize(("stopping", "metric"), [(None, None), (5, None), (5, ["error", "logloss"])])
def test_scikit_learn(tmp_path: Path, stopping: int | None, metric: list[str] | None) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    x, y = samples()
    labels = (y > 0).astype(int)

    def fitted(*stops: int) -> Any:
        model = xgb.XGBClassifier(
            n_estimators=25,
            max_depth=3,
            n_jobs=1,
            early_stopping_rounds=stopping,
            eval_metric=metric,
            callbacks=[Stop(*stops)],
        )
        return fit(model, x[:300], labels[:300], eval_set=[(x[300:], labels[300:])], verbose=False)

    whole = fitted()
    parts, attempts = in_attempts(tmp_path, lambda: fitted(6, 9))
    assert attempts.codes == [75, 75]
    assert parts.get_booster().save_raw() == whole.get_booster().save_raw()
    assert parts.evals_result() == whole.evals_result()
    assert (parts.predict_proba(x) == whole.predict_proba(x)).all()
    assert parts.n_estimators == 25
    assert parts.early_stopping_rounds == stopping
    assert parts.eval_metric == metric
    if stopping:
        assert parts.best_iteration == whole.best_iteration


@pytest.mark.parametrize("kind", ["XGBRFClassifier", "XGBRFRegressor"])
def test_a_forest_is_fitted_as_it_is(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    x, y = samples()

    def forest() -> Any:
        return getattr(xgb, kind)(n_estimators=10, max_depth=3, n_jobs=1, random_state=3)

    whole = forest().fit(x, y > 0)
    ours, _ = in_attempts(tmp_path, lambda: fit(forest(), x, y > 0))
    assert (ours.predict(x) == whole.predict(x)).all()
    assert f"{kind} is made in one round, so it is not suspended" in capfd.readouterr().err
    assert not (tmp_path / files.ready(1)).exists()


def test_old_checkpoints_go(tmp_path: Path) -> None:
    _, attempts = in_attempts(tmp_path, lambda: scheduled(2, 4, 6, 8))
    assert len(attempts.codes) == 4
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="processes: 2 processes; accepted: one"):
        Attempts(tmp_path, HPCSCHED_RANK="1", HPCSCHED_WORLD_SIZE="2").run(scheduled)


def test_without_hpcsched_it_is_xgboost() -> None:
    data = xgb.DMatrix(*samples())
    ours = train(PARAMS, data, 5, verbose_eval=False)
    assert ours.save_raw() == xgb.train(PARAMS, data, 5, verbose_eval=False).save_raw()
