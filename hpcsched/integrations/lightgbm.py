"""LightGBM trainings that can be suspended: `train` in place of `lightgbm.train`.

from hpcsched.integrations.lightgbm import train

booster = train(params, train_set, 500, valid_sets=[valid_set], callbacks=[lgb.early_stopping(20)])
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightgbm as lgb
from lightgbm.basic import _ConfigAliases

from hpcsched.integrations.rounds import Rounds, Training, current
from hpcsched.worker.process.contract import say

Callback = Callable[[Any], None]

_REMEMBER = (type(lgb.early_stopping(1, verbose=False)), type(lgb.record_evaluation({})))
"""Callbacks that remember the rounds before."""

_LAST = 1_000_000
"""The order of a callback that comes after all others."""

_SEEDS = {
    "bagging_seed": 3,
    "feature_fraction_seed": 2,
    "extra_seed": 6,
    "drop_seed": 4,
    "objective_seed": 5,
}
"""Of what is drawn while LightGBM trains, and their defaults."""

_DRAWS_NOTHING: dict[str, tuple[Any, ...]] = {
    "bagging_fraction": (1.0,),
    "pos_bagging_fraction": (1.0,),
    "neg_bagging_fraction": (1.0,),
    "feature_fraction": (1.0,),
    "feature_fraction_bynode": (1.0,),
    "extra_trees": (False, "false"),
    "data_sample_strategy": ("bagging",),
    "boosting": ("gbdt", "gbrt"),
}
"""Parameters, and the values with which nothing is drawn at random."""

# One evaluation: a class of its own from LightGBM 4.7 on, a tuple of the same before.
_evaluation: Callable[..., Any] = getattr(lgb.basic, "EvalResult", lambda *fields: fields)


def train(
    params: dict[str, Any],
    train_set: lgb.Dataset,
    num_boost_round: int = 100,
    valid_sets: list[lgb.Dataset] | None = None,
    valid_names: list[str] | None = None,
    feval: Any = None,
    init_model: Any = None,
    keep_training_booster: bool = False,
    callbacks: Sequence[Callback] | None = None,
) -> lgb.Booster:
    """`lightgbm.train` that can be suspended and goes on; without hpcsched it is `lightgbm.train`.

    `num_boost_round` is the whole work, whatever was done before. Early stopping, recorded evaluations and
    the rounds that callbacks are told go over all attempts.
    """
    rounds = current()
    training = Training()
    if rounds.link.active:
        params = dict(params)
        num_boost_round = int(_taken(params, "num_iterations", num_boost_round))
        training = rounds.begin(num_boost_round)
    if training.ended:
        return _ended(params, training, callbacks or ())
    if rounds.link.active:
        callbacks = _told(rounds, training, num_boost_round, [*(callbacks or ()), *_stopping(params)])
        if why := _why_not(params, train_set):
            rounds.never(f"LightGBM cannot go on with this model, so it is not suspended: {why}")
        else:
            rounds.ready()
    if training.done:
        init_model = lgb.Booster(model_str=training.model.decode())
        _draw_others(params, training.done)
    booster = lgb.train(
        params,
        train_set,
        num_boost_round - training.done,
        valid_sets=valid_sets,
        valid_names=valid_names,
        feval=feval,
        init_model=init_model,
        keep_training_booster=keep_training_booster,
        callbacks=callbacks,
    )
    if rounds.link.active:
        training.best = booster.best_iteration
        rounds.end(training, _bytes_of(booster), _newest(training))
    return booster


class _Continued:
    """A callback of the program's, for which the rounds before this attempt count."""

    def __init__(self, callback: Callback, training: Training, total: int, order: int) -> None:
        self.order = getattr(callback, "order", order)
        self.before_iteration = getattr(callback, "before_iteration", False)
        self._callback, self._total = callback, total
        self._missed = list(training.history or ()) if isinstance(callback, _REMEMBER) else []

    def __call__(self, env: Any) -> None:
        env = _with(env, begin_iteration=env.end_iteration - self._total)
        missed, self._missed = self._missed, []
        _replay(self._callback, env, missed)
        self._callback(env)


class _Round:
    """What hpcsched hears and asks after each round, when all other callbacks have had it."""

    def __init__(self, rounds: Rounds, training: Training, total: int) -> None:
        self.order = _LAST  # LightGBM looks for it in the object alone, not in its class
        self._rounds, self._training, self._total = rounds, training, total

    def __call__(self, env: Any) -> None:
        if self._training.done < self._total:
            self._rounds.after(self._training, lambda: _bytes_of(env.model), _newest(self._training))


