"""The global batch sizes of the next epoch from those so far (JABAS, section 6.2).

An adaptive batch grows about exponentially and fluctuates, in ways that differ between models. Five methods
forecast it, and which is used is chosen by how each would have done on the history itself:

- `last`: the last value, again and again;
- `damped`: a trend that fades (Holt's, damped as by Gardner and McKenzie), of logarithms;
- `gpr`: a Gaussian process of logarithms with a trend, a periodic and a local part (scikit-learn);
- `smoothing`: damped exponential smoothing of logarithms by maximum likelihood (statsmodels);
- `ensemble`: the mean of `gpr` and `smoothing`, which is the paper's forecaster.

scikit-learn and statsmodels are the extra `forecast`, imported only when used. The same history gives the
same forecast. Nothing here looks further back than RECENT values, or four times what is to be forecast.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product

import numpy as np
import numpy.typing as npt

from hpcsched.compat import dataclass, zip
from hpcsched.errors import ConfigError

Array = npt.NDArray[np.float64]

METHODS = ("last", "damped", "gpr", "smoothing", "ensemble")

MIN_HISTORY = 400
"""Values of the history that are looked at, at least (chosen): 20 epochs of 20 each."""

MAX_WINDOWS = 5
"""Windows of the back-test, at most, the last ones (chosen). More say less about how it goes on, and take
longer."""

MIN_REL_GAIN = 0.1
"""`last` is left only for a method whose error in the back-test is less by this share of it.

Five windows are few: the least error of several is partly luck, which costs where nothing can be forecast.
"""

_LIBRARIES = {
    "gpr": ("sklearn",),
    "smoothing": ("statsmodels",),
    "ensemble": ("sklearn", "statsmodels"),
}
"""What methods need that is not always there."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Batch sizes in samples, oldest first, and the method they are from.

    `errors`: by method, the mean absolute percentage error (0.1 is 10 %) of what it would have said about
    the last windows of the history, each from what came before it. Empty where nothing was compared: too
    short a history, or one method only.
    """

    values: tuple[float, ...]
    method: str
    errors: Mapping[str, float]


def forecast(
    history: Sequence[float],
    ahead: int,
    *,
    low: float,
    high: float,
    methods: Sequence[str] | None = None,
) -> Forecast:
    """The next `ahead` values of a trajectory, by the method that would have done best on it so far.

    Args:
        history: global batch sizes in samples at even distances of progress, oldest first; at least one.
        ahead: how many values to forecast, as many as an epoch has.
        low, high: the bounds of the batch size. No value is outside, and what is of the history, from
            before they were changed, counts as at the bound.
        methods: those to choose from; None: all of METHODS whose libraries are installed. `last` is used
            unless another's error is less by MIN_REL_GAIN, and while the history has less than two windows of
            `ahead` values, so that nothing could be tested (the first of `methods`, if `last` is not one).

    Raises ConfigError for a history with values that are not positive and finite, bounds that are not
    0 < low <= high, a negative `ahead`, and methods that are unknown or whose library is missing.
    """
    _check(history, ahead, low, high)
    candidates = _candidates(methods)
    cautious = "last" if "last" in candidates else candidates[0]
    if ahead == 0:
        return Forecast(values=(), method=cautious, errors={})
    past = np.clip(np.array(history[-max(MIN_HISTORY, 4 * ahead) :], dtype=np.float64), low, high)
    errors = _back_test(past, ahead, low, high, candidates) if len(candidates) > 1 else {}
    method = cautious
    if errors:
        best = min(errors, key=lambda name: errors[name])
        if "last" not in errors or errors[best] < (1 - MIN_REL_GAIN) * errors["last"]:
            method = best
    values = _forecasts(past, ahead, low, high, (method,))[method]
    return Forecast(values=tuple(values.tolist()), method=method, errors=errors)


def with_fluctuations(values: Sequence[float], history: Sequence[float]) -> tuple[float, ...]:
    """The same forecast, going up and down as the last stretch of the history of its length did around its
    own trend; as it is where the history is shorter.

    A forecast is a mean course, and often flat. Who chooses by it what is best for one batch may choose what
    is bad for all those around it.
    """
    if len(history) < len(values) or len(values) < 3:
        return tuple(values)
    logs = np.log(np.asarray(history[-len(values) :], dtype=np.float64))
    times = np.arange(len(logs))
    around = logs - np.polyval(np.polyfit(times, logs, 1), times)
    return tuple(float(value * math.exp(r)) for value, r in zip(values, around, strict=True))


def _check(history: Sequence[float], ahead: int, low: float, high: float) -> None:
    if not len(history):
        raise ConfigError(where="forecast", key="history", got="no value", accepted="at least one batch size")
    for i, value in enumerate(history):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                where="forecast", key=f"history[{i}]", got=f"{value:g}", accepted="a positive finite number"
            )
    if ahead < 0:
        raise ConfigError(where="forecast", key="ahead", got=f"{ahead}", accepted="0 or more values")
    if not 0 < low <= high < math.inf:
        raise ConfigError(
            where="forecast", key="low, high", got=f"{low:g}, {high:g}", accepted="finite, 0 < low <= high"
        )


def _candidates(methods: Sequence[str] | None) -> tuple[str, ...]:
    missing = {name for name, libraries in _LIBRARIES.items() if not all(map(find_spec, libraries))}
    if methods is None:
        return tuple(name for name in METHODS if name not in missing)
    if not methods or not set(methods) <= set(METHODS):
        raise ConfigError(
            where="forecast", key="methods", got=", ".join(methods) or "none", accepted=", ".join(METHODS)
        )
    for name in methods:
        if name in missing:
            raise ConfigError(
                where="forecast",
                key="methods",
                got=f"{name} without {' and '.join(_LIBRARIES[name])}",
                accepted="what is installed; pip install 'hpcsched[forecast]' brings the rest",
            )
    return tuple(methods)


def _back_test(
    past: Array, ahead: int, low: float, high: float, candidates: Sequence[str]
) -> dict[str, float]:
    """Each candidate's mean error over the last windows of `ahead` values, which do not overlap."""
    origins = [len(past) - ahead * k for k in range(1, MAX_WINDOWS + 1) if len(past) - ahead * k >= ahead]
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for origin in origins:
        actual = past[origin : origin + ahead]
        for name, values in _forecasts(past[:origin], ahead, low, high, candidates).items():
            found[name].append(float(np.mean(np.abs(values - actual) / actual)))
    return {name: math.fsum(each) / len(each) for name, each in found.items() if each}


