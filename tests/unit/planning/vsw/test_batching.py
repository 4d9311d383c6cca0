"""Adaptive batches: the rule, a gradient in two halves, learning rates, options (JABAS, section 6.1)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract.schema import refuse
from hpcsched.contract.strategies import batch_bounds
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import METRICS, RULES, BatchRule, Halves
from hpcsched.planning.vsw.options import WorkerOptions, local_batches


def rule(metric: str = "similarity", **rest: float) -> BatchRule:
    given = {"low": 128, "high": 4096, "unit": 64, "target": 0.1, "every": 100, "rate": 0.1, **rest}
    return BatchRule(metric=METRICS[metric], **given)  # type: ignore[arg-type]


def halves(a: np.ndarray, b: np.ndarray, samples: float) -> Halves:
    return Halves(aa=float(a @ a), bb=float(b @ b), ab=float(a @ b), samples=samples)


def test_the_batch_grows_while_the_halves_differ_and_falls_while_they_agree() -> None:
    batching = rule()
    assert batching.next(1280, 0.05) == pytest.approx(1408)
    assert batching.next(1280, 0.5) == pytest.approx(1152)
    assert batching.next(1280, 0.1) == 1280


def test_a_small_batch_grows_by_the_rate_too_though_a_unit_is_more() -> None:
    batching, wish, batches = rule(), 128.0, []
    for _ in range(6):
        wish = batching.next(wish, 0.0)
        batches.append(batching.rounded(wish))
    assert batches == [128, 128, 192, 192, 192, 256]  # 141, 155, 170, 187, 206, 227


def test_the_batch_stays_within_its_bounds_and_where_nothing_is_known() -> None:
    assert rule().next(4096, -1.0) == 4096
    assert rule().next(128, 1.0) == 128
    assert rule().next(512, math.nan) == 512


@given(st.lists(st.floats(-1, 1) | st.just(math.nan), max_size=60), st.floats(0.01, 0.9))
def test_whatever_is_measured_batches_are_whole_units_between_the_bounds(
    values: list[float], rate: float
) -> None:
    batching, wish = rule(rate=rate), 128.0
    for value in values:
        wish = batching.next(wish, value)
        assert batching.rounded(wish) % 64 == 0
        assert 128 <= batching.rounded(wish) <= 4096


def test_by_the_noise_scale_the_batch_goes_to_a_multiple_of_it() -> None:
    batching = rule("noise-scale", target=0.5)
    assert batching.next(1280, 4000.0) == pytest.approx(1408)
    assert batching.next(1280, 2000.0) == pytest.approx(1152)
    assert batching.next(1280, math.inf) == pytest.approx(1408)
    assert batching.next(1280, 2560.0) == 1280


def test_similarity_is_the_cosine() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=50), rng.normal(size=50)
    expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert halves(a, b, 8).similarity == pytest.approx(expected)


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0])
def test_gradients_that_say_nothing_have_no_similarity(broken: float) -> None:
    found = Halves(aa=broken, bb=1.0, ab=0.5, samples=8)
    assert not found.known
    assert math.isnan(found.similarity)
    assert math.isnan(found.noise_scale)


def test_signal_and_noise_are_those_of_the_samples() -> None:
    """Gradients drawn with a known mean and variance: the estimates come out right in the mean."""
    rng = np.random.default_rng(2)
    mean, spread, samples, size = 0.3, 2.0, 16, 400
    found = []
    for _ in range(400):
        a, b = rng.normal(mean, spread / math.sqrt(samples), (2, size))
        found.append(halves(a, b, samples))
    assert np.mean([h.signal for h in found]) == pytest.approx(size * mean**2, rel=0.05)
    assert np.mean([h.noise for h in found]) == pytest.approx(size * spread**2, rel=0.05)
    ratio = np.mean([h.noise for h in found]) / np.mean([h.signal for h in found])
    assert np.median([h.noise_scale for h in found]) == pytest.approx(ratio, rel=0.1)


def test_learning_rates_by_root_and_in_proportion() -> None:
    assert RULES["sqrt"](4.0, None, 64) == 2.0
    assert RULES["linear"](4.0, None, 64) == 4.0
    assert RULES["none"](4.0, None, 64) == 1.0


def test_adascale_is_proportional_where_all_is_noise_and_constant_where_all_is_signal() -> None:
    noise = Halves(aa=1.0, bb=1.0, ab=0.0, samples=64)
    signal = Halves(aa=1.0, bb=1.0, ab=1.0, samples=64)
    between = Halves(aa=1.0, bb=1.0, ab=0.5, samples=64)
    assert RULES["adascale"](4.0, noise, 64) == pytest.approx(4.0)
    assert RULES["adascale"](4.0, signal, 64) == pytest.approx(1.0)
    assert 1.0 < RULES["adascale"](4.0, between, 64) < 4.0
    assert RULES["adascale"](4.0, None, 64) == 2.0


# -- what a job file says ------------------------------------------------------------------------------

ADAPTIVE = {
    "kind": "vsw",
    "local_batch": 32,
    "global_batch": [128, 4096],
    "similarity": 0.1,
    "every": 100,
    "rate": 0.1,
}


def test_the_example_of_the_guide_is_understood() -> None:
    options = WorkerOptions.parse(ADAPTIVE)
    batching = options.batching(128)
    assert (batching.low, batching.high, batching.unit) == (128, 4096, 64)
    assert (batching.metric.name, batching.target, batching.every, batching.rate) == (
        "similarity",
        0.1,
        100,
        0.1,
    )
    assert batching.adapts


def test_without_bounds_the_batch_stays_what_it_is() -> None:
    batching = WorkerOptions.parse({"kind": "vsw", "local_batch": 32}).batching(96)
    assert not batching.adapts
    assert batching.next(96, -1.0) == 96


def test_a_noise_scale_may_be_aimed_at() -> None:
    wish = {"local_batch": 32, "global_batch": [128, 4096], "noise_scale": 3}
    batching = WorkerOptions.parse(wish).batching(128)
    assert (batching.metric.name, batching.target) == ("noise-scale", 3.0)


def test_the_upper_bound_is_rounded_down_to_whole_workers() -> None:
    assert batch_bounds(128, 1000, 64, partial(refuse, "x")) == (128, 960)


@pytest.mark.parametrize(
    ("low", "high", "accepted"),
    [
        (32, 640, "an even number of workers, e.g. 64$"),
        (100, 640, "an even number of workers, e.g. 64 or 128$"),
        (128, 150, "an upper bound of at least 192, or one number$"),
    ],
)
def test_bounds_that_cannot_be_are_told_which_can(low: int, high: int, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted):
        batch_bounds(low, high, 64, partial(refuse, "x"))


@pytest.mark.parametrize(
    ("change", "key", "got"),
    [
        ({"local_batch": 0}, "local_batch", "0"),
        ({"local_batch": [64, 32]}, "local_batch", "[64, 32]"),
        ({"local_batch": "32"}, "local_batch", "'32'"),
        ({"local_batch": None}, "local_batch", "not given"),
        ({"global_batch": [4096, 128]}, "global_batch", "[4096, 128]"),
        (
            {"global_batch": [128, 150]},
            "global_batch",
            "[128, 150], with no batch above 128 in it: they differ by 64 samples",
        ),
        ({"global_batch": [100, 4096]}, "global_batch", "100 samples, not a whole number of 64"),
        ({"global_batch": [128, 4096, 5]}, "global_batch", "[128, 4096, 5]"),
        ({"global_batch": True}, "global_batch", "True"),
        ({"similarity": 1.0}, "similarity", "1.0"),
        ({"similarity": "high"}, "similarity", "'high'"),
        ({"similarity": float("nan")}, "similarity", "nan"),
        ({"noise_scale": 1.0}, "noise_scale", "given together with similarity"),
        ({"similarity": None, "noise_scale": 0}, "noise_scale", "0"),
        ({"every": 0}, "every", "0"),
        ({"rate": 1.0}, "rate", "1.0"),
        ({"rate": 0}, "rate", "0"),
        ({"learning_rate": "cube"}, "learning_rate", "'cube'"),
        ({"synchronize": "never"}, "synchronize", "'never'"),
        ({"workers": 2}, "global_batch", "given together with workers"),
        ({"global_batch": None}, "similarity", "given without global_batch"),
        ({"bathces": 1}, "bathces", "unknown option"),
    ],
)
def test_options_that_make_no_sense_are_named(change: dict[str, object], key: str, got: str) -> None:
    table = {name: value for name, value in {**ADAPTIVE, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as refusal:
        WorkerOptions.parse(table)
    assert (refusal.value.key, refusal.value.got) == (key, got)


@pytest.mark.parametrize(("change", "got"), [({"workers": 0}, "0"), ({"accumulation": -1}, "-1")])
def test_pinned_numbers_that_make_no_sense_are_named(change: dict[str, int], got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        WorkerOptions.parse({"kind": "vsw", **change})


@pytest.mark.parametrize(
    ("options", "base", "message"),
    [
        ({"local_batch": 32}, 100, "local_batch: 32, of which the trainer's global batch of 100 is no whole"),
        ({"local_batch": 32, "global_batch": [96, 960]}, 96, "96 samples, not a whole number of 64"),
        ({"local_batch": 32, "global_batch": [64, 640]}, 128, "fewer than the trainer's global batch of 128"),
        ({"local_batch": 32, "global_batch": [32, 640]}, 32, "accepted: .* e.g. 64"),
    ],
)
def test_batches_that_do_not_fit_the_trainer_are_named(
    options: dict[str, object], base: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerOptions.parse({"kind": "vsw", **options}).batching(base)


def test_local_batches_are_those_that_make_up_the_batch() -> None:
    options = WorkerOptions.parse({"local_batch": [16, 256], "global_batch": [64, 4096]})
    assert local_batches(options, 64, 1, 256) == (16, 32)
    assert local_batches(options, 160, 1, 256) == (16, 80)
    assert local_batches(options, 1024, 1, 256)[-3:] == (128, 176, 256)
    assert local_batches(options, 1024, 1, 128)[-1] == 128
    assert max(local_batches(options, 1024, 16, 256)) == 64


@pytest.mark.parametrize("batch", range(48, 129, 8))
def test_no_batch_is_left_to_the_smallest_local_batch(batch: int) -> None:
    """88 samples are 22 workers of 4; a tenth less or more are four of 20 or 24 too."""
    options = WorkerOptions.parse({"local_batch": [4, 32], "global_batch": [16, 128]})
    assert max(local_batches(options, batch, 1, 32)) >= 12


def test_no_batch_is_larger_than_the_dataset() -> None:
    options = WorkerOptions.parse({"local_batch": [4, 32], "global_batch": [16, 512]})
    assert options.within(10_000) == options
    assert options.within(300).global_batch == (16, 296)
    assert options.within(16).global_batch == (16, 16)
    said = "from 16 samples, more than the 15 of the dataset; accepted: at most 8$"
    with pytest.raises(ConfigError, match=said):
        options.within(15)
    with pytest.raises(
        ConfigError, match=r"more than the 7 of the dataset; accepted: a smaller local_batch too$"
    ):
        options.within(7)
    fixed = WorkerOptions.parse({"local_batch": 4})
    assert fixed.within(3) == fixed


def test_no_choice_leaves_the_bounds() -> None:
    options = WorkerOptions.parse({"local_batch": [1, 64], "global_batch": [64, 128]})
    for batch in range(64, 129, 2):
        for local in local_batches(options, batch, 1, 64):
            assert 64 <= 2 * round(batch / local / 2) * local <= 128
    fixed = WorkerOptions.parse({"local_batch": [1, 64], "global_batch": 64})
    assert all(64 % local == 0 for local in local_batches(fixed, 64, 1, 64))


def test_a_choice_whose_rounding_would_leave_devices_without_a_worker_is_none() -> None:
    options = WorkerOptions.parse({"local_batch": [15, 525], "global_batch": [30, 9000], "rate": 0.8})
    # 540 samples for 13 devices: 14 workers would have 39 each, 45 in units of 15, which makes 12 of them.
    assert 45 not in local_batches(options, 540, 13, 525)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("most", [4, 8, 32, 100, 128, 1024])
@pytest.mark.parametrize("batch", [104, 1048, 16_000, 98_304, 1_000_000])
def test_the_largest_local_batch_is_a_choice_wherever_it_comes_near(
    batch: int, most: int, rate: float
) -> None:
    options = WorkerOptions.parse({"local_batch": [4, most], "global_batch": [8, 2**21], "rate": rate})
    near = abs(2 * max(1, round(batch / most / 2)) * most - batch) <= rate * batch
    assert (most in local_batches(options, batch, 1, most)) is near or most == 4


def test_large_batches_of_small_local_batches_still_have_the_largest() -> None:
    options = WorkerOptions.parse({"local_batch": [16, 32], "global_batch": [64, 65536]})
    assert 32 in local_batches(options, 65536, 4, 32)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(2, 400), st.integers(1, 16), st.booleans())
def test_whatever_is_chosen_is_near_and_gives_each_device_a_worker(
    least: int, times: int, units: int, devices: int, adapts: bool
) -> None:
    table: dict[str, object] = {"local_batch": [least, least * times]}
    if adapts:
        table["global_batch"] = [2 * least, 2 * least * 1000]
    options, batch = WorkerOptions.parse(table), units * 2 * least
    for local in local_batches(options, batch, devices, least * times)[1:]:
        group = 2 if adapts else 1
        workers = group * round(batch / local / group)
        assert workers >= devices
        assert abs(workers * local - batch) <= (0.1 * batch + 1e-9 if adapts else 0)
        assert local % least == 0
