"""The pure parts of the lanes: pacing, duty cycle, feedback, admission."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import ConfigError
from hpcsched.planning.background.admission import Footprint, admit
from hpcsched.planning.background.feedback import MAX_SILENCE_US, MIN_TIMES, Feedback
from hpcsched.planning.background.pacing import Duty, Pacer, share_of
from hpcsched.planning.background.referee import Referee

# -- pacing ------------------------------------------------------------------------------------------------

HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(["look", "complete", "hold", "release", "pace"]), st.floats(0, 5e3)),
    max_size=80,
)


@given(limit=st.integers(1, 5), happenings=HAPPENINGS, shares=st.lists(st.floats(0, 1), min_size=1))
def test_a_lane_never_exceeds_its_limit_and_never_launches_while_held(
    limit: int, happenings: list[tuple[str, float]], shares: list[float]
) -> None:
    pacer, now, held = Pacer(limit), 0.0, False
    running: deque[float] = deque()
    for what, wait in happenings:
        now += wait
        if what == "look" and pacer.may_launch(now):
            assert not held and len(running) < limit
            pacer.launched(now)
            running.append(now)
        elif what == "complete" and running:
            running.popleft()
            pacer.completed(now)
        elif what in ("hold", "release"):
            pacer.held = held = what == "hold"
        elif what == "pace":
            pacer.duty.share = shares[int(now) % len(shares)]
        assert pacer.outstanding == len(running)


@given(limit=st.integers(1, 5), happenings=HAPPENINGS, share=st.floats(0.01, 1))
def test_a_lane_that_is_not_held_always_gets_to_launch_again(
    limit: int, happenings: list[tuple[str, float]], share: float
) -> None:
    pacer, now, outstanding = Pacer(limit, Duty(share)), 0.0, 0
    for what, wait in happenings:
        now += wait
        if what == "look" and pacer.may_launch(now):
            pacer.launched(now)
            outstanding += 1
        elif what == "complete" and outstanding:
            pacer.completed(now)
            outstanding -= 1
    for _ in range(outstanding):
        pacer.completed(now)
    assert pacer.wake_us() < inf
    assert pacer.may_launch(max(now, pacer.wake_us()))


@given(share=st.floats(0.05, 1), work=st.lists(st.floats(10, 2_000), min_size=20, max_size=60))
def test_over_time_a_lane_works_for_its_share(share: float, work: list[float]) -> None:
    pacer, now = Pacer(1, Duty(share)), 0.0
    for took in work:
        now = max(now, pacer.wake_us())
        pacer.launched(now)
        now += took
        pacer.completed(now)
    worked, whole = sum(work), max(now, pacer.wake_us())
    assert worked / whole == pytest.approx(share, rel=0.01)


def test_a_share_of_nothing_stops_a_lane_until_it_gets_one_again() -> None:
    pacer = Pacer(1, Duty(0.0))
    assert not pacer.may_launch(1e9) and pacer.wake_us() == inf
    pacer.duty.share = 0.5
    assert pacer.may_launch(1e9)


def test_a_lane_that_waited_long_does_not_make_up_for_all_of_it() -> None:
    duty = Duty(0.5)
    duty.worked(0.0, 10.0)
    duty.worked(1e6, 1e6 + 100.0)  # after a second of nothing
    assert duty.free_at() > 1e6 - 5_000


def test_what_cannot_have_happened_is_an_error() -> None:
    pacer = Pacer(1)
    with pytest.raises(ValueError, match="nothing had been launched"):
        pacer.completed(0.0)
    pacer.launched(0.0)
    with pytest.raises(ValueError, match="not allowed"):
        pacer.launched(1.0)
    with pytest.raises(ConfigError, match="lane: limit: 0 launches; accepted: at least 1"):
        Pacer(0)


@pytest.mark.parametrize("value", [-0.1, 1.5, "half", None, True, float("nan")])
def test_a_share_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="pace"):
        share_of(value, "order")


# -- feedback ----------------------------------------------------------------------------------------------


class Foreground:
    """Steps of three chunks that take 100, 200 and 100 us alone; the second suffers from company."""

    def __init__(self, feedback: Feedback, extra: tuple[float, ...] = (0.0, 1.0, 0.01)) -> None:
        self.feedback, self.extra, self.now = feedback, extra, 0.0
        self.launched_in: list[int] = []

    def steps(self, number: int) -> None:
        for _ in range(number):
            for chunk, usual in enumerate((100.0, 200.0, 100.0)):
                self.feedback.began(chunk, self.now)
                company = self.feedback.may_launch(self.now, 50.0)
                if company:
                    self.launched_in.append(chunk)
                took = usual * (1 + self.extra[chunk] * company)
                self.now += took
                self.feedback.ended(chunk, self.now, took, contended=company)


def test_the_background_waits_until_the_foregrounds_own_times_are_known() -> None:
    feedback = Feedback([False] * 3, probe_every=0)
    foreground = Foreground(feedback)
    foreground.steps(MIN_TIMES)
    assert foreground.launched_in == []
    assert [times.alone_us for times in feedback.chunks] == [100.0, 200.0, 100.0]
    foreground.steps(1)
    assert foreground.launched_in == [0, 1, 2]


def test_a_chunk_that_suffers_is_barred_and_the_others_are_not() -> None:
    feedback = Feedback([False] * 3)
    Foreground(feedback).steps(30)
    assert [times.barred for times in feedback.chunks] == [False, True, False]


def test_a_barred_chunk_is_tried_again_less_and_less_often_and_freed_once_it_suffers_no_more() -> None:
    feedback = Feedback([False] * 3, retry_after=20, probe_every=0)
    foreground = Foreground(feedback)
    foreground.steps(10)
    assert feedback.chunks[1].barred
    foreground.launched_in.clear()
    foreground.steps(15)
    assert 1 not in foreground.launched_in
    foreground.steps(15)
    assert foreground.launched_in.count(1) == MIN_TIMES  # tried, and barred again
    assert feedback.chunks[1].patience == 40
    foreground.extra = (0.0, 0.0, 0.0)
    foreground.steps(60)
    assert not feedback.chunks[1].barred


def test_all_reduces_are_barred_before_anything_is_known() -> None:
    feedback = Feedback([False, True, False])
    foreground = Foreground(feedback)
    foreground.steps(40)
    assert 1 not in foreground.launched_in


def test_work_that_would_reach_into_a_barred_chunk_is_held_back_in_time() -> None:
    feedback = Feedback([False, True, False], probe_every=0)
    Foreground(feedback).steps(MIN_TIMES)
    feedback.began(0, 1000.0)
    assert feedback.may_launch(1000.0, 90.0)
    assert not feedback.may_launch(1020.0, 90.0)  # chunk 0 ends at 1100
    feedback.began(2, 1300.0)
    assert feedback.may_launch(1300.0, 190.0)  # into the next step's chunk 0
    assert not feedback.may_launch(1300.0, 210.0)


def test_a_foreground_that_does_nothing_for_long_does_not_hold_the_background_back() -> None:
    feedback = Feedback([True])
    assert feedback.may_launch(0.0, 50.0)
    feedback.began(0, 0.0)
    assert not feedback.may_launch(10.0, 50.0)
    assert feedback.may_launch(MAX_SILENCE_US + 1.0, 50.0)


def test_now_and_then_a_step_is_the_foregrounds_alone() -> None:
    feedback = Feedback([False] * 3, probe_every=10)
    foreground = Foreground(feedback, (0.0, 0.0, 0.0))
    foreground.steps(20)
    before = len(foreground.launched_in)
    foreground.steps(10)
    assert len(foreground.launched_in) == before + 9 * 3


def test_the_slowdown_of_the_whole_step_is_told_without_what_is_barred() -> None:
    feedback = Feedback([False] * 3)
    assert feedback.slowdown() is None
    Foreground(feedback, (0.04, 1.0, 0.02)).steps(30)
    assert feedback.slowdown() == pytest.approx((0.04 * 100 + 0.02 * 100) / 400)


def test_the_referee_learns_how_long_the_backgrounds_pieces_take() -> None:
    referee = Referee(Pacer(2), Feedback([False, True], probe_every=0))
    for step in range(MIN_TIMES):
        for chunk in (0, 1):
            referee.began(chunk, 1000.0 * step + 300.0 * chunk)
            referee.ended(chunk, 1000.0 * step + 300.0 * (chunk + 1), 300.0)
    referee.began(0, 1e4)
    assert not referee.may_launch("piece", 1e4)  # 500 us are taken for granted; the chunk ends after 300
    referee.launched("piece", 1e4)
    referee.completed(1e4 + 40.0)
    assert referee.may_launch("piece", 1e4 + 40.0)


# -- admission ---------------------------------------------------------------------------------------------


def test_two_jobs_that_fit_are_admitted_and_one_that_does_not_is_refused_by_name() -> None:
    admit(Footprint("vgg", 10), Footprint("wrn", 20), device_bytes=40, reserve_bytes=10)
    with pytest.raises(ConfigError) as refused:
        admit(Footprint("vgg", 10), Footprint("wrn", 21), device_bytes=40, reserve_bytes=10)
    assert str(refused.value) == (
        "background job 'wrn': memory: 21 bytes at its peak; accepted: at most 20 bytes beside 'vgg' "
        "(10 bytes) on a device of 40 bytes"
    )
