"""Steps of a program that reports by the contract, or is seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpcsched.agent.progress import ProgressMeter
from hpcsched.contract.codec import MOST_STEPS
from hpcsched.contract.progress import Line


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def test_what_is_seen_is_progress_until_the_program_reports_itself(ends: tuple[int, int]) -> None:
    meter = ProgressMeter(ends[0])
    for report in (None, (40, 100.0), (40, 100.5), (60, 102.5), (60, 102.5), (30, 103.0)):
        meter.seen(report)
    assert meter.last is not None and meter.last.step == 60
    assert meter.rate == 10.0  # from when step 40 was last seen
    os.write(ends[1], b'{"step": 61, "t": 104.0}\n')
    assert meter.read()
    meter.seen((500, 105.0))
    assert meter.last.step == 61


def test_lines_that_are_no_report_do_not_count_as_one(ends: tuple[int, int]) -> None:
    meter = ProgressMeter(ends[0])
    os.write(ends[1], b"hello\n{}\n")
    assert meter.read()
    meter.seen((5, 1.0))
    assert meter.last is not None and meter.last.step == 5


def test_a_program_that_goes_back_says_so_and_is_believed(ends: tuple[int, int]) -> None:
    meter = ProgressMeter(ends[0])

    def says(*lines: Line) -> None:
        os.write(ends[1], b"".join(line.encode() for line in lines))
        assert meter.read()

    says(Line(50, 0.0, resumed=True), Line(51, 10.0), Line(100, 12.0))
    assert (meter.last, meter.again, meter.repeats) == (
        Line(100, 12.0),
        0,
        False,
    )  # it was the first to begin
    says(Line(70, 20.0))  # a lower step alone does not count
    assert (meter.last, meter.again) == (Line(100, 12.0), 0)
    assert not meter.new_repeats()
    says(Line(70, 20.0, resumed=True))
    assert meter.new_repeats() and not meter.new_repeats()
    assert meter.last is not None and (meter.last.step, meter.again, meter.repeats) == (70, 30, True)
    assert meter.rate is None  # the time that it took to begin again is no step's
    says(Line(71, 30.0), Line(91, 32.0))
    assert (meter.last, meter.again, meter.repeats, meter.rate) == (Line(91, 32.0), 30, True, 10.0)
    says(Line(40, 40.0, resumed=True), Line(101, 50.0))
    assert (meter.last, meter.again, meter.repeats) == (Line(101, 50.0), 81, False)
    says(*[Line(step, 60.0, resumed=not step) for step in (MOST_STEPS, 0, MOST_STEPS, 0)])
    assert meter.again == MOST_STEPS
    meter.restart()
    assert meter.again == 0


def test_an_attempt_that_another_agent_has_watched_may_have_gone_back_before(ends: tuple[int, int]) -> None:
    meter = ProgressMeter(ends[0])
    meter.begin(80, again=30)
    assert not meter.new_repeats()
    os.write(ends[1], Line(60, 1.0, resumed=True).encode())
    assert meter.read()
    assert meter.new_repeats() and (meter.again, meter.last) == (50, Line(60, 1.0, resumed=True))
