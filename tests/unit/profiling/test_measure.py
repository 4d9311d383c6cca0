"""Rates out of progress reports, whatever their rhythm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.profiling.measure import RateMeter, median_and_spread, parse_report


def meter(**changed: float) -> RateMeter:
    return RateMeter(**({"warmup_s": 1.0, "seconds": 2.0, "repeats": 2} | changed))  # type: ignore[arg-type]


@given(
    rate=st.floats(0.01, 1000),
    every=st.integers(1, 50),
    again=st.integers(1, 3),
    warmup_s=st.floats(0, 5),
    seconds=st.floats(0.1, 5),
)
def test_a_steady_rate_is_found_however_it_is_reported(
    rate: float, every: int, again: int, warmup_s: float, seconds: float
) -> None:
    found = meter(warmup_s=warmup_s, seconds=seconds, repeats=3)
    step = 0
    while not found.done:
        step += every
        for extra in range(again):  # the same step again, a little later
            found.add(step, 1000 + step / rate + extra * every / rate / 10)
    assert [w.rate for w in found.windows] == pytest.approx([rate] * 3, rel=1e-6)
    assert all(w.seconds >= seconds for w in found.windows)


def test_the_warm_up_is_left_out() -> None:
    found = meter()
    reports = [(0, 0.0), (1, 5.0), (2, 5.5), (3, 6.0), (13, 7.0), (23, 8.0), (43, 10.0), (99, 99.0)]
    taken = [found.add(step, t) for step, t in reports]
    assert taken == [False, *[True] * 7]
    assert found.first == (1, 5.0)
    assert [(w.rate, w.seconds) for w in found.windows] == [(10.0, 2.0), (10.0, 2.0)]


def test_what_goes_back_is_passed_over() -> None:
    found = meter(from_step=10)
    assert [found.add(*r) for r in [(10, 1.0), (11, 2.0), (11, 3.0), (12, 2.0), (9, 4.0), (12, 5.0)]] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert found.step == 12 and found.first == (11, 2.0)


def test_median_and_spread() -> None:
    assert median_and_spread([3.0]) == (3.0, None)
    assert median_and_spread([2.0, 4.0, 3.0]) == (3.0, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("line", "report"),
    [
        (b'{"step": 3, "t": 1.5}', (3, 1.5)),
        (b'{"step": 3, "t": 2, "loss": 0.1}', (3, 2.0)),
        (b'{"step": 3.0, "t": 2}', None),
        (b'{"step": true, "t": 2}', None),
        (b'{"step": -1, "t": 2}', None),
        (b'{"step": 1, "t": NaN}', None),
        (b'{"step": 1}', None),
        (b"[1, 2]", None),
        (b"7", None),
        (b"epoch 1\xff", None),
        (b"", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_line_is_a_report_or_nothing(line: bytes, report: tuple[int, float] | None) -> None:
    assert parse_report(line) == report
