"""Steps of a program that reports by the contract, or is seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpcsched.agent.progress import ProgressMeter


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
