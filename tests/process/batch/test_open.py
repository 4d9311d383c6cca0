"""Which batch system is found, and how its commands are run."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hpcsched.batch.command import run_command
from hpcsched.errors import BatchError


def test_importing_it_loads_little() -> None:
    script = "import sys, hpcsched.batch; print(*sys.modules)"
    loaded = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "subprocess",
        "msgspec",
        "numpy",
        "torch",
        "sqlalchemy",
        "datetime",
        "json",
        "click",
        "logging",
        "socket",
    }
    assert not heavy & set(loaded)


def test_commands() -> None:
    answer = run_command(
        ("sh", "-c", 'cat; echo "$A" >&2; exit 3'), environ={**os.environ, "A": "b"}, stdin="in"
    )
    assert (answer.code, answer.out, answer.err) == (3, "in", "b\n")
    with pytest.raises(BatchError, match="no-such-command: command not found"):
        run_command(("no-such-command",), environ={})


def test_a_command_that_hangs_ends_with_all_it_started() -> None:
    start = time.monotonic()
    with pytest.raises(BatchError, match="sh did not answer within"):
        run_command(("sh", "-c", "sleep 100 & wait"), environ=os.environ, timeout_s=0.2)
    assert time.monotonic() - start < 30


def test_complaints_are_one_line() -> None:
    answer = run_command(("sh", "-c", "echo; echo one >&2; echo two >&2; exit 1"), environ=os.environ)
    assert answer.complaint() == "one"
    assert run_command(("sh", "-c", "kill -9 $$"), environ=os.environ).complaint() == "signal 9 (SIGKILL)"
