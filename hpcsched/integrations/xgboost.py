"""XGBoost trainings that can be suspended: `train` and `fit` in place of `xgboost.train` and `model.fit`.

from hpcsched.integrations.xgboost import train

booster = train(params, dtrain, 500, evals=[(dtrain, "train")], early_stopping_rounds=20)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import xgboost as xgb
from xgboost.callback import (
    EarlyStopping,
    EvaluationMonitor,
    LearningRateScheduler,
    TrainingCallback,
    TrainingCheckPoint,
)

from hpcsched.integrations.rounds import Rounds, Training, current
from hpcsched.worker.process.contract import say

_COUNT_BY_THEMSELVES = (EarlyStopping, TrainingCheckPoint)
"""Callbacks that add the rounds which the model had before."""

_DRAWS_NOTHING = {
    "subsample": 1.0,
    "colsample_bytree": 1.0,
    "colsample_bylevel": 1.0,
    "colsample_bynode": 1.0,
    "rate_drop": 0.0,
}


def train(
    params: dict[str, Any],
    dtrain: xgb.DMatrix,
    num_boost_round: int = 10,
    *,
    evals: Sequence[tuple[xgb.DMatrix, str]] | None = None,
    maximize: bool | None = None,
    early_stopping_rounds: int | None = None,
    evals_result: dict[str, Any] | None = None,
    verbose_eval: bool | int | None = True,
    xgb_model: Any = None,
    callbacks: Sequence[TrainingCallback] | None = None,
    **more: Any,
) -> xgb.Booster:
    """`xgboost.train` that can be suspended and goes on; without hpcsched it is `xgboost.train`.

    `num_boost_round` is the whole work, whatever was done before. Evaluations, early stopping and the
    rounds that callbacks are told go over all attempts.
    """
    rounds = current()
    if not rounds.link.active:
        return xgb.train(
            params,
            dtrain,
            num_boost_round,
            evals=evals,
            maximize=maximize,
            early_stopping_rounds=early_stopping_rounds,
            evals_result=evals_result,
            verbose_eval=verbose_eval,
            xgb_model=xgb_model,
            callbacks=callbacks,
            **more,
        )
    training = rounds.begin(num_boost_round)
    if training.ended or training.done >= num_boost_round > 0:
        booster = xgb.Booster(params, model_file=bytearray(training.model))
    else:
        told = _told(training, callbacks, verbose_eval, early_stopping_rounds, maximize)
        booster = xgb.train(
            params,
            dtrain,
            num_boost_round - training.done,
            evals=evals,
            verbose_eval=False,  # a callback, as all that counts rounds
            xgb_model=bytearray(training.model) if training.model else xgb_model,
            callbacks=[_Round(rounds, training, num_boost_round, told)],
            **more,
        )
    rounds.end(training, bytes(booster.save_raw("ubj")), _newest(training.history))
    if evals_result is not None:
        evals_result.update(training.history or {})
    return booster


def fit(model: xgb.XGBModel, x: Any, y: Any, **options: Any) -> xgb.XGBModel:
    """`model.fit(x, y, ...)` of XGBoost's models for scikit-learn, which can be suspended and goes on.

    Random forests (XGBRF...) are fitted as they are.
    """
    rounds = current()
    if not rounds.link.active:
        return model.fit(x, y, **options)
    if isinstance(model, (xgb.XGBRFClassifier, xgb.XGBRFRegressor)):
        rounds.never(f"{type(model).__name__} is made in one round, so it is not suspended")
        return model.fit(x, y, **options)
    total = model.get_num_boosting_rounds()
    training = rounds.begin(total)
    said = model.get_params(deep=False)
    kept = {name: said[name] for name in ("n_estimators", "callbacks", "early_stopping_rounds")}
    told = _told(
        training, kept["callbacks"], options.pop("verbose", True), kept["early_stopping_rounds"], None
    )
    if training.model:
        options["xgb_model"] = xgb.Booster(model_file=bytearray(training.model))
    left = 0 if training.ended else max(0, total - training.done)
    own = [_Round(rounds, training, total, told)] if left else []
    try:
        _set(model, {"n_estimators": left, "callbacks": own, "early_stopping_rounds": None})
        model.fit(x, y, verbose=False, **options)
    finally:
        _set(model, kept)
    if training.history:
        model.evals_result_ = training.history
    rounds.end(training, bytes(model.get_booster().save_raw("ubj")), _newest(training.history))
    return model


def _set(model: xgb.XGBModel, params: dict[str, Any]) -> None:
    """Set these alone: `set_params` of a fitted model gives its booster all, which may refuse some."""
    for name, value in params.items():
        setattr(model, name, value)


class _Round(TrainingCallback):  # type: ignore[misc]
    """The callbacks of the program, and then what hpcsched hears and asks after each round.

    One for all of them, as XGBoost 2 calls its callbacks in no order.
    """

    def __init__(
        self, rounds: Rounds, training: Training, total: int, told: Sequence[TrainingCallback]
    ) -> None:
        super().__init__()
        self._rounds, self._training, self._total, self._told = rounds, training, total, told
        self._before = training.done

    def before_training(self, model: xgb.Booster) -> xgb.Booster:
        self._rounds.ready()
        for callback in self._told:
            model = callback.before_training(model)
        if self._before:
            self._draw_others(model)
        return model

    def after_training(self, model: xgb.Booster) -> xgb.Booster:
        for callback in self._told:
            model = callback.after_training(model)
        return model

    def before_iteration(self, model: xgb.Booster, epoch: int, evals_log: Any) -> bool:
        if epoch == 0 and self._before:
            evals_log.update(self._training.history)
        self._training.history = evals_log
        return any(callback.before_iteration(model, epoch, evals_log) for callback in self._told)

    def after_iteration(self, model: xgb.Booster, epoch: int, evals_log: Any) -> bool:
        self._training.done = self._before + epoch + 1
        if any(callback.after_iteration(model, epoch, evals_log) for callback in self._told):
            return True
        if self._training.done < self._total:
            self._rounds.after(self._training, lambda: bytes(model.save_raw("ubj")), _newest(evals_log))
        return False

    def _draw_others(self, model: xgb.Booster) -> None:
        """A model that goes on would draw what it drew in its first rounds again: give it another seed."""
        config = json.loads(model.save_config())
        model.set_param({"seed": int(config["learner"]["generic_param"]["seed"]) + self._before})
        if draws := sorted(set(_drawing(config))):
            say(
                f"XGBoost draws anew after round {self._before} ({', '.join(draws)}): the model will differ "
                "a little from one that was never suspended"
            )


class _Continued(TrainingCallback):  # type: ignore[misc]
    """A callback of the program's, for which the rounds before this attempt count."""

    def __init__(self, callback: TrainingCallback, training: Training) -> None:
        super().__init__()
        self._callback, self._training, self._before = callback, training, training.done
        self._more = 0 if isinstance(callback, _COUNT_BY_THEMSELVES) else self._before

    def before_training(self, model: xgb.Booster) -> xgb.Booster:
        model = self._callback.before_training(model)
        if isinstance(self._callback, EarlyStopping):  # its memory of the best round
            for at in range(self._before):
                self._callback.after_iteration(model, at - self._before, _up_to(self._training.history, at))
        elif isinstance(self._callback, LearningRateScheduler) and self._before:
            self._callback.after_iteration(model, self._before - 1, {})
        return model

    def after_training(self, model: xgb.Booster) -> xgb.Booster:
        return self._callback.after_training(model)

    def before_iteration(self, model: xgb.Booster, epoch: int, evals_log: Any) -> bool:
        return bool(self._callback.before_iteration(model, epoch + self._more, evals_log))

    def after_iteration(self, model: xgb.Booster, epoch: int, evals_log: Any) -> bool:
        return bool(self._callback.after_iteration(model, epoch + self._more, evals_log))


