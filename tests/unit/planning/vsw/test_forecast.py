"""What a forecast of batch sizes promises: bounds, the choice by back-test, and what bad input says."""

from __future__ import annotations

import numpy as np
import pytest
from budget import examples, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsched.errors import ConfigError
from hpcsched.planning.vsw import forecast as module
from hpcsched.planning.vsw.forecast import (
    MAX_WINDOWS,
    METHODS,
    MIN_HISTORY,
    MIN_REL_GAIN,
    forecast,
    with_fluctuations,
)

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of several test processes would wait for one another."""
    limit = pytest.importorskip("threadpoolctl").threadpool_limits
    with limit(1):
        yield


BOUNDS = {"low": 128.0, "high": 8192.0}
CHEAP = ("last", "damped")
EPOCH = 20


def growing(values, *, factor=1.01, wave=0.0, noise=0.0, period=EPOCH, seed=0):
    at = np.arange(values)
    rough = np.random.default_rng(seed).normal(0, noise, values) if noise else 0
    return 200 * np.exp(np.log(factor) * at + wave * np.sin(2 * np.pi * at / period) + rough)


def error(said, actual):
    return float(np.mean(np.abs(np.array(said.values) - actual) / actual))


def installed(*names):
    for name in names:
        pytest.importorskip(name)


# -- how good it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_steady_trend_is_followed(factor):
    values = growing(160, factor=factor) * (1 if factor > 1 else 20)
    said = forecast(values[:140], EPOCH, **BOUNDS, methods=CHEAP)
    assert said.method == "damped"
    assert error(said, values[140:]) < 0.02
    assert said.errors["damped"] < 0.5 * said.errors["last"]


def test_a_trend_hidden_in_noise_is_followed():
    errors = {}
    for methods in (CHEAP, ("last",)):
        errors[methods] = []
        for seed in range(8):
            values = growing(200, factor=1.012, noise=0.06, seed=seed)
            said = forecast(values[:180], EPOCH, **BOUNDS, methods=methods)
            errors[methods].append(error(said, values[180:]))
    assert np.mean(errors[CHEAP]) < 0.8 * np.mean(errors["last",])


@pytest.mark.parametrize("period", [10, slow(20), slow(26)])
@pytest.mark.long
def test_fluctuation_with_a_period_is_found_by_the_gaussian_process(period):
    installed("sklearn")
    values = growing(160, wave=0.2, noise=0.02, period=period)
    gpr = forecast(values[:145], 15, **BOUNDS, methods=["gpr"])
    assert error(gpr, values[145:]) < 0.05


@pytest.mark.slow
def test_what_the_gaussian_process_finds_is_chosen():
    installed("sklearn")
    values = growing(60, wave=0.2, noise=0.02, period=7)
    said = forecast(values, 15, **BOUNDS, methods=("last", "damped", "gpr"))
    assert said.method == "gpr"


def test_smoothing_follows_a_trend():
    installed("statsmodels")
    values = growing(140, noise=0.01)
    assert error(forecast(values[:120], EPOCH, **BOUNDS, methods=["smoothing"]), values[120:]) < 0.06


def test_where_nothing_goes_on_the_last_value_is_hardly_left():
    """A random walk has no better forecast than its last value; what is lost by the choice is small."""
    lost = []
    for seed in range(20):
        steps = np.random.default_rng(seed).choice([np.log(0.9), np.log(1.1)], 240)
        values = np.clip(1000 * np.exp(np.cumsum(steps)), 128, 8192)
        chosen, last = (
            error(forecast(values[:220], EPOCH, **BOUNDS, methods=methods), values[220:])
            for methods in (CHEAP, ("last",))
        )
        lost.append((chosen, last))
    chosen, last = np.mean(lost, axis=0)
    assert chosen < 1.1 * last


# -- the choice ----------------------------------------------------------------------------------------


def test_errors_are_those_of_forecasts_from_earlier_values_only():
    values = growing(170, wave=0.1, noise=0.05)
    said = forecast(values, EPOCH, **BOUNDS, methods=CHEAP)
    origins = [170 - EPOCH * k for k in range(1, MAX_WINDOWS + 1)]
    for name in CHEAP:
        each = [
            error(forecast(values[:o], EPOCH, **BOUNDS, methods=[name]), values[o : o + EPOCH])
            for o in origins
        ]
        assert said.errors[name] == pytest.approx(np.mean(each))


def test_the_last_value_is_left_only_for_what_is_clearly_better():
    left = 0
    for seed in range(30):
        said = forecast(
            growing(120, factor=1.002, noise=0.1, seed=seed), EPOCH, **BOUNDS, methods=("damped", "last")
        )
        assert (said.method == "damped") == (said.errors["damped"] < (1 - MIN_REL_GAIN) * said.errors["last"])
        left += said.method == "damped"
    assert 0 < left < 30


def test_a_gain_within_the_margin_is_not_taken(monkeypatch):
    for gain, method in ((0.5 * MIN_REL_GAIN, "last"), (2 * MIN_REL_GAIN, "damped")):
        monkeypatch.setattr(module, "_back_test", lambda *_, g=gain: {"last": 0.1, "damped": 0.1 * (1 - g)})
        assert forecast(growing(100), EPOCH, **BOUNDS, methods=CHEAP).method == method


def test_without_last_the_least_error_is_chosen():
    installed("statsmodels")
    said = forecast(growing(120, noise=0.1), EPOCH, **BOUNDS, methods=("smoothing", "damped"))
    assert set(said.errors) == {"smoothing", "damped"}
    assert said.method == min(said.errors, key=said.errors.__getitem__)


@pytest.mark.parametrize("values", [1, 2, EPOCH, 2 * EPOCH - 1])
def test_less_than_two_windows_are_not_judged(values):
    history = growing(values)
    said = forecast(history, EPOCH, **BOUNDS)
    assert (said.method, dict(said.errors)) == ("last", {})
    assert said.values == (history[-1],) * EPOCH


def test_two_windows_are():
    assert set(forecast(growing(2 * EPOCH), EPOCH, **BOUNDS, methods=CHEAP).errors) == set(CHEAP)


@pytest.mark.parametrize("values", [1, 3, 10, *(slow(number) for number in (2, 9, 11, 30))])
@pytest.mark.parametrize("name", METHODS)
def test_each_method_says_something_about_any_history(name, values):
    installed("sklearn", "statsmodels")
    for history in (growing(values), np.full(values, 300.0)):
        for ahead in (1, 5, EPOCH):
            said = forecast(history, ahead, **BOUNDS, methods=[name])
            assert said.method == name
            assert len(said.values) == ahead
            assert all(128 <= value <= 8192 for value in said.values)


def test_a_trend_cannot_be_fitted_to_a_few_values():
    history = growing(5, factor=1.1)
    assert forecast(history, 3, **BOUNDS, methods=["damped"]).values == pytest.approx((history[-1],) * 3)


def test_a_fit_that_fails_says_what_last_does(monkeypatch):
    monkeypatch.setattr(module, "_damped", lambda logs, ahead, bounds: np.full(ahead, np.nan))
    said = forecast([200.0, 300.0] * 30, 4, **BOUNDS, methods=("damped", "last"))
    assert said.values == (300.0,) * 4
    assert said.errors["damped"] == said.errors["last"]


@pytest.mark.slow
def test_the_ensemble_is_the_mean_of_its_two():
    installed("sklearn", "statsmodels")
    history = growing(100, noise=0.05)
    gpr, smoothing, both = (
        forecast(history, EPOCH, **BOUNDS, methods=[name]).values for name in ("gpr", "smoothing", "ensemble")
    )
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(gpr, smoothing, strict=True)])


# -- always the same, never outside --------------------------------------------------------------------


@pytest.mark.long
def test_the_same_history_gives_the_same_forecast():
    history = growing(60, wave=0.1, noise=0.05).tolist()
    np.random.seed(1)
    first = forecast(history, EPOCH, **BOUNDS)
    np.random.seed(2)
    assert forecast(history, EPOCH, **BOUNDS) == first


def test_values_from_long_ago_do_not_matter():
    history = growing(MIN_HISTORY, factor=1.005, noise=0.05)
    long = np.concatenate([growing(300)[::-1], history])
    assert forecast(long, EPOCH, **BOUNDS, methods=CHEAP) == forecast(history, EPOCH, **BOUNDS, methods=CHEAP)


@settings(max_examples=examples(40))
@given(
    history=st.lists(st.floats(1, 1e6), min_size=1, max_size=90),
    ahead=st.integers(0, 25),
    bounds=st.lists(st.floats(1, 1e5), min_size=2, max_size=2).map(sorted),
)
def test_values_are_as_many_as_asked_for_and_within_the_bounds(history, ahead, bounds):
    low, high = bounds
    said = forecast(history, ahead, low=low, high=high, methods=CHEAP)
    assert len(said.values) == ahead
    assert all(low <= value <= high for value in said.values)
    assert said.method in CHEAP


def test_growth_ends_at_the_bound():
    said = forecast(growing(100, factor=1.05), EPOCH, low=128, high=30_000, methods=CHEAP)
    assert said.values[0] > growing(100, factor=1.05)[-1]
    assert said.values[-1] == 30_000


@pytest.mark.long
def test_growth_that_the_bound_has_ended_does_not_go_on():
    history = np.minimum(growing(160, factor=1.05), 4000)
    assert forecast(history, EPOCH, low=128, high=4000).values == pytest.approx((4000,) * EPOCH, rel=0.01)


def test_growth_without_end_does_not_overflow():
    said = forecast(growing(60, factor=3.0), 600, low=128, high=1e35, methods=["damped"])
    assert said.values[-1] <= 1e35


def test_a_history_from_outside_the_bounds_counts_as_at_the_bound():
    assert forecast([9000.0] * 50, 3, **BOUNDS).values == (8192.0,) * 3
    assert forecast([10.0], 3, **BOUNDS).values == (128.0,) * 3


def test_a_constant_stays_exactly_what_it_is():
    said = forecast([300.0] * 100, EPOCH, **BOUNDS)
    assert said.method == "last"
    assert said.values == (300.0,) * EPOCH
    assert said.errors["last"] == 0


def test_nothing_ahead_is_no_values():
    assert forecast(growing(100), 0, **BOUNDS) == module.Forecast(values=(), method="last", errors={})


# -- bad input, and what is not installed --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key", "got"),
    [
        ({"history": []}, "history", "no value"),
        ({"history": [256, float("nan")]}, "history[1]", "nan"),
        ({"history": [float("inf")]}, "history[0]", "inf"),
        ({"history": [0]}, "history[0]", "0"),
        ({"ahead": -1}, "ahead", "-1"),
        ({"low": 0}, "low, high", "0, 8192"),
        ({"low": 9000}, "low, high", "9000, 8192"),
        ({"high": float("inf")}, "low, high", "128, inf"),
        ({"low": float("nan")}, "low, high", "nan, 8192"),
        ({"methods": []}, "methods", "none"),
        ({"methods": ["last", "arima"]}, "methods", "last, arima"),
    ],
)
def test_bad_input_is_named(change, key, got):
    given_ = {"history": [256.0] * 50, "ahead": EPOCH, **BOUNDS, **change}
    with pytest.raises(ConfigError) as caught:
        forecast(given_.pop("history"), given_.pop("ahead"), **given_)
    assert (caught.value.key, caught.value.got) == (key, got)


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ({"sklearn"}, {"last", "damped", "smoothing"}),
        ({"statsmodels"}, {"last", "damped", "gpr"}),
        ({"sklearn", "statsmodels"}, {"last", "damped"}),
    ],
)
def test_what_is_not_installed_is_no_candidate_unless_named(monkeypatch, missing, left):
    if "sklearn" not in missing:
        installed("sklearn")
    if "statsmodels" not in missing:
        installed("statsmodels")
    found = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else found(name))
    assert set(forecast(growing(50), EPOCH, **BOUNDS).errors) == left
    for name in set(METHODS) - left:
        with pytest.raises(ConfigError, match=r"hpcsched\[forecast\]"):
            forecast(growing(50), EPOCH, **BOUNDS, methods=[name])


def test_a_flat_forecast_fluctuates_as_the_last_epoch_did_around_its_trend() -> None:
    growth = [100.0 * 1.02**i for i in range(40)]
    wave = [1.1 if i % 4 < 2 else 1 / 1.1 for i in range(40)]
    history = [a * b for a, b in zip(growth, wave, strict=True)]
    found = with_fluctuations([200.0] * 20, history)
    assert max(found) == pytest.approx(220.0, rel=0.03)
    assert min(found) == pytest.approx(200.0 / 1.1, rel=0.03)
    assert sum(found) / 20 == pytest.approx(200.0, rel=0.02)  # the trend is not in it


def test_too_short_a_history_has_no_fluctuations() -> None:
    assert with_fluctuations([5.0, 6.0, 7.0], [1.0, 9.0]) == (5.0, 6.0, 7.0)
