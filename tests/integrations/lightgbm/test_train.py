"""LightGBM trainings that are suspended in their midst end as ones that were not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

lgb = pytest.importorskip("lightgbm", reason="LightGBM is not installed")

from attempts import Attempts  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.contract.state import State  # noqa: E402
from hpcsched.integrations import rounds  # noqa: E402
from hpcsched.integrations.lightgbm import train  # noqa: E402

PARAMS = {
    "objective": "regression",
    "num_leaves": 7,
    "num_threads": 1,
    "seed": 3,
    "verbosity": -1,
    "deterministic": True,
    "force_row_wise": True,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    rounds.current.cache_clear()
    yield
    rounds.current.cache_clear()


def in_attempts(folder: Path, program: Callable[[], Any]) -> tuple[Any, Attempts]:
    def once() -> Any:
        rounds.current.cache_clear()
        return program()

    attempts = Attempts(folder)
    return attempts.run(once), attempts


def samples(seed: int, reference: Any = None) -> Any:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(400, 5))
    return lgb.Dataset(x, x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * draw.normal(size=400), reference=reference)


def scheduled(
    *stops: int, history: dict[str, Any] | None = None, total: int = 30, **more: Any
) -> tuple[Any, list[int]]:
    """A training with what LightGBM's callbacks remember; the rounds that a callback of its own was told."""
    seen = []

    def stop(env: Any) -> None:
        seen.append(env.iteration - env.begin_iteration)
        if seen[-1] + 1 in stops:
            Attempts.stop()

    train_set = samples(0)
    callbacks = [lgb.reset_parameter(learning_rate=lambda at: 0.3 * 0.999**at), stop]
    callbacks += [lgb.record_evaluation(history)] if history is not None else []
    callbacks += more.pop("callbacks", [])
    booster = train(
        {**PARAMS, **more.pop("params", {})},
        train_set,
        total,
        valid_sets=[samples(1, train_set)],
        callbacks=callbacks,
        **more,
    )
    return booster, seen


def trees(booster: Any) -> str:
    """A model's text without its parameters, which name the rounds of the last attempt."""
    return str(booster.model_to_string(num_iteration=-1).partition("parameters:")[0])


def test_twice_suspended_is_as_never(tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    model, _ = scheduled(history=whole)
    parts: dict[str, Any] = {}
    (again, told), attempts = in_attempts(tmp_path, lambda: scheduled(11, 20, history=parts))
    assert attempts.codes == [75, 75]
    assert [state.step for state in attempts.states] == [11, 20]
    assert trees(again) == trees(model)
    assert parts == whole
    assert told == list(range(20, 30))
    logged = {point.step: point.values for point in attempts.points}
    assert [logged[step] for step in (1, 30)] == [
        {"valid_0-l2": whole["valid_0"]["l2"][at]} for at in (0, -1)
    ]
    assert attempts.totals == {30}
    assert b"true" not in (tmp_path / files.ready(1)).read_bytes()


@pytest.mark.parametrize("how", ["callback", "parameter"])
def test_early_stopping_remembers_its_best_round(tmp_path: Path, how: str) -> None:
    def stopped(*stops: int, history: dict[str, Any] | None = None) -> Any:
        more: dict[str, Any] = (
            {"callbacks": [lgb.early_stopping(8, verbose=False)]}
            if how == "callback"
            else {"params": {"early_stopping_rounds": 8, "num_trees": 400}}
        )
        return scheduled(*stops, total=400, history=history, **more)[0]

    model = stopped()
    assert 0 < model.best_iteration < 390
    best = model.best_iteration
    again, attempts = in_attempts(tmp_path, lambda: stopped(best + 3, best + 6, history={}))
    assert len(attempts.codes) == 2
    assert (again.best_iteration, again.num_trees()) == (best, model.num_trees())
    assert again.best_score == model.best_score
    assert trees(again) == trees(model)


def test_several_trainings_in_one_program(tmp_path: Path) -> None:
    made: list[int] = []

    def folds(*stops: int) -> list[Any]:
        results = []
        for fold in range(3):
            history: dict[str, Any] = {}
            booster, seen = scheduled(
                *(stops if fold == 1 else ()),
                history=history,
                params={"num_leaves": 5 + fold},
                callbacks=[lgb.early_stopping(10, verbose=False)],
            )
            results.append((trees(booster), booster.best_iteration, booster.best_score, history))
            made.append(len(seen))
        return results

    whole = folds()
    made.clear()
    parts, _ = in_attempts(tmp_path, lambda: folds(4))
    assert parts == whole
    assert made[1] == 0


def test_what_is_drawn_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drawing = {"bagging_fraction": 0.5, "bagging_freq": 1, "bagging_fraction_seed": 5}
    (booster, _), _ = in_attempts(tmp_path, lambda: scheduled(10, params=drawing))
    assert "draws anew after round 10 (bagging_fraction)" in capfd.readouterr().err
    assert "[bagging_seed: 15]" in booster.model_to_string()


def test_a_forest_is_not_suspended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forest = {"boosting_type": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}
    data = samples(0)
    (_, _), attempts = in_attempts(tmp_path, lambda: (train({**PARAMS, **forest}, data, 5), None))
    assert attempts.codes == []
    assert State.decode((tmp_path / files.STATE).read_bytes()).step == 5
    assert "is not suspended: its random forests are made in one go" in capfd.readouterr().err
    assert not (tmp_path / files.ready(1)).exists()


def test_a_forest_is_not_saved_in_its_midst(tmp_path: Path) -> None:
    """LightGBM could not go on from there."""
    forest = {"boosting_type": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}

    def dies(env: Any) -> None:
        assert env.iteration < 3

    with Attempts(tmp_path, HPCSCHED_CHECKPOINT_EVERY_S="0")._attempt(), pytest.raises(AssertionError):
        train({**PARAMS, **forest}, samples(0), 5, callbacks=[dies])
    assert not (tmp_path / files.STATE).exists()


def test_data_that_is_gone_is_said_before_it_is_needed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = samples(0).construct()
    in_attempts(tmp_path, lambda: train(PARAMS, data, 5))
    assert "free_raw_data=False" in capfd.readouterr().err
    assert not (tmp_path / files.ready(1)).exists()


def test_without_hpcsched_it_is_lightgbm() -> None:
    ours = train(PARAMS, samples(0), 5)
    assert trees(ours) == trees(lgb.train(PARAMS, samples(0), 5))
