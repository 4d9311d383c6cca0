"""The pure course of an attempt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planning.jobs.course import Course


@st.composite
def courses(draw: st.DrawFn) -> Course:
    first = draw(st.integers(0, 10**6))
    return Course(
        from_step=first,
        steps=first + draw(st.integers(0, 10**6)),
        rate=draw(st.floats(1e-3, 1e4)),
        start_s=draw(st.floats(0, 1000)),
        suspend_s=draw(st.floats(0, 1000)),
    )


SHARES = st.floats(0, 1.2)


def test_by_hand() -> None:
    course = Course(from_step=10, steps=20, rate=2.0, start_s=5.0, suspend_s=3.0)
    assert course.end_s == 10.0
    assert [course.step_at(t) for t in (0, 5, 5.4, 5.5, 9.99, 10, 99)] == [10, 10, 10, 11, 19, 20, 20]
    assert course.suspend_at(4) == (10, 7)  # still starting
    assert course.suspend_at(5) == (10, 8)  # no step begun yet
    assert course.suspend_at(5.2) == (11, 8.5)  # the begun step is finished
    assert course.suspend_at(5.5) == (11, 8.5)  # at a boundary none is begun
    assert course.suspend_at(9.6) == (20, 10)  # the last step: done
    assert course.suspend_at(11) == (20, 10)


def test_rounding_adds_no_step() -> None:
    course = Course(from_step=0, steps=10_000, rate=4.43, start_s=19.1, suspend_s=28.6)
    for k in range(10_000):
        t = 19.1 + k / 4.43
        assert course.step_at(t) == k
        assert course.suspend_at(t)[0] == k


@given(courses(), SHARES, SHARES)
def test_steps_only_grow_and_stay_in_range(course: Course, a: float, b: float) -> None:
    early, late = sorted((a * course.end_s, b * course.end_s))
    assert course.from_step <= course.step_at(early) <= course.step_at(late) <= course.steps
    assert course.step_at(course.end_s) == course.steps


@given(courses(), SHARES)
def test_a_suspension_loses_no_step_and_promises_none(course: Course, share: float) -> None:
    t = share * course.end_s
    step, free = course.suspend_at(t)
    assert course.step_at(t) <= step <= min(course.step_at(t) + 1, course.steps)
    if free != course.end_s:
        assert free >= t + course.suspend_s
        assert free <= t + course.suspend_s + 1 / course.rate * (1 + 1e-6)
        assert step < course.steps or t < course.start_s
    if step == course.steps and t >= course.start_s:
        assert free == course.end_s


@given(courses(), SHARES, SHARES)
def test_asking_later_saves_no_less(course: Course, a: float, b: float) -> None:
    early, late = sorted((a * course.end_s, b * course.end_s))
    assert course.suspend_at(early)[0] <= course.suspend_at(late)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": float("inf")},
        {"start_s": -1.0},
        {"suspend_s": float("nan")},
        {"from_step": 11},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a|steps run"):
        Course(**{"from_step": 0, "steps": 10, "rate": 1.0, "start_s": 0.0, "suspend_s": 0.0, **wrong})