def _told(
    training: Training,
    callbacks: Sequence[TrainingCallback] | None,
    verbose: bool | int | None,
    early_stopping_rounds: int | None,
    maximize: bool | None,
) -> list[TrainingCallback]:
    """The callbacks of a training, in XGBoost's order, for which the rounds before count."""
    all_of_them = [*(callbacks or ())]
    if verbose:
        all_of_them.append(EvaluationMonitor(period=int(verbose)))
    if early_stopping_rounds:
        all_of_them.append(EarlyStopping(rounds=early_stopping_rounds, maximize=maximize))
    return [_Continued(callback, training) for callback in all_of_them]


def _newest(history: dict[str, dict[str, list[Any]]] | None) -> dict[str, float]:
    """The newest evaluations by XGBoost's names, such as train-rmse; of a cross-validation their means."""
    newest = {
        f"{data}-{metric}": values[-1]
        for data, metrics in (history or {}).items()
        for metric, values in metrics.items()
        if values
    }
    return {name: float(one[0] if isinstance(one, tuple) else one) for name, one in newest.items()}


def _up_to(history: dict[str, dict[str, list[Any]]], at: int) -> dict[str, dict[str, list[Any]]]:
    """The evaluations as a callback has seen them after round `at`, counted from 0; only the newest."""
    return {
        data: {metric: [values[at]] for metric, values in of.items() if at < len(values)}
        for data, of in history.items()
    }


def _drawing(config: Any) -> Iterator[str]:
    """Names of the parameters by which this model draws rows, columns or trees at random."""
    if isinstance(config, list):
        config = dict(enumerate(config))
    if isinstance(config, dict):
        for name, value in config.items():
            if name in _DRAWS_NOTHING and float(value) != _DRAWS_NOTHING[name]:
                yield name
            yield from _drawing(value)
