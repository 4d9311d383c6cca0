"""Tests as a part of a day on a GPU: which outcomes are those of a machine that has one."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from gpudays import found

testing = import_module("gpu_day.testing")  # imports torch; gpudays has said where it is


@pytest.mark.parametrize(
    ("why", "code", "cpu", "tests", "skipped"),
    [
        ("needs two GPUs", 0, False, True, True),
        ("fewer than two MIG instances", 0, False, True, True),
        ("no NVIDIA GPU here", 5, True, None, None),
        ("no NVIDIA GPU here", 4, True, False, True),
        ("no NVIDIA GPU here", 5, False, False, False),
        ("torch sees no GPU here", 0, False, True, False),
    ],
)
def test_tests_that_see_no_gpu_have_not_passed_on_a_machine_that_has_one(
    tmp_path: Path, why: str, code: int, cpu: bool, tests: bool | None, skipped: bool | None
) -> None:
    lines = tmp_path / "lines"
    lines.write_text(
        json.dumps({"test": "tests/gpu/a.py::b", "outcome": "skipped", "why": f"Skipped: {why}"})
    )
    page = found.Found(tmp_path / "found.json", cpu=cpu, within_s=10.0)
    testing._note(page, "plain", lines, code, judged=True)
    assert [check.ok for check in page.checks] == [tests, skipped]
