"""Schedules of faults on the virtual clock, and that they find faults which are put in on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.planted import FAULTS, Fault
from tests.chaos.virtual import day

ROOT = Path(__file__).resolve().parents[2]


def played(*words: object, seconds: float) -> None:
    """Play schedules in processes of their own."""
    command = [sys.executable, "-m", "tests.chaos", "--seconds", str(seconds), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_violated_in_the_first_schedules() -> None:
    played(seconds=8)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_to_plant_are_in_the_code_as_it_is(fault: Fault) -> None:
    assert fault.wrong in fault.planted((ROOT / "hpcsched" / fault.file).read_text())


@pytest.mark.slow
def test_a_day_needs_no_more_in_its_last_hours_than_in_its_first() -> None:
    violated, hours = day.played(24, every_s=20.0)
    assert violated == [] and len(hours) == 24
    assert hours[-1].ended > 4000
    assert max(hour.status_bytes for hour in hours) < 400_000
    assert max(hour.journal_bytes for hour in hours) < 3 * day.COMPACTED_BYTES
    early, late = hours[4:10], hours[-6:]
    assert sum(hour.calls for hour in late) < 1.2 * sum(hour.calls for hour in early)
    assert sum(hour.cpu_s for hour in late) < 2 * sum(hour.cpu_s for hour in early)


@pytest.mark.slow
def test_nothing_is_violated_in_schedules_that_are_new_each_day(pytestconfig: pytest.Config) -> None:
    in_part = pytestconfig.getoption("--part")  # which always tries the same ones
    played("--first", 10_000 if in_part else int(time.time() // 86400) * 100_000, seconds=240)
