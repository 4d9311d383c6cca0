"""tests/gpu: every API once; then once more with warnings as errors, for information."""

from __future__ import annotations

from gpu_day.found import Found
from gpu_day.testing import run_tests

TWO_RANKS = "tests/gpu/test_cuda_two_ranks.py"
"""A part of its own."""
LEAST_S = 20.0


def run(found: Found) -> None:
    """The benchmarks among them are parts of their own."""
    tests = ["tests/gpu", "-k", "not the_benchmark", f"--ignore={TWO_RANKS}"]
    run_tests(found, "plain", tests, within_s=found.left_s)
    if found.left_s > LEAST_S:
        run_tests(found, "strict", tests, within_s=found.left_s, warnings="error", judged=False)
