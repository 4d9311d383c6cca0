"""Inputs that nobody meant: no traceback, one line, exit code 2, bounded time and memory (`make fuzz`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from tests.fuzz.planted import PLANTED
from tests.fuzz.targets import TARGETS


def fuzz(*words: object, check: bool = True) -> str:
    """What `python -m tests.fuzz` says; raises unless nothing is wrong."""
    argv = [sys.executable, "-m", "tests.fuzz", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode in ((0,) if check else (0, 1)), done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_some_inputs_of_each_quick_target(tmp_path: Path) -> None:
    """The same ones each time."""
    quick = [
        "pool",
        "search",
        "node",
        "to-head",
        "to-node",
        "join-file",
        "inbox",
        "contract",
        "burst",
        "trace",
        "arguments",
    ]
    said = fuzz(
        "--most", 40, "--seconds", 600, "--only", ",".join(quick), "--faults", tmp_path, "--at-once", 2
    )
    assert "0 faults" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_many_new_inputs(target: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--part"):
        pytest.skip("a part always tries the same ones: those of `make test`")
    first = int.from_bytes(os.urandom(4), "big")
    fuzz("--first", first, "--seconds", 60, "--busy", "--only", target, "--faults", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_put_in_on_purpose_is_found(bug: str, tmp_path: Path) -> None:
    target = PLANTED[bug].target
    limits = ("--busy", "--seconds", 120, "--cpu", 5, "--until-found")
    said = fuzz("--plant", bug, "--only", target, *limits, "--faults", tmp_path, check=False)
    assert "1 faults" in said.splitlines()[-2]
    (file,) = tmp_path.iterdir()
    assert fuzz("--replay", file).startswith("right: ")  # without the bug


@pytest.mark.slow
def test_an_input_is_made_again_from_its_name(tmp_path: Path) -> None:
    said = fuzz("--plant", "unit", "--only", "pool", "--until-found", "--faults", tmp_path, check=False)
    (file,) = tmp_path.iterdir()
    assert f"{file.name.removesuffix('.input')}: " in said
    assert fuzz("--replay", file).startswith("right: ")  # without the bug
    assert fuzz("--seed", file.name.removesuffix(".input")).startswith("right: ")
