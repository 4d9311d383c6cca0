"""What is freed stays with the process, unless somebody has chosen otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from hpcsched.worker.process.memory import keep_freed_memory
from hpcsched.worker.process.startup import run_to_the_end

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    some = [bytearray(20 * 2**20) for _ in range(4)]

def main():
    kept = keep_freed_memory() if sys.argv[1] == "keep" else None
    for _ in range(5):
        step()
    before = faults()
    for _ in range(5):
        step()
    print(kept, faults() - before)
    return 0

run_to_the_end(main) if sys.argv[1] == "worker" else main()
"""
PAGES = 4 * 20 * 2**20 // 4096
"""That such a step needs, of the smallest size."""


def run(word: str, **variables: str) -> tuple[str, int]:
    """What it answers, and how many pages five steps had to be given."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, word],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_step_is_given_the_memory_of_the_last_one() -> None:
    kept, faults = run("keep")
    assert kept == "True"
    assert faults < PAGES // 100
    assert run("worker")[1] < PAGES // 100, "as all programs of the worker do"
    assert run("leave")[1] > 10 * max(1, faults)


@pytest.mark.parametrize(
    "chosen",
    [{"MALLOC_TRIM_THRESHOLD_": "100000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}],
    ids=["variable", "tunable"],
)
def test_what_somebody_has_chosen_stays(chosen: dict[str, str]) -> None:
    assert run("keep", **chosen)[0] == "False"
