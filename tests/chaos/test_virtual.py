"""Schedules of faults on the virtual clock, and that they find faults which are put in on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def played(*words: object, seconds: float) -> None:
    """Play schedules in processes of their own."""
    command = [sys.executable, "-m", "tests.chaos", "--seconds", str(seconds), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_violated_in_the_first_schedules() -> None:
    played(seconds=8)


@pytest.mark.slow
def test_nothing_is_violated_in_schedules_that_are_new_each_day() -> None:
    played("--first", int(time.time() // 86400) * 100_000, seconds=240)