class _Record:
    """Keeps what was evaluated, before a callback can end the training."""

    def __init__(self, training: Training, total: int) -> None:
        self.order = -_LAST
        self._training, self._total = training, total

    def __call__(self, env: Any) -> None:
        training = self._training
        training.done = self._total - (env.end_iteration - env.iteration - 1)
        evaluated = [(each[0], each[1], float(each[2]), bool(each[3])) for each in env.evaluation_result_list]
        training.history = [*(training.history or ()), evaluated]


def _newest(training: Training) -> dict[str, float]:
    """Its newest evaluations by name, such as valid_0-l2."""
    history = training.history or [()]
    return {f"{each[0]}-{each[1]}": each[2] for each in history[-1]}


def _told(rounds: Rounds, training: Training, total: int, callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a training, for which the rounds before count, and our own."""
    first = -len(callbacks)  # as LightGBM orders those that say nothing
    told = [_Continued(each, training, total, first + at) for at, each in enumerate(callbacks)]
    return [_Record(training, total), *told, _Round(rounds, training, total)]


def _stopping(params: dict[str, Any]) -> list[Callback]:
    """Early stopping, where it is a parameter, as the callback that LightGBM would make of it."""
    wanted = _taken(params, "early_stopping_round", None)
    if not wanted or wanted <= 0:
        return []
    more = {"min_delta": params["early_stopping_min_delta"]} if "early_stopping_min_delta" in params else {}
    verbose = _value(params, "verbosity", 1) > 0
    return [lgb.early_stopping(wanted, bool(params.get("first_metric_only")), verbose, **more)]


def _with(env: Any, **changes: Any) -> Any:
    """What a callback is told, with changes: a dataclass, or a named tuple in older versions."""
    return env._replace(**changes) if hasattr(env, "_replace") else replace(env, **changes)


def _replay(callback: Callback, env: Any, history: Sequence[Any]) -> None:
    """Show a callback rounds that are over."""
    for at, evaluated in enumerate(history):
        results = [_evaluation(*each) for each in evaluated]
        callback(_with(env, iteration=env.begin_iteration + at, evaluation_result_list=results))


def _ended(params: dict[str, Any], training: Training, callbacks: Sequence[Callback]) -> lgb.Booster:
    """What a training has given that was over before the program began anew."""
    booster = lgb.Booster(model_str=training.model.decode())
    booster.best_iteration = training.best
    history = training.history or []
    booster.best_score = defaultdict(OrderedDict)
    for data, metric, value, _ in history[training.best - 1] if history else ():
        booster.best_score[data][metric] = value
    env = lgb.callback.CallbackEnv(booster, params, 0, 0, len(history), [])
    for callback in callbacks:
        if isinstance(callback, _REMEMBER[1]):
            _replay(callback, env, history)
    return booster


def _why_not(params: dict[str, Any], train_set: lgb.Dataset) -> str | None:
    """Why LightGBM could not go on with a model of these, or None."""
    if _value(params, "boosting", "gbdt") in ("rf", "random_forest"):
        return "its random forests are made in one go"
    if getattr(train_set, "_handle", None) is not None and train_set.data is None:
        return "the data is gone: lightgbm.Dataset(..., free_raw_data=False)"
    return None


def _draw_others(params: dict[str, Any], before: int) -> None:
    """A model that goes on would draw what it drew in its first rounds again: give it other seeds."""
    for name, default in _SEEDS.items():
        seed = _value(params, "seed", default)
        params[name] = int(_taken(params, name, default if seed is None else seed)) + before
    draws = [name for name, none in _DRAWS_NOTHING.items() if _value(params, name, none[0]) not in none]
    if draws:
        say(
            f"LightGBM draws anew after round {before} ({', '.join(draws)}): the model will differ a little "
            "from one that was never suspended"
        )
    if _value(params, "boosting", "gbdt") == "dart":
        say(f"LightGBM's DART does not drop the trees up to round {before} any more")


def _value(params: dict[str, Any], name: str, default: Any) -> Any:
    """A parameter by any of its names."""
    return next((params[alias] for alias in _names(name) if alias in params), default)


def _taken(params: dict[str, Any], name: str, default: Any) -> Any:
    """The same, taken out of them."""
    value = _value(params, name, default)
    for alias in _names(name):
        params.pop(alias, None)
    return value


def _names(name: str) -> list[str]:
    """A parameter's name, which goes first, and its others."""
    return [name, *sorted(_ConfigAliases.get(name) - {name})]


def _bytes_of(booster: lgb.Booster) -> bytes:
    text: str = booster.model_to_string(num_iteration=-1)
    return text.encode()
