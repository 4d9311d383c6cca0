"""When a training goes steadily enough for its use of resources to be judged."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planning.ps.stability import Stability, variation

VALUES = st.floats(min_value=0.01, max_value=1e4)


def fed(samples: list[tuple[float, ...]], **options: float) -> Stability:
    detector = Stability(**options)  # type: ignore[arg-type]
    for sample in samples:
        detector.add(*sample)
    return detector


def test_five_samples_alike_are_stable_and_four_are_not() -> None:
    assert not fed([(10.0, 2.0)] * 4).stable
    assert fed([(10.0, 2.0)] * 5).stable


@pytest.mark.parametrize("noisy", [0, 1])
def test_both_metrics_have_to_be_steady(noisy: int) -> None:
    samples = [(10.0, 10.0)] * 4
    last = [10.0, 10.0]
    last[noisy] = 15.0
    assert not fed([*samples, tuple(last)]).stable


def test_a_disturbance_is_forgotten_after_as_many_samples_as_are_looked_at() -> None:
    detector = fed([(10.0, 2.0)] * 5 + [(20.0, 2.0)])
    for _ in range(4):
        detector.add(10.0, 2.0)
        assert not detector.stable
    detector.add(10.0, 2.0)
    assert detector.stable and detector.samples == 11


def test_what_never_gets_steady_is_waited_for_only_so_long() -> None:
    samples = [(float(10 + 10 * (n % 2)), 2.0) for n in range(30)]
    assert not fed(samples[:29]).settled
    given_up = fed(samples)
    assert given_up.settled and not given_up.stable


def test_nothing_is_no_steady_use() -> None:
    assert not fed([(0.0, 1.0)] * 5).stable
    assert variation((0.0, 0.0)) == math.inf


@pytest.mark.parametrize("options", [{"count": 1}, {"limit": 0.0}, {"count": 5, "patience": 4}])
def test_what_detects_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="nothing to detect"):
        fed([], **options)


@given(st.lists(VALUES, min_size=5, max_size=5))
def test_the_variation_is_that_of_the_textbook(values: list[float]) -> None:
    expected = statistics.pstdev(values) / statistics.mean(values)
    assert variation(tuple(values)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=5, max_size=40), st.floats(min_value=1e-3, max_value=1e3))
def test_units_do_not_matter_nor_what_came_before_the_last_samples(
    samples: list[tuple[float, float]], unit: float
) -> None:
    stable = fed(samples).stable
    assert fed(samples[-5:]).stable == stable
    assert fed([(b, a) for a, b in samples]).stable == stable
    inner = [variation(metric) for metric in zip(*samples[-5:], strict=True)]
    if all(abs(found - 0.05) > 1e-6 for found in inner):  # on the limit rounding decides
        assert fed([(a * unit, b) for a, b in samples]).stable == stable == (max(inner) < 0.05)


@given(VALUES, st.lists(st.floats(min_value=-0.049, max_value=0.049), min_size=5, max_size=5))
def test_whatever_stays_within_the_limit_of_a_value_is_stable(value: float, noise: list[float]) -> None:
    assert fed([(value * (1 + part), 1.0) for part in noise], limit=0.0516).stable