def _forecasts(past: Array, ahead: int, low: float, high: float, names: Sequence[str]) -> dict[str, Array]:
    """What these methods say, within the bounds; a fit that fails says what `last` does."""
    logs = np.log(past)
    needed = {"gpr", "smoothing", *names} if "ensemble" in names else set(names)
    made: dict[str, Array] = {}
    if "damped" in needed:
        made["damped"] = _damped(logs, ahead, (math.log(low), math.log(high)))
    if "gpr" in needed:
        made["gpr"] = _gpr(logs, ahead)
    if "smoothing" in needed:
        made["smoothing"] = _smoothing(logs, ahead)
    values = {"last": np.full(ahead, past[-1])}
    for name, found in made.items():
        if not np.isfinite(found).all():
            values[name] = values["last"]
            continue
        # Also before exp(), which a trend without end would carry past the largest float.
        within = np.clip(found, math.log(low), math.log(high))
        values[name] = np.clip(np.exp(within), low, high)
    if "ensemble" in names:
        values["ensemble"] = (values["gpr"] + values["smoothing"]) / 2
    return {name: values[name] for name in names}


# -- a damped trend ------------------------------------------------------------------------------------

_LEVEL = (0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
_TREND = (0.003, 0.01, 0.03, 0.1, 0.3)
_DAMPING = (0.0, 0.8, 0.9, 0.95, 0.98, 1.0)
_GRID = np.array(tuple(product(_LEVEL, _TREND, _DAMPING))).T
"""Shares by which an error moves the level, and of that the trend; what is left of a trend a value later."""

_SETTLED = 5
"""Values before a forecast counts in the fit: the trend begins at 0."""

_HORIZONS = 20
"""Distances ahead that the fit looks at, at most."""


def _damped(logs: Array, ahead: int, bounds: tuple[float, float]) -> Array:
    """The damped trend whose forecasts, at all distances up to `ahead`, were nearest to this history.

    A fit one value ahead, as is usual, says little about a trend that is hidden in fluctuations. All of
    the grid runs at once: rows are values of the history, columns are parameters.
    """
    rate, share, damping = _GRID
    level, trend = np.full_like(rate, logs[0]), np.zeros_like(rate)
    levels, trends = (np.empty((len(logs), len(rate))) for _ in range(2))
    for i, value in enumerate(logs):
        miss = value - (level + damping * trend)
        level = level + damping * trend + rate * miss
        trend = damping * trend + rate * share * miss
        levels[i], trends[i] = level, trend
    reach = np.cumsum(damping ** np.arange(1, ahead + 1)[:, None], axis=0)
    misses = np.zeros_like(rate)
    for k in np.unique(np.linspace(1, ahead, min(ahead, _HORIZONS)).astype(int)):
        said = np.clip(levels[_SETTLED:-k] + reach[k - 1] * trends[_SETTLED:-k], *bounds)
        misses += np.abs(said - logs[_SETTLED + k :, None]).sum(axis=0)
    if not misses.any():  # too short, or constant
        return np.full(ahead, logs[-1])
    best = int(np.argmin(misses))
    return np.asarray(levels[-1, best] + reach[:, best] * trends[-1, best])


# -- the paper's two, with libraries -------------------------------------------------------------------

_GPR_WINDOW = 100
"""The latest values that the Gaussian process sees: its time grows with the cube of their number ..."""

_GPR_POINTS = 50
"""... and so neighbours are averaged until there are at most so many."""

_PERIODS: tuple[float, ...] = tuple(np.geomspace(0.3, 6.0, 40).tolist())
"""Periods of fluctuation that are looked for, in windows."""


def _gpr(logs: Array, ahead: int) -> Array:
    """The mean of a Gaussian process; time is in windows of `ahead` values, 0 is the present."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import (
        RBF,
        ConstantKernel,
        DotProduct,
        ExpSineSquared,
        WhiteKernel,
    )

    logs = logs[-_GPR_WINDOW:]
    width = -(-len(logs) // _GPR_POINTS)
    logs = logs[len(logs) % width :]
    points = logs.reshape(-1, width).mean(axis=1)
    middle = points.mean()
    times = ((np.arange(len(points)) + 0.5) * width - len(logs)) / ahead
    variance = (1e-4, 1.0)
    kernel = (
        ConstantKernel(0.1, (1e-4, 10.0)) * DotProduct(1.0, (1e-2, 1e2))
        + ConstantKernel(0.02, variance)
        * ExpSineSquared(1.0, _period(times, points), (0.3, 5.0), (_PERIODS[0], _PERIODS[-1]))
        + ConstantKernel(0.02, variance) * RBF(1.0, (0.2, 10.0))
        + WhiteKernel(0.004, variance)
    )
    process = GaussianProcessRegressor(kernel, alpha=1e-6, random_state=0)
    with warnings.catch_warnings():
        # A parameter at its bound is no fault here: a trajectory need not have every part of the kernel.
        warnings.simplefilter("ignore")
        process.fit(times[:, None], points - middle)
        ahead_of_now = (np.arange(ahead) + 0.5) / ahead
        return np.asarray(process.predict(ahead_of_now[:, None]) + middle)


def _period(times: Array, points: Array) -> float:
    """The period whose wave, with a straight line, is nearest to the points.

    The search for the process's parameters goes downhill only: from a wrong period it seldom comes right.
    """

    def miss(period: float) -> float:
        turns = 2 * math.pi * times / period
        parts = np.stack([np.ones_like(times), times, np.sin(turns), np.cos(turns)], axis=1)
        return float(np.sum((points - parts @ np.linalg.lstsq(parts, points)[0]) ** 2))

    return min(_PERIODS, key=miss)


_SMOOTHING_LEAST = 10
"""Values that statsmodels needs for its first guess."""


def _smoothing(logs: Array, ahead: int) -> Array:
    """Exponential smoothing with a damped trend, fitted one value ahead."""
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    if len(logs) < _SMOOTHING_LEAST:
        return np.full(ahead, logs[-1])
    with warnings.catch_warnings():
        # A search that ends early is judged by the back-test like any other.
        warnings.simplefilter("ignore")
        model = ExponentialSmoothing(logs, trend="add", damped_trend=True, initialization_method="estimated")
        return np.asarray(model.fit().forecast(ahead))
