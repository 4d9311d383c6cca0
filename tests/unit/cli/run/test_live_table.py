"""The table that `run` redraws fits its terminal, and keeps what people look for."""

from __future__ import annotations

import pytest

from hpcsched.cli.run.live_table import MOST_LINES, table
from hpcsched.core.machine import Machine
from hpcsched.testing.builders import Driver, a_job, a_profile

LONG = "a-training-with-a-name-of-35-letters"


def some(count: int, gpus: int = 64) -> Machine:
    jobs = [a_job(f"{LONG}-{n}", "m", gpus=1, steps=2000) for n in range(1, count + 1)]
    driver = Driver(*jobs, gpus=gpus, profiles=[a_profile("m", [2.0])])
    for job in jobs[:gpus]:
        driver.runs(job.name)
    for job in jobs[:3]:
        driver.reports(job.name, 500, rate=2.0)
    driver.now += 60
    return driver.machine


@pytest.mark.parametrize("width", [40, 60, 80, 100, 110, 130, 200])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_no_line_is_longer_than_the_terminal(width: int, count: int) -> None:
    lines = table(some(count), 60.0, width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 2 + min(count, MOST_LINES)


def test_at_80_columns_there_is_all_that_people_look_for() -> None:
    title, head, first, *_ = table(some(30, gpus=12), 60.0, 80)
    assert title == "1:00  12 running, 18 waiting, 0 ended; 0 of 12 GPUs free"
    assert head.split() == ["JOBID", "NAME", "ST", "TIME", "LEFT", "GPUS", "STEP"]
    assert first.split() == ["1", first.split()[1], "R", "1:00", "12:30", "0", "500/2000"]
    assert first.split()[1] == f"{LONG}-1"
    narrow = table(some(30, gpus=12), 60.0, 60)[2]
    assert narrow.split()[1] == "a-trainin~-letters-1" and narrow.split()[2:] == first.split()[2:]


def test_wider_ones_have_more_and_whole_names() -> None:
    _, head, first, *_ = table(some(30, gpus=12), 60.0, 200)
    assert head.split()[-4:] == ["ROLE", "STEP", "RATE", "PROGRESS"]
    assert f"{LONG}-1" in first and "2/s" in first and first.count("━") == 6
